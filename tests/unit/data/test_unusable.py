import io
import json
import logging
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

from vlmrl.config.data import Columns
from vlmrl.data.prompts import PromptStream
from vlmrl.data.rows import Rows, load_rows
from vlmrl.data.unusable import UnusableError, unusable_on_error
from vlmrl.errors import ConfigError, DataError
from vlmrl.plugins import Processor
from vlmrl.types import Prompt


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


@pytest.fixture(scope="module")
def not_http() -> Iterator[str]:
    """Address of a server that does not speak HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def respond() -> None:
            while True:
                try:
                    with server.accept()[0] as client:
                        client.sendall(b"SSH-2.0-nothing\r\n\r\n")
                except OSError:  # the server is closed
                    return

        threading.Thread(target=respond, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/a.png"


def usable(content: Sequence[Any], processor: Processor, **settings: Any) -> tuple[list[Prompt], PromptStream]:
    columns = tuple(dict.fromkeys(key for row in content if isinstance(row, dict) for key in row))
    stream = PromptStream(
        [Rows(name="mine", rows=content, columns=columns)],
        probs=None,
        processor=processor,
        columns=Columns(max_dropped_fraction=1.0, **settings),
        seed=0,
    )
    return stream.all_prompts(len(content)), stream


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"images": ["http://a b/c.png"]}, "image unusable"),
        ({"images": ["~nosuchuser/x.png"]}, "image unusable"),
        ({"images": ["a\0b.png"]}, "image unusable"),
        ({"images": ["\ud800.png"]}, "image unusable"),
        ({"images": [{"bytes": 7}]}, "image unusable"),
        ({"images": np.zeros((2, 2))}, "image unusable"),
        ({"input": nested(600)}, "row unreadable"),
        ({"extra": nested(600)}, "row unreadable"),
        ({"label": nested(600)}, "row unreadable"),
        ({"extra": nested(99)}, "row unreadable"),
        ({"extra": {"a": "\udfff"}}, "row unreadable"),
        ({"label": "\ud800"}, "label unusable"),
        ({"label": b"4"}, "label unusable"),
        ({"input": "a \ud800"}, "question unusable"),
        ({"input": np.zeros(3)}, "row unreadable"),
        ({"input": 7}, "question unusable"),
        ({"input": [{"role": None, "content": "a"}]}, "question unusable"),
        ({"input": [{"role": ["user"], "content": "a"}]}, "question unusable"),
        ({"input": [{"role": "user", "content": "\ud800"}]}, "question unusable"),
        ([1, 2], "row unreadable"),
        (None, "row unreadable"),
    ],
)
def test_any_error_of_a_row_drops_only_that_row(
    row: Any, kind: str, vlm: Processor, caplog: pytest.LogCaptureFixture
) -> None:
    whole = {"input": "fine", "label": "1", "images": [], "extra": 1}
    bad = whole | row if isinstance(row, dict) else row
    with caplog.at_level(logging.WARNING):
        prompts, stream = usable([whole, bad, whole], vlm)
    assert [prompt.source for prompt in prompts] == ["mine:0", "mine:2"]
    assert stream.dropped == {kind: 1}
    (record,) = caplog.records
    assert record.getMessage().startswith(f"row mine:1 dropped, {kind}: ")
    assert record.getMessage().isprintable()


def test_a_server_that_does_not_speak_http_drops_the_row(vlm: Processor, not_http: str) -> None:
    prompts, stream = usable([{"input": "a", "images": []}, {"input": "b", "images": [not_http]}], vlm)
    assert len(prompts) == 1
    assert stream.dropped == {"image unusable": 1}


def test_a_warning_about_a_row_is_one_printable_line(vlm: Processor, caplog: pytest.LogCaptureFixture) -> None:
    name = "img[/x]\n\x1b]0;mine\x07" + "y" * 10_000 + ".png"
    with caplog.at_level(logging.WARNING):
        usable([{"input": "a", "images": []}, {"input": "b", "images": [name]}], vlm)
    (record,) = caplog.records
    assert record.getMessage().isprintable()
    assert "img[/x]\\n\\x1b]0;mine\\x07" in record.getMessage()
    assert len(record.getMessage()) < 700


def test_errors_in_settings_are_not_errors_of_the_row() -> None:
    with pytest.raises(ConfigError), unusable_on_error("question unusable"):
        raise ConfigError("no chat template")
    for error in (DataError("x"), ValueError("x"), MemoryError(), RecursionError()):
        with pytest.raises(UnusableError), unusable_on_error("question unusable"):
            raise error


def test_bad_first_rows_are_dropped(tmp_path: Path, text_model: Processor) -> None:
    lines = ["[" * 100_000, "no json", "7", json.dumps({"input": "a"}), json.dumps({"input": "b"})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.json").write_text(json.dumps([7, None, {"input": "a"}]))
    for file, dropped, kept in (("a.jsonl", 3, 2), ("b.json", 2, 1)):
        rows = load_rows(str(tmp_path / file), split="train", max_samples=9, seed=0)
        assert rows.columns == ("input",)
        stream = PromptStream(
            [rows], probs=None, processor=text_model, columns=Columns(max_dropped_fraction=1.0), seed=0
        )
        assert len(stream.all_prompts(9)) == kept
        assert stream.dropped == {"row unreadable": dropped}


def test_an_image_inside_a_struct_is_left_encoded(
    tmp_path: Path, text_model: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library would decode it when the row is read, without any bound, and a damaged one would end the run."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    good = io.BytesIO()
    Image.new("RGB", (5, 5)).save(good, "PNG")
    content = [{"bytes": good.getvalue(), "path": None}, {"bytes": b"\x89PNG cut", "path": None}]
    features = datasets.Features(
        {
            "input": datasets.Value("string"),
            "shown": {"image": datasets.Image(), "deep": datasets.List({"image": datasets.Image()})},
        }
    )
    table = {"input": ["a", "b"], "shown": [{"image": image, "deep": [{"image": image}]} for image in content]}
    datasets.Dataset.from_dict(table, features=features).save_to_disk(tmp_path / "saved")
    rows = load_rows(str(tmp_path / "saved"), split="train", max_samples=9, seed=0)
    assert rows[1]["shown"]["image"]["bytes"] == rows[1]["shown"]["deep"][0]["image"]["bytes"] == b"\x89PNG cut"
    stream = PromptStream([rows], probs=None, processor=text_model, columns=Columns(), seed=0)
    assert [prompt.metadata for prompt in stream.all_prompts(9)] == [{}, {}]
