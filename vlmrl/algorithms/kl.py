"""How far the policy is from its reference, estimated token by token from the tokens that it sampled; and what the
distance costs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float

KlEstimator = Literal["k1", "k2", "k3"]

LARGEST_LOG_RATIO = 20.0
"""Log-ratios are held within this bound before `exp`: e^20 is enough, and an overflow is a NaN in the gradient."""


def kl_to_reference(
    logprobs: Float[Tensor, "B T"], reference: Float[Tensor, "B T"], *, estimator: KlEstimator
) -> Float[Tensor, "B T"]:
    """Estimate of KL(policy || reference) at each token (joschu.net/blog/kl-approx.html).

    `k1` is unbiased but may be negative, and the gradient of its mean is 0 in expectation: it belongs in the reward.
    `k2` is biased, and its gradient is the right one. `k3` is unbiased and never negative; it grows no more, and has no
    gradient, where the two models are apart by more than e^20.
    """
    log_ratio = logprobs - reference
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    log_ratio = log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    # expm1, because exp(x) - 1 - x has no correct digit left in fp32 where the two models are close.
    return (-log_ratio).expm1() + log_ratio


def kl_from_old(logprobs: Float[Tensor, "B T"], old: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Estimate of KL(old || policy) at each token, by k3: the old policy sampled them, so the mean is over what it
    says, and `pi / pi_old - 1 - log(pi / pi_old)` is what has this KL as its expectation."""
    return kl_to_reference(old, logprobs, estimator="k3")


@dataclass(frozen=True, slots=True)
class KlController:
    """The weight of the KL; with a target it follows the KL that was measured (arXiv:1909.08593, section 2.2)."""

    coef: float
    target: float | None = None
    """The KL per token that is wanted; None: the weight stays."""
    horizon: int = 10_000
    """Responses over which the weight follows."""

    def updated(self, kl: float, num_samples: int) -> KlController:
        """The controller after a step of `num_samples` responses whose mean KL per token was `kl`.

        `coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon`.

        Raises:
            ValueError: a step is so large beside the horizon that the weight would reach 0, or `kl` is not a number.
        """
        if self.target is None:
            return self
        if math.isnan(kl) or num_samples >= 5 * self.horizon:
            raise ValueError(f"a KL of {kl} over {num_samples} responses cannot steer a horizon of {self.horizon}")
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return replace(self, coef=self.coef * (1 + error * num_samples / self.horizon))
