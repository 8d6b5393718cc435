"""Per-token losses of policy and critic, before aggregation. The surrogate loss is a function of `policy_losses.py` or
a user's function."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from vlmrl.algorithms import policy_losses
from vlmrl.algorithms.aggregation import Aggregation
from vlmrl.algorithms.corrections import Correction, correct
from vlmrl.algorithms.kl import MAX_LOG_RATIO, KlEstimator, kl_to_reference
from vlmrl.algorithms.policy_losses import Surrogate
from vlmrl.algorithms.user_function import UserFunction, call
from vlmrl.errors import ConfigError
from vlmrl.system.user_function import declared, name_of

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

FLAG = "actor.policy_loss_type"
ARGUMENTS = ("logprobs", "old", "rollout", "advantages", "sampled", "owner", "clip_low", "clip_high")
"""Arguments that a user's loss may declare; see `policy_loss`."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Settings of the policy's loss."""

    aggregation: Aggregation
    max_tokens: int
    """Longest possible response, in sampled tokens; read only by `constant` aggregation."""
    kind: str | UserFunction = "ppo"
    """The name of a function in `policy_losses.py`, or a user's function. The learning process resolves `path.py:name`
    itself, because functions of a user's file cannot be pickled."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_estimator: KlEstimator = "k2"
    entropy_coef: float = 0.0
    correction: Correction | None = None
    """Weights the surrogate loss, but not KL and entropy."""
    kl_early_stop: float | None = None
    """Skip the rest of an update once the mean k3 between the policy and the one that made the experience exceeds this,
    over an optimizer step's samples."""

    def __post_init__(self) -> None:
        if self.clip_low < 0 or self.clip_high < 0:
            raise ValueError(f"clip_low {self.clip_low} and clip_high {self.clip_high} must not be negative")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip {self.dual_clip} has no effect: it must be above 1")


class PolicyTerms(NamedTuple):
    """The loss of each token and its terms. Only sampled tokens are meaningful; the others are finite."""

    losses: Float[Tensor, "B T"]
    clipped: Bool[Tensor, "B T"]
    """As in `Surrogate`; False where not sampled, and everywhere with a user's loss."""
    kl: Float[Tensor, "B T"]
    """KL to the reference, without a gradient; 0 without a reference."""
    weights: Float[Tensor, "B T"]
    """Weights of the correction, 1 without one; 0 where not sampled."""
    ratio: Float[Tensor, "B T"]
    """pi / pi_old as the loss reads it, without a gradient; 1 where not sampled."""


def check(kind: UserFunction) -> None:
    """Raise ConfigError if a user's loss requires other arguments than `ARGUMENTS`."""
    declared(kind, ARGUMENTS, flag=FLAG)


