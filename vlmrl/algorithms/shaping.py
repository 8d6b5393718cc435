"""Shape rewards before any baseline, and detect groups without a learning signal.

The order is: overlong penalty, truncation penalty, clipping.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

REWARD_ROUNDING = 1e-6
"""Rewards that differ by no more than this are equal: weights of 0.7, 0.2 and 0.1 add up to 0.9999999999999999."""


def overlong_penalty(
    num_sampled: Int[Tensor, " B"], *, max_tokens: int, buffer: int, factor: float
) -> Float[Tensor, " B"]:
    """DAPO's soft penalty (arXiv:2503.14476), at least 0: it rises over the last `buffer` tokens before the limit.

    `factor * clip((n - (L - buffer)) / buffer, 0, 1)` for a response of n tokens and a limit of L.
    """
    return factor * ((num_sampled - (max_tokens - buffer)) / buffer).clamp(0.0, 1.0)


def punish_truncation(
    rewards: Float[Tensor, " B"], is_truncated: Bool[Tensor, " B"], *, coefficient: float
) -> Float[Tensor, " B"]:
    """ProRL's treatment of truncated responses (arXiv:2505.24864).

    A coefficient c in [0, 1] scales the reward r unless that would raise it, as for negative rewards: `min(r, c r)`. A
    negative coefficient replaces the reward unless that is lower: `min(r, c)`.
    """
    penalised = rewards * coefficient if coefficient >= 0 else torch.full_like(rewards, coefficient)
    return torch.where(is_truncated, torch.minimum(rewards, penalised), rewards)


def shape(
    rewards: Float[Tensor, " B"],
    *,
    num_sampled: Int[Tensor, " B"],
    is_truncated: Bool[Tensor, " B"],
    max_tokens: int,
    overlong_buffer: int | None,
    overlong_factor: float,
    truncated_coefficient: float | None,
    clip_range: tuple[float, float],
) -> Float[Tensor, " B"]:
    """Shape rewards in all three steps; `overlong_buffer` or `truncated_coefficient` None skips that step."""
    if overlong_buffer is not None:
        rewards = rewards - overlong_penalty(
            num_sampled, max_tokens=max_tokens, buffer=overlong_buffer, factor=overlong_factor
        )
    if truncated_coefficient is not None:
        rewards = punish_truncation(rewards, is_truncated, coefficient=truncated_coefficient)
    return rewards.clamp(*clip_range)


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
