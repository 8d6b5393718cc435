"""Folder of images, with a table of questions (`metadata.csv`, `metadata.jsonl`) or with labels as subfolders.

    vlmrl rl --data.prompt_dataset my_pictures ...
    vlmrl rl --data.prompt_dataset 'flowers?question=Which flower is this?' ...

The layout is that of Hugging Face's `imagefolder`; a subfolder named like the split, such as `train/`, holds the split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlmrl.data.rows import Rows, RowView, load_rows
from vlmrl.errors import DataError

TABLES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")


def rows(*, path: str, split: str, seed: int, question: str = "") -> Rows:
    """Load the images of a split.

    With a table, its rows: `file_name` names the image of a row, `file_names` several. Without one, a row per image:
    its subfolder is the label, and `question` is the prompt of each image.

    Raises:
        DataError: there are no images, or there is neither a table nor a question.
    """
    root = Path(path).expanduser()
    folder = root / split if (root / split).is_dir() else root
    table = next((folder / name for name in TABLES if (folder / name).is_file()), None)
    if table is not None:
        return _from_table(root, table, split=split, seed=seed, question=question)
    return _from_names(root, folder, question)


def _from_table(root: Path, table: Path, *, split: str, seed: int, question: str) -> Rows:
    loaded = load_rows(str(table), split=split, max_samples=10**12, seed=seed)
    column = next((name for name in ("file_name", "file_names") if name in loaded.columns), None)
    if column is None:
        raise DataError(f"{table} has no column file_name with the image of each row")

    def convert(row: Any) -> dict[str, Any]:
        constant = {"input": question} if question else {}
        return {key: value for key, value in row.items() if key != column} | constant | {"images": row.get(column)}

    columns = dict.fromkeys([*loaded.columns, "images", *(["input"] if question else [])])
    del columns[column]
    return replace(
        loaded, name=root.name, rows=RowView(loaded, convert=convert), columns=tuple(columns), image_columns=("images",)
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
            f"folder {root} holds images but no {TABLES[0]} or {TABLES[1]} with the question about each: write "
            f"one, or give one question for all images, '{root}?question=What is this?'"
        )
    content: Sequence[dict[str, Any]] = [
        {"input": question, "images": str(file.relative_to(folder))}
        | ({"label": file.relative_to(folder).parts[0]} if file.parent != folder else {})
        for file in files
    ]
    columns = ("input", "images", *(["label"] if any("label" in row for row in content) else []))
    return Rows(name=root.name, rows=content, columns=columns, image_columns=("images",), root=folder)
