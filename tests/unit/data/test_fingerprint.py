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
from vlmrl.data import digests
from vlmrl.data.digests import RowHasher, digest_file, spaced_indices
from vlmrl.data.fingerprint import compare, fingerprint
from vlmrl.data.image_source import ImageAccess
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


def _max_rows(folder: Path) -> None:
    kept = content()
    write(folder, [row if i % 125 == 0 else row | {"input": "q????"} for i, row in enumerate(kept)])


def _picture(folder: Path) -> None:
    Image.new("RGB", (56, 56), "blue").save(folder / "a.png")


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (_one_row, r"mine\.jsonl has different content"),
        (_max_rows, r"mine\.jsonl has different content; of 256 rows mine:4 \(question\), .* and \d+ more differ"),
        (_picture, r"of 256 rows mine:0 \(images\), .* and 253 more differ"),
        (lambda folder: (folder / "a.png").unlink(), r"mine:0 \(images\)"),
    ],
    ids=["one row of the same length", "992 of 1000 rows", "an image", "an image that is gone"],
)
def test_changed_data_are_refused_and_named(
    change: Callable[[Path], None], names: str, folder: Path, vlm: Processor
) -> None:
    saved = state(folder, vlm)
    change(folder)
    with pytest.raises(DataError, match=rf"made with other data \(.*{names}.*start in a new output folder"):
        stream(folder, vlm).load_state(saved)


def test_moved_or_touched_data_are_the_same(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, vlm: Processor, caplog: pytest.LogCaptureFixture
) -> None:
    saved = state(folder, vlm)
    copy = tmp_path_factory.mktemp("copy")
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
        os.utime(copy / file.name, (7, 7))
    stream(copy, vlm).load_state(saved)
    assert caplog.text == ""


def test_a_checkpoint_of_an_older_version_has_only_names_and_sizes_compared(folder: Path, vlm: Processor) -> None:
    saved = state(folder, vlm)
    # As vlmrl wrote it before fingerprints had digests of files and rows.
    saved["data"] = saved["data"] | {"datasets": ["mine"], "rows": [COUNT], "content": ["0123456789abcdef"]}
    stream(folder, vlm).load_state(saved | {"drawn": 7, "position": 7})
    write(folder, content()[1:])
    with pytest.raises(DataError, match="mine has 999 rows instead of 1000"):
        stream(folder, vlm).load_state(saved)


def test_a_large_file_with_a_new_time_and_equal_blocks_is_a_warning(
    folder: Path, vlm: Processor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(digests, "_WHOLE_BYTES", 1000)
    saved = state(folder, vlm)
    os.utime(folder / "mine.jsonl", (7, 7))
    stream(folder, vlm).load_state(saved)
    assert "mine.jsonl was modified after the checkpoint; the blocks compared are unchanged" in caplog.text


def test_changes_in_the_first_and_last_block_of_a_large_file_are_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "_WHOLE_BYTES", 0)
    file = tmp_path / "large"
    size = 2000 * 64 * 2**10 + 5
    with file.open("wb") as handle:
        handle.truncate(size)
    before = digest_file(file)
    assert before is not None
    assert not before.is_whole
    for position in (0, 64 * 2**10 - 1, size - 1):
        with file.open("r+b") as handle:
            handle.seek(position)
            handle.write(b"x")
        after = digest_file(file)
        assert after is not None
        assert after.digest != before.digest
        assert after.size == before.size
        before = after


def test_many_files_share_the_number_of_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_WHOLE_BYTES", 2**20)
    monkeypatch.setattr(digests, "_NUM_UNREDUCED_FILES", 1)
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
    result = fingerprint(RowHasher(rows, {"input_key": "input", "label_key": None, "image_key": None}))
    assert not any(result["files"][str(file)][2] for file in files)
    assert sum(read) == 100 * 2 * digests._BLOCK, "the first and the last block"


def test_special_files_have_no_digest_and_do_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert digest_file(tmp_path / "pipe") is None
    assert digest_file(tmp_path / "gone") is None
    assert digest_file(Path("/dev/zero")) is None


