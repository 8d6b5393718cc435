"""The policy losses: a function for each row of `vlmrl.config.built_in.POLICY_LOSSES`, by its name.

Each is called with those tensors and knobs that it declares of what `policy_loss` offers, and masks nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from vlmrl.algorithms.aggregation import response_mean

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


class Surrogate(NamedTuple):
    """The loss of each token."""

    losses: Float[Tensor, "B T"]
    clipped: Bool[Tensor, "B T"]
    """Where a clip decided the loss, so that the token has no gradient; in `cispo`, where it decided the weight."""
    log_ratio: Float[Tensor, "B T"]
    """`log(pi / pi_old)` as the loss reads it: of the token, or of its response."""


def ppo(
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
    return Surrogate(losses, clipped, log_ratio)


def gspo(
    log_ratio: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    sampled: Bool[Tensor, "B T"],
    owner: Int[Tensor, "B T"],
    *,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """PPO's objective with one ratio per response, `exp(mean_t log_ratio)` (GSPO, arXiv:2507.18071).

    The ratio's value is the response's, its gradient that of the token's own log-prob (GSPO-token, section 4.3). Summed
    over a response that is the gradient of the response's ratio, and where advantages differ within a response, as with
    a KL in the reward, each token still learns from its own.
    """
    of_response = response_mean(log_ratio.detach(), sampled, owner) + (log_ratio - log_ratio.detach())
    return ppo(of_response, advantages, clip_low=clip_low, clip_high=clip_high)


def cispo(
    log_ratio: Float[Tensor, "B T"],
    logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    *,
    clip_high: float,
) -> Surrogate:
    """CISPO (arXiv:2506.13585): `-stopgrad(min(ratio, 1 + clip_high)) A log pi`. Every token keeps its gradient.

    As in the paper's experiments there is no lower clip.
    """
    ratio = log_ratio.detach().exp()
    losses = -ratio.clamp(max=1 + clip_high) * advantages * logprobs
    return Surrogate(losses, ratio > 1 + clip_high, log_ratio)
