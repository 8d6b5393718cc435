"""Means over tokens and responses. The only place that decides what a token weighs in the loss.

Every count in a loss is that of the whole optimizer step, over all ranks and micro-batches, so that the shares of the
ranks and micro-batches add up to the loss of the step: the gradient does not depend on how the step was cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from vlmrl.types import Totals

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

Aggregation = Literal["token", "sequence", "constant"]


def token_mean(losses: Float[Tensor, "B T"], sampled: Bool[Tensor, "B T"], *, num_tokens: int) -> Float[Tensor, ""]:
    """Sum over the sampled tokens / `num_tokens`: all tokens of the step weigh the same (DAPO, arXiv:2503.14476)."""
    return _masked(losses, sampled).sum() / num_tokens


def sequence_mean(
    losses: Float[Tensor, "B T"], sampled: Bool[Tensor, "B T"], owner: Int[Tensor, "B T"], *, num_samples: int
) -> Float[Tensor, ""]:
    """Mean over responses of each one's mean over its sampled tokens (GRPO, arXiv:2402.03300).

    `owner` says which sample each position belongs to (any numbers from 0 up), because a row of a pack holds several.
    """
    where = owner[sampled]
    if not len(where):
        return _masked(losses, sampled).sum()
    lengths = torch.bincount(where)
    return (losses[sampled] / lengths[where]).sum() / num_samples


def constant_mean(
    losses: Float[Tensor, "B T"], sampled: Bool[Tensor, "B T"], *, num_samples: int, max_new_tokens: int
) -> Float[Tensor, ""]:
    """Sum over the sampled tokens / (responses * longest): long responses are not favoured (arXiv:2503.20783)."""
    return _masked(losses, sampled).sum() / (num_samples * max_new_tokens)


def reduce(
    losses: Float[Tensor, "B T"],
    sampled: Bool[Tensor, "B T"],
    *,
    aggregation: Aggregation,
    owner: Int[Tensor, "B T"],
    totals: Totals,
    max_new_tokens: int,
) -> Float[Tensor, ""]:
    """This micro-batch's share of the loss of the optimizer step, aggregated as `algo.loss_agg` says."""
    if aggregation == "token":
        return token_mean(losses, sampled, num_tokens=totals.num_tokens)
    if aggregation == "sequence":
        return sequence_mean(losses, sampled, owner, num_samples=totals.num_samples)
    return constant_mean(losses, sampled, num_samples=totals.num_samples, max_new_tokens=max_new_tokens)


def response_mean(
    values: Float[Tensor, "B T"], sampled: Bool[Tensor, "B T"], owner: Int[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """On each sampled token the mean over the sampled tokens of its response; 0 elsewhere.

    `owner` says which response a position belongs to (any numbers from 0 up). Responses are never cut across packs.
    """
    where = owner[sampled]
    if not len(where):
        return torch.zeros_like(values)
    counts = torch.bincount(where)
    sums = torch.zeros(len(counts), dtype=values.dtype, device=values.device).index_add(0, where, values[sampled])
    return torch.zeros_like(values).masked_scatter(sampled, (sums / counts)[where])


def _masked(losses: Float[Tensor, "B T"], sampled: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    # Not a product: padding may hold infinities, and 0 * inf is NaN.
    return torch.where(sampled, losses, 0.0)