@pytest.mark.parametrize(("count", "limit", "first"), [(1, 9, [0]), (9, 9, [0, 8, 4]), (1000, 5, [0, 999, 500])])
def test_spaced_indices_go_from_coarse_to_fine(count: int, limit: int, first: list[int]) -> None:
    result = spaced_indices(count, limit)
    assert len(result) == len(set(result)) == min(count, limit)
    assert sorted(result)[-1] == count - 1
    assert list(result[: len(first)]) == first


def test_digests_are_equal_in_another_process() -> None:
    """They depend neither on memory addresses nor on the order of a set."""
    code = (
        "import numpy as np; from PIL import Image\n"
        "from vlmrl.data.digests import RowHasher; from vlmrl.data.rows import Rows\n"
        "messages = [{'role': 'user', 'content': [{'image': Image.new('L', (2, 2))}, {'more': {'b', 'a', 'c'}}]}]\n"
        "rows = Rows('a', [{'q': messages, 'l': object(), 'i': [np.ones(2), Image.new('L', (1, 1)), b'7']}], ('q',))\n"
        "print(RowHasher(rows, {'input_key': 'q', 'label_key': 'l', 'image_key': 'i'}).digest(0))"
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
    assert outputs.pop().startswith("RowDigest(question='")


def test_images_in_messages_are_digested_by_content_and_forbidden_files_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    inside, outside = tmp_path / "mine" / "a.png", tmp_path / "b.png"
    messages = [{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "what?"}]}]
    rows = Rows("mine", [{"q": messages}, {"q": "what?", "i": str(outside)}], ("q", "i"))
    hasher = RowHasher(
        rows, {"input_key": "q", "label_key": None, "image_key": "i"}, ImageAccess.of(tmp_path / "mine", Columns())
    )
    digest_pairs = []
    for content in (b"red", b"blue"):
        inside.write_bytes(content)
        outside.write_bytes(content)
        digest_pairs.append((hasher.digest(0), hasher.digest(1)))
    assert digest_pairs[0][0] != digest_pairs[1][0]
    assert digest_pairs[0][1] == digest_pairs[1][1] is not None


GENERATED = [{"q": f"q{i}", "a": f"a{i}", "worked": f"w{i}", "hint": {"h": i}} for i in range(40)]


def generated(rows: list[dict[str, Any]], **keys: str | None) -> dict[str, Any]:
    """The fingerprint of rows without files, as it is read from a checkpoint."""
    source = Rows(name="made", rows=rows, columns=("q", "a", "worked", "hint"), is_generated=True)
    columns = {"input_key": "q", "label_key": None, "image_key": None, "output_key": "a"} | keys
    return json.loads(json.dumps(fingerprint(RowHasher(source, columns))))


@pytest.mark.parametrize(
    ("other", "parts"),
    [
        (generated([row | {"a": "?"} for row in GENERATED]), "response"),
        (generated([row | {"hint": {"h": "?"}} for row in GENERATED]), "other columns"),
        (generated(GENERATED, output_key="worked"), "response and other columns"),
        (generated(GENERATED, label_key="hint.h"), "label and other columns"),
    ],
    ids=["response", "column of a reward", "response in another column", "label in another column"],
)
def test_all_columns_of_rows_without_files_are_compared(other: dict[str, Any], parts: str) -> None:
    (line,) = compare([generated(GENERATED)], [other]).certain
    assert line.startswith(f"of 16 rows made:0 ({parts}), ")
    assert compare([other], [other]).certain == []


def test_a_checkpoint_with_fewer_digests_per_row_has_those_compared() -> None:
    saved = generated(GENERATED)
    saved["rows"] = {row: digests[:3] for row, digests in saved["rows"].items()}
    assert compare([saved], [generated([row | {"a": "?"} for row in GENERATED])]).certain == []
    assert compare([saved], [generated([row | {"q": "?"} for row in GENERATED])]).certain
