"""Numbers of whole answers, laid back onto their tokens: a row of a pack holds several answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


def answer_mean(
    values: Float[Tensor, "B T"], sampled: Bool[Tensor, "B T"], owner: Int[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """On each sampled token the mean over the sampled tokens of its answer; 0 elsewhere.

    `owner` says which answer a position belongs to (any numbers from 0 up). Answers are never cut across packs.
    """
    where = owner[sampled]
    if not len(where):
        return torch.zeros_like(values)
    counts = torch.bincount(where)
    sums = torch.zeros(len(counts), dtype=values.dtype, device=values.device).index_add(0, where, values[sampled])
    return torch.zeros_like(values).masked_scatter(sampled, (sums / counts)[where])
