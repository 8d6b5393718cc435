"""Which groups are worth learning from (DAPO's dynamic sampling, arXiv:2503.14476)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

_ROUNDING = 1e-6
"""Weights of 0.7, 0.2 and 0.1 add up to 0.9999999999999999: rewards that are no further apart are the same."""


def teaches(
    rewards: Float[Tensor, "N G"],
    *,
    step_rewards: Float[Tensor, "N G"] | None = None,
    scored: Bool[Tensor, "N G"] | None = None,
) -> Bool[Tensor, " N"]:
    """Groups in which at least two scored responses are worth different amounts, by more than 1e-6.

    `rewards` are shaped; `step_rewards` is what a process reward model pays for all steps of a response together. The
    only rule for what a group teaches: dynamic filtering, the group estimators and `group/constant_fraction` ask it.
    """
    totals = rewards.double() if step_rewards is None else rewards.double() + step_rewards.double()
    is_unscored = torch.zeros_like(totals, dtype=torch.bool) if scored is None else ~scored
    highest = totals.masked_fill(is_unscored, -torch.inf).amax(dim=1)
    lowest = totals.masked_fill(is_unscored, torch.inf).amin(dim=1)
    return highest - lowest > _ROUNDING


def is_within(mean: float, low: float, high: float) -> bool:
    """Whether `low < mean < high`, by more than rounding, for the mean of a group's total rewards.

    Raises:
        ValueError: the range is empty.
    """
    if not low < high:
        raise ValueError(f"no mean lies between {low} and {high}")
    return low + _ROUNDING < mean < high - _ROUNDING
