"""GSM8K: 8,500 grade-school math word problems (arXiv:2110.14168), openai/gsm8k on the Hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlmrl.data.rows import RowView, load_hub

HUB_ID = "openai/gsm8k"


def rows(*, split: str, seed: int) -> Sequence[dict[str, Any]]:
    """Load a split of the Hub: train or test."""
    del seed
    return RowView(load_hub(HUB_ID, split=split, config="main").rows, convert=convert)


def convert(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row of the Hub; its answer is a worked solution that ends in `#### 42`."""
    solution, _, final = str(row["answer"]).rpartition("####")
    label = final.strip().replace(",", "")
    return {
        "input": str(row["question"]).strip(),
        "label": label,
        "answer": f"{solution.strip()}\n\\boxed{{{label}}}",
        "family": "gsm8k",
    }
