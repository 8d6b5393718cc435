"""Per-token estimates of the KL divergence between policies, and the controller of its coefficient.

The KL to the reference is subtracted from the token rewards (`returns.reward_per_token`), or with `algo.kl.use_loss`
added to the loss (`losses.policy_loss`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float

KlEstimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""Bound on log-ratios before `exp`: an overflow would make the gradient NaN."""


def kl_to_reference(
    logprobs: Float[Tensor, "B T"], reference: Float[Tensor, "B T"], *, estimator: KlEstimator
) -> Float[Tensor, "B T"]:
    """Estimate KL(policy || reference) at each token (joschu.net/blog/kl-approx.html).

    `k1` is unbiased but may be negative, and the gradient of its mean is 0 in expectation: use it in the reward. `k2`
    is biased but has the correct gradient. `k3` is unbiased and never negative; where the probabilities differ by more
    than a factor of e^20 it is constant, without a gradient.
    """
    log_ratio = logprobs - reference
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1, because exp(x) - 1 - x loses all digits in fp32 for close models.
    return (-log_ratio).expm1() + log_ratio


def kl_from_old(logprobs: Float[Tensor, "B T"], old: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Estimate KL(old || policy) at each token by k3, for tokens sampled by the old policy: the expectation of
    `pi / pi_old - 1 - log(pi / pi_old)` under it is this KL."""
    return kl_to_reference(old, logprobs, estimator="k3")


@dataclass(frozen=True, slots=True)
class KlController:
    """The coefficient of the KL, constant or adapted to the measured KL (arXiv:1909.08593, section 2.2)."""

    coef: float
    target: float | None = None
    """Target KL per token; None: the coefficient is constant."""
    horizon: int = 10_000
    """Number of responses over which the coefficient adapts."""

    def updated(self, kl: float, num_samples: int) -> KlController:
        """The controller after a step of `num_samples` responses whose mean KL per token was `kl`.

        `coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon`.

        Raises:
            ValueError: the step is so large relative to the horizon that the coefficient could reach 0, or `kl` is NaN.
        """
        if self.target is None:
            return self
        if math.isnan(kl) or num_samples >= 5 * self.horizon:
            raise ValueError(f"a KL of {kl} over {num_samples} responses cannot steer a horizon of {self.horizon}")
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return replace(self, coef=self.coef * (1 + error * num_samples / self.horizon))
