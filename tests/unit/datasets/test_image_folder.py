from pathlib import Path

import pytest
from PIL import Image

from vlmrl.data.rows import Rows, load_rows
from vlmrl.errors import DataError


def load(spec: object, split: str = "train") -> Rows:
    return load_rows(str(spec), split=split, max_samples=10**9, seed=0)


def draw(*files: Path) -> None:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(file)


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_table_holds_the_question_about_each_image(tmp_path: Path, split: str) -> None:
    folder = tmp_path / "pics"
    draw(folder / "train/a.png", folder / "test/sub/b.png")
    (folder / "train/metadata.csv").write_text("file_name,input,label\na.png,What?,7\n")
    (folder / "test/metadata.jsonl").write_text(
        '{"file_names": ["sub/b.png", "sub/b.png"], "input": "Same?", "label": 1}'
    )
    rows = load(folder, split)
    assert rows.name == "pics"
    assert rows.root == folder / split
    expected = {
        "train": {"input": "What?", "label": "7", "images": "a.png"},
        "test": {"input": "Same?", "label": 1, "images": ["sub/b.png", "sub/b.png"]},
    }
    assert list(rows) == [expected[split]]
    assert set(rows.columns) == {"input", "label", "images"}


def test_subfolders_are_labels_and_the_option_is_the_question(tmp_path: Path) -> None:
    folder = tmp_path / "flowers"
    draw(folder / "rose/2.JPG", folder / "rose/deep/1.png", folder / "lily/a.webp")
    (folder / "rose/notes.txt").write_text("no image")
    rows = load(f"{folder}?question=Which flower, then?")
    assert [(row["label"], row["images"]) for row in rows] == [
        ("lily", "lily/a.webp"),
        ("rose", "rose/2.JPG"),
        ("rose", "rose/deep/1.png"),
    ]
    assert {row["input"] for row in rows} == {"Which flower, then?"}
    assert rows.root == folder


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"not written by save_to_disk .*holds no images"):
        load(tmp_path)
    draw(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"no metadata\.jsonl or metadata\.csv .*question=What is this\?'"):
        load(tmp_path)
    (tmp_path / "metadata.csv").write_text("file,input\na.png,q\n")
    with pytest.raises(DataError, match="no column file_name"):
        load(tmp_path)
