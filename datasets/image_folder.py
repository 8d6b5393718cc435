"""A folder of images: a table in it (`metadata.csv`, `metadata.jsonl`) says the rest, or subfolders are the labels.

    vlmrl rl --data.prompt_dataset my_pictures ...
    vlmrl rl --data.prompt_dataset 'flowers?question=Which flower is this?' ...

The layout is that of Hugging Face's `imagefolder`; a subfolder called like the split, `train/`, is the split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlmrl.data.rows import Converted, Rows, load_rows
from vlmrl.errors import DataError

TABLES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")


def rows(*, path: str, split: str, seed: int, question: str = "") -> Rows:
    """The images of a split. With a table, its rows: `file_name` is the image, `file_names` several.

    Without one, an image per row: the label is the subfolder that it lies in, and `question` asks about each.
    Raises DataError when there are no images, or nothing says what is asked about them.
    """
    root = Path(path).expanduser()
    folder = root / split if (root / split).is_dir() else root
    table = next((folder / name for name in TABLES if (folder / name).is_file()), None)
    if table is not None:
        return _from_table(root, table, split=split, seed=seed, question=question)
    return _from_names(root, folder, question)


def _from_table(root: Path, table: Path, *, split: str, seed: int, question: str) -> Rows:
    found = load_rows(str(table), split=split, max_samples=10**12, seed=seed)
    column = next((name for name in ("file_name", "file_names") if name in found.columns), None)
    if column is None:
        raise DataError(f"{table} has no column file_name, which says whose image a row is of")

    def convert(row: Any) -> dict[str, Any]:
        asked = {"input": question} if question else {}
        return {key: value for key, value in row.items() if key != column} | asked | {"images": row.get(column)}

    columns = dict.fromkeys([*found.columns, "images", *(["input"] if question else [])])
    del columns[column]
    return replace(
        found, name=root.name, rows=Converted(found, convert), columns=tuple(columns), image_columns=("images",)
    )


def _from_names(root: Path, folder: Path, question: str) -> Rows:
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    if not files:
        raise DataError(
            f"folder {root} was not written by save_to_disk (it has no dataset_info.json or dataset_dict.json), and "
            f"holds no images ({', '.join(SUFFIXES)})"
        )
    if not question:
        raise DataError(
            f"folder {root} holds images and no {TABLES[0]} or {TABLES[1]} that says what is asked about each: write "
            f"one, or ask the same about all, '{root}?question=What is this?'"
        )
    content: Sequence[dict[str, Any]] = [
        {"input": question, "images": str(file.relative_to(folder))}
        | ({"label": file.relative_to(folder).parts[0]} if file.parent != folder else {})
        for file in files
    ]
    columns = ("input", "images", *(["label"] if any("label" in row for row in content) else []))
    return Rows(name=root.name, rows=content, columns=columns, image_columns=("images",), root=folder)
