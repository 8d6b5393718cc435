"""Which groups are worth learning from (DAPO's dynamic sampling, arXiv:2503.14476)."""

from __future__ import annotations


def keeps(mean: float, low: float, high: float) -> bool:
    """Whether a group whose scores have this mean teaches something: `low < mean < high`, both strictly.

    With a reward of 0 or 1 and the bounds 0 and 1 the groups that are all wrong or all right are left out.

    Raises:
        ValueError: the range is empty.
    """
    if not low < high:
        raise ValueError(f"no mean lies between {low} and {high}")
    return low < mean < high
