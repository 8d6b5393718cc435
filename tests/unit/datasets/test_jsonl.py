import io
import json
from pathlib import Path

import datasets
import pytest
from PIL import Image

from vlmrl.data.rows import Rows, load_rows
from vlmrl.errors import DataError


def load(path: Path, split: str = "train") -> Rows:
    return load_rows(str(path), split=split, max_samples=10**9, seed=0)


def test_each_line_is_a_row(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"input": "é", "label": 1}\n\n{"input": [{"role": "user", "content": "b"}], "images": ["b.png"]}')
    rows = load(file)
    assert rows.name == "mine"
    assert rows.root == tmp_path
    assert rows.columns == ("input", "label", "images")
    assert rows[0] == {"input": "é", "label": 1}
    assert rows[1]["images"] == ["b.png"]
    assert len(rows[0:9]) == len(rows) == 2


def test_a_broken_line_is_an_unreadable_row(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"input": "a"}\n{"input": \n[1]\n')
    rows = load(file)
    for row, message in [(1, "row 1: not JSON"), (2, "row 2: a JSON object is expected, not list")]:
        with pytest.raises(DataError, match=message):
            rows[row]


def test_json_may_be_a_list_a_list_per_split_or_lines(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps([{"input": "a"}, {"input": "b"}]))
    assert [row["input"] for row in load(file)] == ["a", "b"]
    file.write_text(json.dumps({"train": [{"input": "a"}], "test": [{"input": "t"}], "version": 3}))
    assert [row["input"] for row in load(file, "test")] == ["t"]
    with pytest.raises(
        DataError, match=r"no split 'dev'; it has: train, test: set data\.prompt_split \(or eval\.split\) to train"
    ):
        load(file, "dev")
    file.write_text('{"input": "a"}\n{"input": "b"}\n')
    assert [row["input"] for row in load(file)] == ["a", "b"]


def test_parquet_holds_images_as_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    buffer = io.BytesIO()
    Image.new("RGB", (5, 5), "red").save(buffer, "PNG")
    file = tmp_path / "mine.parquet"
    content = {"input": ["a", "b"], "images": [[{"bytes": buffer.getvalue(), "path": None}], []]}
    datasets.Dataset.from_dict(content).to_parquet(file)
    rows = load(file)
    assert rows.columns == ("input", "images")
    assert rows[0]["images"][0]["bytes"] == buffer.getvalue()
    assert rows[1] == {"input": "b", "images": []}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.jsonl", None, "does not exist"),
        ("mine.jsonl", "", "is empty"),
        ("mine.jsonl", "\n\n", "has no rows"),
        ("mine.jsonl", "no json\n", "row 0: not JSON"),
        ("mine.json", "[]", "has no rows"),
        ("mine.json", "[1, 2]", "a list of JSON objects is expected"),
        ("mine.json", "[1", "is not JSON"),
        ("mine.json", '{"input": "a"}', "no split 'train'; it has: none"),
        ("mine.parquet", "text", "not a readable parquet file"),
    ],
)
def test_files_that_cannot_be_used(
    name: str, content: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        load(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_rows_under_another_key_are_an_error_that_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text('{"data": [{"input": "a"}]}')
    with pytest.raises(DataError, match=r"no split 'train'; it has: data: set data\.prompt_split .* to data$"):
        load(tmp_path / "mine.json")
    assert load(tmp_path / "mine.json", "data")[0] == {"input": "a"}


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf_16_is_refused_with_the_command_that_converts_it(tmp_path: Path, encoding: str) -> None:
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    (tmp_path / "mine.jsonl").write_bytes((mark + '{"input": "a"}\n').encode(encoding))
    with pytest.raises(DataError, match=r"mine\.jsonl is UTF-16: convert it to UTF-8 \(iconv -f UTF-16 -t UTF-8"):
        load(tmp_path / "mine.jsonl")


def test_another_suffix_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.xlsx").write_text("a,b")
    with pytest.raises(DataError, match=r"its name must end in .jsonl, .json, .parquet, .csv, .tsv"):
        load_rows(f"jsonl?path={tmp_path}/mine.xlsx", split="train", max_samples=9, seed=0)


@pytest.mark.parametrize("name", ["a[1].parquet", "a*.parquet", "a{1,2}.parquet", "[a].parquet"])
def test_a_name_is_not_taken_as_a_pattern(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a pattern it would match another file, `a1.parquet`."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for file in (name, "a1.parquet", "a.parquet"):
        datasets.Dataset.from_dict({"input": [file]}).to_parquet(tmp_path / file)
    rows = load(tmp_path / name)
    assert [row["input"] for row in rows] == [name]
    assert rows.files == (tmp_path / name,)
