"""Rewards before any baseline: how they are shaped, and which groups of them are worth learning from.

The reward of a response is shaped in this order: overlong, truncated, clipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

REWARD_ROUNDING = 1e-6
"""Weights of 0.7, 0.2 and 0.1 add up to 0.9999999999999999: rewards that are no further apart are the same."""


def overlong_penalty(
    num_sampled: Int[Tensor, " B"], *, max_new_tokens: int, buffer: int, factor: float
) -> Float[Tensor, " B"]:
    """DAPO's soft penalty (arXiv:2503.14476), at least 0: it rises over the last `buffer` tokens before the limit.

    `factor * clip((n - (L - buffer)) / buffer, 0, 1)` for a response of n tokens and a limit of L.
    """
    return factor * ((num_sampled - (max_new_tokens - buffer)) / buffer).clamp(0.0, 1.0)


def punish_truncation(
    rewards: Float[Tensor, " B"], is_truncated: Bool[Tensor, " B"], *, coefficient: float
) -> Float[Tensor, " B"]:
    """ProRL's treatment of truncated responses (arXiv:2505.24864).

    In [0, 1] the coefficient c scales their reward where that takes something from them: `min(r, c r)`, because a
    negative reward must not shrink by being cut off. Below 0 it replaces the reward, unless that is lower still.
    """
    instead = rewards * coefficient if coefficient >= 0 else torch.full_like(rewards, coefficient)
    return torch.where(is_truncated, torch.minimum(rewards, instead), rewards)


def shape(
    rewards: Float[Tensor, " B"],
    *,
    num_sampled: Int[Tensor, " B"],
    is_truncated: Bool[Tensor, " B"],
    max_new_tokens: int,
    overlong_buffer: int | None,
    overlong_factor: float,
    truncated_coefficient: float | None,
    clip_range: tuple[float, float],
) -> Float[Tensor, " B"]:
    """All three steps; a step whose first setting is None is left out."""
    if overlong_buffer is not None:
        rewards = rewards - overlong_penalty(
            num_sampled, max_new_tokens=max_new_tokens, buffer=overlong_buffer, factor=overlong_factor
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
    """Groups in which at least two scored responses are worth different amounts, by more than 1e-6 (DAPO's dynamic
    sampling, arXiv:2503.14476).

    `rewards` are shaped; `step_rewards` is what a process reward model pays for all steps of a response together. The
    only rule for what a group teaches: dynamic filtering, the group estimators and `group/constant_fraction` ask it.
    """
    totals = rewards.double() if step_rewards is None else rewards.double() + step_rewards.double()
    is_unscored = torch.zeros_like(totals, dtype=torch.bool) if scored is None else ~scored
    highest = totals.masked_fill(is_unscored, -torch.inf).amax(dim=1)
    lowest = totals.masked_fill(is_unscored, torch.inf).amin(dim=1)
    return highest - lowest > REWARD_ROUNDING


def is_within(mean: float, low: float, high: float) -> bool:
    """Whether `low < mean < high`, by more than rounding, for the mean of a group's total rewards.

    Raises:
        ValueError: the range is empty.
    """
    if not low < high:
        raise ValueError(f"no mean lies between {low} and {high}")
    return low + REWARD_ROUNDING < mean < high - REWARD_ROUNDING
