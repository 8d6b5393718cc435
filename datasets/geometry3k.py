"""Geometry3K: 3,002 geometry questions with drawings (arXiv:2105.04165), hiyouga/geometry3k on the Hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlmrl.data.rows import RowView, load_hub

HUB_ID = "hiyouga/geometry3k"


def rows(*, split: str, seed: int) -> Sequence[dict[str, Any]]:
    """Load a split of the Hub: train, validation or test."""
    del seed
    return RowView(load_hub(HUB_ID, split=split).rows, convert=convert)


def convert(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row of the Hub; its question contains `<image>`."""
    return {
        "input": str(row["problem"]).strip(),
        "label": str(row["answer"]).strip(),
        "images": list(row["images"]),
        "family": "geometry3k",
    }
