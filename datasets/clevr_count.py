"""CLEVR counting: how many objects a rendered scene holds, in the form of leonardPKU/clevr_cogen_a_train on the Hub."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from vlmrl.data.rows import Converted, load_hub

HUB_ID = "leonardPKU/clevr_cogen_a_train"
NUM_TEST = 1000
"""The Hub has a training split only: its last rows are our test split."""

_TAGGED = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL)


def rows(*, split: str, seed: int) -> Sequence[dict[str, Any]]:
    """train, or test: the last 1,000 rows, which train then lacks. DataError for another split."""
    del seed
    own = {"train": f"train[:-{NUM_TEST}]", "test": f"train[-{NUM_TEST}:]"}
    return Converted(load_hub(HUB_ID, split=own.get(split, split)).rows, convert)


def convert(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the Hub's as one of ours; its solution reads `<answer> 3 </answer>`."""
    solution = str(row["solution"])
    found = _TAGGED.search(solution)
    return {
        "input": str(row["problem"]).strip(),
        "label": found[1] if found else solution.strip(),
        "images": [row["image"]],
        "family": "clevr_count",
    }