def policy_loss(
    knobs: PolicyLoss,
    *,
    logprobs: Float[Tensor, "B T"],
    old: Float[Tensor, "B T"],
    rollout: Float[Tensor, "B T"] | None,
    advantages: Float[Tensor, "B T"],
    sampled: Bool[Tensor, "B T"],
    owner: Int[Tensor, "B T"],
    entropy: Float[Tensor, "B T"] | None = None,
    reference: Float[Tensor, "B T"] | None = None,
    kl_coef: float = 0.0,
) -> PolicyTerms:
    """Compute `correction * surrogate + kl_coef * KL - entropy_coef * entropy`, token by token.

    Only `logprobs` and `entropy` have a gradient: those of the current policy, `entropy` of the distribution that
    responses are sampled from. `old` are the log-probs of the policy that made the experience, `rollout` those of the
    engine. `owner` is the response of each position (any numbers from 0 up). Where not sampled, inputs may hold
    anything.

    A user's loss is called with the `ARGUMENTS` that it declares; log-probs are 0 where not sampled, and `rollout` is
    None if the run has none. It returns the losses [B, T].

    Raises:
        ValueError: an input that a knob needs is missing, or has no gradient.
        ConfigError: the user's loss cannot be called, fails, or returns something else.
    """
    # Mask the inputs first: 0 times an infinity in the padding would make the gradient NaN.
    logprobs, old, advantages = (torch.where(sampled, x, 0.0) for x in (logprobs, old, advantages))
    rollout = None if rollout is None else torch.where(sampled, rollout, 0.0)
    tokens = {"logprobs": logprobs, "old": old, "rollout": rollout, "advantages": advantages}
    offered = tokens | {"sampled": sampled, "owner": owner, "clip_low": knobs.clip_low, "clip_high": knobs.clip_high}
    losses, clipped, ratio = _surrogate(knobs, offered, log_ratio(logprobs, old, sampled))
    weights = sampled.to(logprobs.dtype)
    if knobs.correction is not None:
        if rollout is None:
            raise ValueError("a correction needs the engine's log-probs")
        weights = correct(knobs.correction, old=old, rollout=rollout, sampled=sampled, owner=owner)
        losses = weights * losses
    kl = torch.zeros_like(losses)
    if kl_coef > 0:
        if reference is None:
            raise ValueError("a KL in the loss needs the reference's log-probs")
        kl = kl_to_reference(logprobs, torch.where(sampled, reference, 0.0), estimator=knobs.kl_estimator)
        losses = losses + kl_coef * kl
    if knobs.entropy_coef > 0:
        if entropy is None or (logprobs.requires_grad and not entropy.requires_grad):
            raise ValueError("an entropy bonus needs the entropy, with its gradient")
        losses = losses - knobs.entropy_coef * torch.where(sampled, entropy, 0.0)
    return PolicyTerms(losses, clipped, kl.detach(), weights, ratio.detach().exp())


def _surrogate(knobs: PolicyLoss, offered: Mapping[str, Any], log_ratio: Float[Tensor, "B T"]) -> Surrogate:
    """Call the surrogate loss with the arguments that it declares; a user's may declare `ARGUMENTS`."""
    if not callable(knobs.kind):
        function = getattr(policy_losses, knobs.kind)
        available = {**offered, "log_ratio": log_ratio, "dual_clip": knobs.dual_clip}
        surrogate: Surrogate = function(**{name: available[name] for name in inspect.signature(function).parameters})
        return surrogate
    sampled: Tensor = offered["sampled"]
    losses = call(knobs.kind, offered, shapes=[tuple(sampled.shape)], flag=FLAG)
    if offered["logprobs"].requires_grad and not losses.requires_grad:
        raise ConfigError(f"{FLAG}: the losses of {name_of(knobs.kind)} have no gradient: do not detach logprobs")
    return Surrogate(torch.where(sampled, losses, 0.0), torch.zeros_like(sampled), log_ratio)


def log_ratio(
    logprobs: Float[Tensor, "B T"], old: Float[Tensor, "B T"], sampled: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """`log(pi / pi_old)` on sampled tokens, 0 elsewhere; clamped, and without a gradient, beyond a ratio of e^20.

    The inputs are masked, not the result: an infinite ratio in the padding gets a zero gradient from the reduction,
    and zero times infinity is NaN.
    """
    return torch.where(sampled, logprobs - old, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


class ValueTerms(NamedTuple):
    """The critic's loss, token by token."""

    losses: Float[Tensor, "B T"]
    clipped: Bool[Tensor, "B T"]
    """Tokens whose loss is the clipped one, so that they have no gradient."""


def value_loss(
    values: Float[Tensor, "B T"],
    old: Float[Tensor, "B T"],
    returns: Float[Tensor, "B T"],
    *,
    clip: float | None,
) -> ValueTerms:
    """`0.5 max((v - G)^2, (v_old + clip(v - v_old, -e, e) - G)^2)` (PPO2 of OpenAI's baselines; None: no clip).

    `old` are the values when the experience was made, `returns` their targets. All three must also be finite where not
    sampled.
    """
    unclipped = (values - returns).square()
    if clip is None:
        return ValueTerms(unclipped / 2, torch.zeros_like(unclipped, dtype=torch.bool))
    bounded = (old + (values - old).clamp(-clip, clip) - returns).square()
    # Within the range both differ only by rounding.
    clipped = (bounded > unclipped) & ((values - old).abs() > clip)
    return ValueTerms(torch.maximum(unclipped, bounded) / 2, clipped)
