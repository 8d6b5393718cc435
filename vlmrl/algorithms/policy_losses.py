"""The policy losses: one function per row of `vlmrl.config.built_in.POLICY_LOSSES`, with the same name.

`policy_loss` passes the tensors and knobs that a function declares, and does all masking.
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
    """Tokens whose loss is the clipped one, so that they have no gradient; in `cispo`, whose weight is clipped."""
    log_ratio: Float[Tensor, "B T"]
    """`log(pi / pi_old)` as used by the loss: of the token, or of its response."""


def ppo(
    log_ratio: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Surrogate:
    """PPO's clipped objective (arXiv:1707.06347); unequal clips are DAPO's (arXiv:2503.14476).

    `dual_clip` c > 1 limits the loss of a token with a negative advantage to `-c A` (arXiv:1912.09729): without it a
    token with an exploding ratio outweighs all others.
    """
    ratio = log_ratio.exp()
    unclipped = -ratio * advantages
    bounded = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    losses = torch.maximum(unclipped, bounded)
    clipped = bounded > unclipped
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        is_above = (advantages < 0) & (losses > ceiling)
        losses = torch.where(is_above, ceiling, losses)
        clipped = clipped | is_above
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

    The ratio has the value of the response's ratio and the gradient of the token's own log-prob (GSPO-token, section
    4.3). Summed over a response this is the gradient of its ratio, and if advantages differ within a response, as with
    a KL in the reward, each token still learns from its own.
    """
    response_log_ratio = response_mean(log_ratio.detach(), sampled, owner) + (log_ratio - log_ratio.detach())
    return ppo(response_log_ratio, advantages, clip_low=clip_low, clip_high=clip_high)


def cispo(
    log_ratio: Float[Tensor, "B T"],
    logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    *,
    clip_high: float,
) -> Surrogate:
    """CISPO (arXiv:2506.13585): `-stopgrad(min(ratio, 1 + clip_high)) A log pi`. Every token keeps its gradient.

    There is no lower clip, as in the paper's experiments.
    """
    ratio = log_ratio.detach().exp()
    losses = -ratio.clamp(max=1 + clip_high) * advantages * logprobs
    return Surrogate(losses, ratio > 1 + clip_high, log_ratio)
