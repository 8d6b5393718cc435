"""The auxiliary loss that keeps the experts of a model evenly used."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


def load_balance_loss(
    logits: Float[Tensor, "L N E"],
    is_token: Bool[Tensor, " N"],
    *,
    top_k: int,
    add_up: Callable[[Tensor], Tensor] | None = None,
) -> Float[Tensor, ""]:
    """Compute E * sum over experts of (share of tokens that choose it) * (mean of its probability).

    The loss of the Switch Transformer (arXiv:2101.03961, equations 4 to 6) for `top_k` experts per token, with both
    means over all layers together, as in Transformers. It is `top_k` when all experts are used evenly. The choice has
    no gradient: it flows through the probabilities.

    Args:
        logits: the routers' logits of L layers, N positions and E experts.
        is_token: False on padding and fillers. Without a token, the loss is 0 and so is its gradient.
        add_up: sums a tensor over ranks that have different tokens of the same rows.
    """
    real = logits[:, is_token].flatten(0, 1).float()
    probabilities = real.softmax(-1)
    chosen = torch.zeros_like(probabilities).scatter_(1, probabilities.topk(top_k).indices, 1.0)
    sums = torch.stack([chosen.sum(0), probabilities.sum(0), torch.full_like(real[:0].sum(0), len(real))])
    chosen_sum, probability_sum, number = sums if add_up is None else add_up(sums)
    number = number.clamp(min=1)
    return real.shape[1] * (chosen_sum / number * probability_sum / number).sum()
