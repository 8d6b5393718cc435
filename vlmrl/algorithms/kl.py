"""How far the policy is from its reference, estimated token by token from the tokens that it sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float

KlEstimator = Literal["k1", "k2", "k3"]


def kl_to_reference(
    logprobs: Float[Tensor, "B T"], reference: Float[Tensor, "B T"], *, estimator: KlEstimator
) -> Float[Tensor, "B T"]:
    """Estimate of KL(policy || reference) at each token (joschu.net/blog/kl-approx.html).

    `k1` is unbiased but may be negative, and the gradient of its mean is 0 in expectation: it belongs in the reward.
    `k2` is biased, and its gradient is the right one. `k3` is unbiased and never negative.
    """
    log_ratio = logprobs - reference
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    # expm1, because exp(x) - 1 - x has no correct digit left in fp32 where the two models are close.
    return (-log_ratio).expm1() + log_ratio
