"""The policy loss of each token, before anybody decides what a token weighs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from vlmrl.algorithms.kl import KlEstimator
from vlmrl.algorithms.reduce import Aggregation

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Everything that decides the number a policy minimises."""

    aggregation: Aggregation
    max_new_tokens: int
    """Longest answer; read by `constant` aggregation alone."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_coef: float = 0.0
    """Weight of the KL to the reference in the loss; 0 when it is in the reward, or when there is no reference."""
    kl_estimator: KlEstimator = "k2"


class Surrogate(NamedTuple):
    """PPO's objective, token by token."""

    losses: Float[Tensor, "B T"]
    clipped: Bool[Tensor, "B T"]
    """Where a clip decided the loss, so that the token has no gradient."""


def log_ratio(
    logprobs: Float[Tensor, "B T"], old: Float[Tensor, "B T"], sampled: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """`log(pi / pi_old)` on sampled tokens, 0 elsewhere.

    The mask comes first and not last: an infinite ratio in the padding gets a zero gradient from the reduction, and
    zero times infinity is NaN.
    """
    return torch.where(sampled, logprobs - old, 0.0)


def clipped_surrogate(
    log_ratio: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Surrogate:
    """PPO's clipped objective (arXiv:1707.06347); unequal clips are DAPO's (arXiv:2503.14476).

    `dual_clip` c > 1 bounds the loss of a bad token to `-c A` (arXiv:1912.09729): without it one whose ratio has
    exploded outweighs all others.
    """
    ratio = log_ratio.exp()
    free = -ratio * advantages
    bound = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    losses = torch.maximum(free, bound)
    clipped = bound > free
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        over = (advantages < 0) & (losses > ceiling)
        losses = torch.where(over, ceiling, losses)
        clipped = clipped | over
    return Surrogate(losses=losses, clipped=clipped)
