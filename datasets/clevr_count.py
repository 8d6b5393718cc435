"""CLEVR counting: the number of objects in a rendered scene, from leonardPKU/clevr_cogen_a_train on the Hub."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from vlmrl.data.rows import RowView, load_hub

HUB_ID = "leonardPKU/clevr_cogen_a_train"
NUM_TEST = 1000
"""The Hub has only a training split; its last rows are used as the test split."""

_TAGGED = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL)


def rows(*, split: str, seed: int) -> Sequence[dict[str, Any]]:
    """Load a split: test is the last 1,000 rows, train all others. Raises DataError for any other split."""
    del seed
    slices = {"train": f"train[:-{NUM_TEST}]", "test": f"train[-{NUM_TEST}:]"}
    return RowView(load_hub(HUB_ID, split=slices.get(split, split)).rows, convert=convert)


def convert(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row of the Hub; its solution has the form `<answer> 3 </answer>`."""
    solution = str(row["solution"])
    match = _TAGGED.search(solution)
    return {
        "input": str(row["problem"]).strip(),
        "label": match[1] if match else solution.strip(),
        "images": [row["image"]],
        "family": "clevr_count",
    }
