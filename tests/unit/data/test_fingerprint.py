import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vlmrl.config.data import Columns
from vlmrl.data import marks
from vlmrl.data.fingerprint import fingerprint
from vlmrl.data.image_source import Reach
from vlmrl.data.marks import Marked, mark_file, spread
from vlmrl.data.prompts import PromptStream
from vlmrl.data.rows import Rows, load_all
from vlmrl.errors import DataError
from vlmrl.plugins import Processor

COUNT = 1000


def content(**changes: Any) -> list[dict[str, Any]]:
    return [{"input": f"q{i:04}", "label": f"{i:04}", "images": ["a.png"]} | changes for i in range(COUNT)]


def write(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))


def state(folder: Path, processor: Processor) -> dict[str, Any]:
    return json.loads(json.dumps(stream(folder, processor).state()))


def stream(folder: Path, processor: Processor) -> PromptStream:
    sources = load_all(str(folder / "mine.jsonl"), split="train", max_samples=10**6, seed=0)
    return PromptStream(sources, probs=None, processor=processor, columns=Columns(), seed=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Image.new("RGB", (56, 56), "red").save(tmp_path / "a.png")
    write(tmp_path, content())
    return tmp_path


def _one_row(folder: Path) -> None:
    rows = content()
    rows[333]["label"] = "9999"
    write(folder, rows)


def _most_rows(folder: Path) -> None:
    kept = content()
    write(folder, [row if i % 125 == 0 else row | {"input": "q????"} for i, row in enumerate(kept)])


def _picture(folder: Path) -> None:
    Image.new("RGB", (56, 56), "blue").save(folder / "a.png")


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (_one_row, r"mine\.jsonl has other content"),
        (_most_rows, r"mine\.jsonl has other content; of 256 rows mine:4 \(question\), .* and \d+ more differ"),
        (_picture, r"of 256 rows mine:0 \(images\), .* and 253 more differ"),
        (lambda folder: (folder / "a.png").unlink(), r"mine:0 \(images\)"),
    ],
    ids=["one row of the same length", "992 of 1000 rows", "an image", "an image that is gone"],
)
def test_changed_data_are_refused_by_name(
    change: Callable[[Path], None], names: str, folder: Path, vlm: Processor
) -> None:
    saved = state(folder, vlm)
    change(folder)
    with pytest.raises(DataError, match=rf"made with other data \(.*{names}.*start in a new output folder"):
        stream(folder, vlm).load_state(saved)


def test_the_same_data_elsewhere_and_at_another_time_are_the_same(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, vlm: Processor, caplog: pytest.LogCaptureFixture
) -> None:
    saved = state(folder, vlm)
    copy = tmp_path_factory.mktemp("copy")
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
        os.utime(copy / file.name, (7, 7))
    stream(copy, vlm).load_state(saved)
    assert caplog.text == ""


def test_of_a_checkpoint_of_an_older_version_names_and_rows_are_compared(folder: Path, vlm: Processor) -> None:
    saved = state(folder, vlm)
    # As vlmrl wrote it before files and rows had marks of their own.
    saved["data"] = saved["data"] | {"datasets": ["mine"], "rows": [COUNT], "content": ["0123456789abcdef"]}
    stream(folder, vlm).load_state(saved | {"drawn": 7, "position": 7})
    write(folder, content()[1:])
    with pytest.raises(DataError, match="mine has 999 rows instead of 1000"):
        stream(folder, vlm).load_state(saved)


def test_of_a_large_file_blocks_are_read_and_a_later_time_is_told(
    folder: Path, vlm: Processor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(marks, "_WHOLE_BYTES", 1000)
    saved = state(folder, vlm)
    os.utime(folder / "mine.jsonl", (7, 7))
    stream(folder, vlm).load_state(saved)
    assert "mine.jsonl was written since the checkpoint; what was read of it is as before" in caplog.text


def test_blocks_of_a_large_file_show_what_changed_in_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "_WHOLE_BYTES", 0)
    file = tmp_path / "large"
    size = 2000 * 64 * 2**10 + 5
    with file.open("wb") as handle:
        handle.truncate(size)
    before = mark_file(file)
    assert before is not None
    assert not before.is_whole
    for place in (0, 64 * 2**10 - 1, size - 1):
        with file.open("r+b") as handle:
            handle.seek(place)
            handle.write(b"x")
        after = mark_file(file)
        assert after is not None
        assert after.digest != before.digest
        assert after.size == before.size
        before = after


def test_many_files_share_what_is_read_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "_WHOLE_BYTES", 2**20)
    monkeypatch.setattr(marks, "_MANY", 1)
    files = tuple(tmp_path / str(number) for number in range(100))
    for file in files:
        with file.open("wb") as handle:
            handle.truncate(2**20)
    read: list[int] = []
    pread = os.pread

    def counted(*where: int) -> bytes:
        content = pread(*where)
        read.append(len(content))
        return content

    monkeypatch.setattr(os, "pread", counted)
    rows = Rows(name="shards", rows=[{"input": "q"}], columns=("input",), files=files)
    found = fingerprint(Marked(rows, {"input_key": "input", "label_key": None, "image_key": None}))
    assert not any(found["files"][str(file)][2] for file in files)
    assert sum(read) == 100 * 2 * marks._BLOCK, "the first and the last block"


def test_what_is_no_regular_file_is_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert mark_file(tmp_path / "pipe") is None
    assert mark_file(tmp_path / "gone") is None
    assert mark_file(Path("/dev/zero")) is None


@pytest.mark.parametrize(("count", "most", "first"), [(1, 9, [0]), (9, 9, [0, 8, 4]), (1000, 5, [0, 999, 500])])
def test_rows_to_look_at_are_spread_from_coarse_to_fine(count: int, most: int, first: list[int]) -> None:
    found = spread(count, most)
    assert len(found) == len(set(found)) == min(count, most)
    assert sorted(found)[-1] == count - 1
    assert list(found[: len(first)]) == first


def test_marks_are_the_same_in_another_process() -> None:
    """Nothing of them depends on a place in memory or on the order of a set."""
    code = (
        "import numpy as np; from PIL import Image\n"
        "from vlmrl.data.marks import Marked; from vlmrl.data.rows import Rows\n"
        "said = [{'role': 'user', 'content': [{'image': Image.new('L', (2, 2))}, {'more': {'b', 'a', 'c'}}]}]\n"
        "rows = Rows('mine', [{'q': said, 'l': object(), 'i': [np.ones(2), Image.new('L', (1, 1)), b'7']}], ('q',))\n"
        "print(Marked(rows, {'input_key': 'q', 'label_key': 'l', 'image_key': 'i'}).mark(0))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert outputs.pop().startswith("RowMark(question='")


def test_images_inside_messages_are_known_by_content_and_files_out_of_reach_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    inside, outside = tmp_path / "mine" / "a.png", tmp_path / "b.png"
    said = [{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "what?"}]}]
    rows = Rows("mine", [{"q": said}, {"q": "what?", "i": str(outside)}], ("q", "i"))
    marked = Marked(
        rows, {"input_key": "q", "label_key": None, "image_key": "i"}, Reach.of(tmp_path / "mine", Columns())
    )
    marks = []
    for content in (b"red", b"blue"):
        inside.write_bytes(content)
        outside.write_bytes(content)
        marks.append((marked.mark(0), marked.mark(1)))
    assert marks[0][0] != marks[1][0]
    assert marks[0][1] == marks[1][1] is not None
