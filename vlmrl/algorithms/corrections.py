"""Importance weights that correct the gap between the log-probs of engine and trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from vlmrl.algorithms.aggregation import response_mean

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

CorrectionKind = Literal["tis", "icepop", "seq-mask-tis"]


@dataclass(frozen=True, slots=True)
class Correction:
    """Importance weights `w = exp(old - rollout)`, limited to a range.

    `tis` clips them (Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025); a
    lower bound above 0 raises the weight of tokens that are improbable in the trainer, and is no truncation. `icepop`
    masks tokens whose weight is outside the range (arXiv:2510.18855). `seq-mask-tis` clips them, and masks responses
    whose geometric mean weight is outside.
    """

    kind: CorrectionKind
    low: float
    high: float

    def __post_init__(self) -> None:
        if self.kind not in ("tis", "icepop", "seq-mask-tis"):
            raise ValueError(f"no correction is called {self.kind!r}")
        if not 0 <= self.low < self.high:
            raise ValueError(f"the weights of a correction cannot lie between {self.low} and {self.high}")


def correct(
    correction: Correction,
    *,
    old: Float[Tensor, "B T"],
    rollout: Float[Tensor, "B T"],
    sampled: Bool[Tensor, "B T"],
    owner: Int[Tensor, "B T"],
) -> Float[Tensor, "B T"]:
    """Compute the factor of each token's loss; 0 where not sampled. Without a gradient.

    `old` are the trainer's log-probs when the experience was made, `rollout` the engine's. `owner` is the response of
    each position (any numbers from 0 up).
    """
    low, high = correction.low, correction.high
    gap = torch.where(sampled, old - rollout, 0.0).detach()
    weights = gap.exp()
    if correction.kind == "icepop":
        kept = sampled & (weights >= low) & (weights <= high)
        return torch.where(kept, weights, 0.0)
    kept = sampled
    if correction.kind == "seq-mask-tis":
        response_weights = response_mean(gap, sampled, owner).exp()
        kept = sampled & (response_weights >= low) & (response_weights <= high)
    return torch.where(kept, weights.clamp(low, high), 0.0)
