"""Shape rewards before any baseline: overlong penalty, truncation penalty, clipping, in this order.

Rewards of an environment's turns get the truncation penalty only: a game is played for its score as it is.

The KL penalty comes later, token by token (`returns.reward_per_token`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


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


def shape_turns(
    rewards: Float[Tensor, " K"], *, is_truncated: bool, truncated_coefficient: float | None
) -> Float[Tensor, " K"]:
    """Shape the rewards of a conversation's K turns.

    In a truncated conversation a turn's reward r becomes `min(r, c r)`, and `min(r, 0)` where c is negative: then the
    reward of the conversation is replaced, by `shape`.
    """
    if truncated_coefficient is None or not is_truncated:
        return rewards
    return torch.minimum(rewards, rewards * max(truncated_coefficient, 0.0))
