"""Which groups are worth learning from (DAPO's dynamic sampling, arXiv:2503.14476)."""

from __future__ import annotations

_ROUNDING = 1e-6


def keeps(mean: float, low: float, high: float) -> bool:
    """Whether a group whose scores have this mean teaches something: `low < mean < high`, by more than rounding.

    With a reward of 0 or 1 and the bounds 0 and 1 the groups that are all wrong or all right are left out. Weights of
    0.7, 0.2 and 0.1 add up to 0.9999999999999999.

    Raises:
        ValueError: the range is empty.
    """
    if not low < high:
        raise ValueError(f"no mean lies between {low} and {high}")
    return low + _ROUNDING < mean < high - _ROUNDING
