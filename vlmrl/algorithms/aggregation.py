"""Means over tokens and responses, which decide the weight of a token in the loss.

Counts are those of the whole optimizer step, over all ranks and micro-batches. So the losses of ranks and micro-batches
add up to the loss of the step, and the gradient does not depend on how the step is split.
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
    """Sum over the sampled tokens / `num_tokens`: all tokens of the step have equal weight (DAPO, arXiv:2503.14476)."""
    return _masked(losses, sampled).sum() / num_tokens


def sequence_mean(
    losses: Float[Tensor, "B T"], sampled: Bool[Tensor, "B T"], lengths: Int[Tensor, "B T"], *, num_responses: int
) -> Float[Tensor, ""]:
    """Mean over responses of the mean over their sampled tokens (GRPO, arXiv:2402.03300).

    `lengths` holds at each position the number of sampled tokens of its whole response, parts of which may lie in other
    packs.
    """
    return (losses[sampled] / lengths[sampled]).sum() / num_responses


def constant_mean(
    losses: Float[Tensor, "B T"], sampled: Bool[Tensor, "B T"], *, num_responses: int, max_tokens: int
) -> Float[Tensor, ""]:
    """Sum over the sampled tokens / (responses * longest): no bias towards long responses (arXiv:2503.20783)."""
    return _masked(losses, sampled).sum() / (num_responses * max_tokens)


def reduce(
    losses: Float[Tensor, "B T"],
    sampled: Bool[Tensor, "B T"],
    *,
    aggregation: Aggregation,
    lengths: Int[Tensor, "B T"],
    totals: Totals,
    max_tokens: int,
) -> Float[Tensor, ""]:
    """The contribution of this micro-batch to the loss of the optimizer step.

    Args:
        aggregation: `algo.loss_agg`.
        lengths: see `sequence_mean`.
        max_tokens: longest possible response, in sampled tokens.
    """
    if aggregation == "token":
        return token_mean(losses, sampled, num_tokens=totals.num_tokens)
    if aggregation == "sequence":
        return sequence_mean(losses, sampled, lengths, num_responses=totals.num_responses)
    return constant_mean(losses, sampled, num_responses=totals.num_responses, max_tokens=max_tokens)


def response_mean(
    values: Float[Tensor, "B T"], sampled: Bool[Tensor, "B T"], owner: Int[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """At each sampled token the mean over the sampled tokens of its response; 0 elsewhere.

    `owner` is the response of each position (any numbers from 0 up). All of a response is in one pack.
    """
    owners = owner[sampled]
    if not len(owners):
        return torch.zeros_like(values)
    counts = torch.bincount(owners)
    sums = torch.zeros(len(counts), dtype=values.dtype, device=values.device).index_add(0, owners, values[sampled])
    return torch.zeros_like(values).masked_scatter(sampled, (sums / counts)[owners])


def _masked(losses: Float[Tensor, "B T"], sampled: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    # Not a product: padding may hold infinities, and 0 * inf is NaN.
    return torch.where(sampled, losses, 0.0)
