"""Geometry3K: 3,002 geometry questions with a drawing each (arXiv:2105.04165), as hiyouga/geometry3k on the Hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlmrl.data.rows import Converted, load_hub

HUB_ID = "hiyouga/geometry3k"


def rows(*, split: str, seed: int) -> Sequence[dict[str, Any]]:
    """The split as it is on the Hub: train, validation or test."""
    del seed
    return Converted(load_hub(HUB_ID, split=split).rows, convert)


def convert(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the Hub's as one of ours. Its question holds `<image>` where the drawing goes."""
    return {
        "input": str(row["problem"]).strip(),
        "label": str(row["answer"]).strip(),
        "images": list(row["images"]),
        "family": "geometry3k",
    }
