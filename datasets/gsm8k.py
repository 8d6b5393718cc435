"""GSM8K: 8,500 word problems of grade-school arithmetic (arXiv:2110.14168), openai/gsm8k on the Hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlmrl.data.rows import Converted, load_hub

HUB_ID = "openai/gsm8k"


def rows(*, split: str, seed: int) -> Sequence[dict[str, Any]]:
    """The split as it is on the Hub: train or test."""
    del seed
    return Converted(load_hub(HUB_ID, split=split, config="main").rows, convert)


def convert(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the Hub's as one of ours; its answer is a worked solution that ends in `#### 42`."""
    solution, _, final = str(row["answer"]).rpartition("####")
    label = final.strip().replace(",", "")
    return {
        "input": str(row["question"]).strip(),
        "label": label,
        "answer": f"{solution.strip()}\n\\boxed{{{label}}}",
        "family": "gsm8k",
    }
