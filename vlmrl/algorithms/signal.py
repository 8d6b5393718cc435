"""Learning signal of a group: whether its rewards differ, and whether their mean is in dynamic filtering's range."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

REWARD_ROUNDING = 1e-6
"""Rewards that differ by no more than this are equal: weights of 0.7, 0.2 and 0.1 add up to 0.9999999999999999."""


def has_signal(
    rewards: Float[Tensor, "N G"],
    *,
    step_rewards: Float[Tensor, "N G"] | None = None,
    scored: Bool[Tensor, "N G"] | None = None,
) -> Bool[Tensor, " N"]:
    """Whether the rewards of at least two scored responses of a group differ, by more than 1e-6 (DAPO's dynamic
    sampling, arXiv:2503.14476).

    `rewards` are shaped; `step_rewards` is the sum of a process reward model's rewards for each response. Dynamic
    filtering, the group estimators and `group/constant_fraction` all use this rule.
    """
    totals = rewards.double() if step_rewards is None else rewards.double() + step_rewards.double()
    is_unscored = torch.zeros_like(totals, dtype=torch.bool) if scored is None else ~scored
    highest = totals.masked_fill(is_unscored, -torch.inf).amax(dim=1)
    lowest = totals.masked_fill(is_unscored, torch.inf).amin(dim=1)
    return highest - lowest > REWARD_ROUNDING


def is_within(mean: float, low: float, high: float) -> bool:
    """Whether a group's mean total reward is strictly between `low` and `high`, by more than rounding.

    Raises:
        ValueError: the range is empty.
    """
    if not low < high:
        raise ValueError(f"no mean lies between {low} and {high}")
    return low + REWARD_ROUNDING < mean < high - REWARD_ROUNDING
