"""What happens to the reward of an answer before any baseline sees it: over-long, truncated, clipped, in this order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


def overlong_penalty(
    num_sampled: Int[Tensor, " B"], *, max_new_tokens: int, buffer: int, factor: float
) -> Float[Tensor, " B"]:
    """DAPO's soft penalty (arXiv:2503.14476), at least 0: it rises over the last `buffer` tokens before the limit.

    `factor * clip((n - (L - buffer)) / buffer, 0, 1)` for an answer of n tokens and a limit of L.
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
