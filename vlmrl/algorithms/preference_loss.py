"""The loss of a preference run, by name, from the log-probs of its responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from vlmrl.algorithms.preferences import bco_loss, dpo_loss, ipo_loss, kto_loss, orpo_loss, simpo_loss

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLoss:
    """Settings of the loss; see `vlmrl.config.dpo.Dpo`."""

    kind: str
    beta: float
    label_smoothing: float = 0.0
    nll_coef: float = 0.0
    """Weight of the mean negative log-likelihood per token of the chosen responses."""
    simpo_gamma: float = 0.0
    mpo_weights: tuple[float, float] = (0.8, 0.2)
    """Weights of DPO and BCO in MPO (arXiv:2411.10442); the third is `nll_coef`."""
    kto_weights: tuple[float, float] = (1.0, 1.0)
    """Weights of desirable and undesirable responses."""


class Offsets(NamedTuple):
    """Numbers that are the same for all responses of an optimizer step."""

    delta: float = 0.0
    """Of BCO and MPO: mean reward of the responses before this step."""
    baseline: float = 0.0
    """Of KTO: log-ratio of responses to other prompts."""


class Responses(NamedTuple):
    """Log-probs of N responses, in the order of the rows, the chosen one of a pair before the rejected one."""

    sums: Float[Tensor, " N"]
    """Over the tokens of each response."""
    lengths: Float[Tensor, " N"]
    """Tokens of each response."""

    @property
    def means(self) -> Float[Tensor, " N"]:
        return self.sums / self.lengths.clamp(min=1)


def pair_losses(
    settings: PreferenceLoss, policy: Responses, reference: Float[Tensor, " N"], offsets: Offsets
) -> Float[Tensor, " P"]:
    """Return the loss of each of P pairs, N = 2 P, without its NLL term. `reference` holds sums; ORPO and SimPO do not
    read it."""
    kind, beta = settings.kind, settings.beta
    chosen, rejected = policy.sums[0::2], policy.sums[1::2]
    ref_chosen, ref_rejected = reference[0::2], reference[1::2]
    if kind == "simpo":
        return simpo_loss(policy.means[0::2], policy.means[1::2], beta=beta, gamma=settings.simpo_gamma)
    if kind == "orpo":
        return orpo_loss(policy.means[0::2], policy.means[1::2], weight=beta)
    if kind == "ipo":
        ref_means = Responses(reference, policy.lengths).means
        return ipo_loss(
            policy.means[0::2],
            policy.means[1::2],
            ref_chosen=ref_means[0::2],
            ref_rejected=ref_means[1::2],
            beta=beta,
        )
    of_bco = bco_loss(chosen - ref_chosen, rejected - ref_rejected, beta=beta, delta=offsets.delta)
    if kind == "bco":
        return of_bco
    of_dpo = dpo_loss(
        chosen,
        rejected,
        ref_chosen=ref_chosen,
        ref_rejected=ref_rejected,
        beta=beta,
        label_smoothing=settings.label_smoothing,
    )
    if kind == "dpo":
        return of_dpo
    assert kind == "mpo", f"no preference loss {kind}"
    of_mpo: Tensor = settings.mpo_weights[0] * of_dpo + settings.mpo_weights[1] * of_bco
    return of_mpo


def unpaired_losses(
    settings: PreferenceLoss,
    policy: Responses,
    reference: Float[Tensor, " N"],
    desirable: Bool[Tensor, " N"],
    offsets: Offsets,
) -> Float[Tensor, " N"]:
    """Return KTO's loss of each response."""
    return kto_loss(
        policy.sums - reference,
        desirable,
        baseline=offsets.baseline,
        beta=settings.beta,
        desirable_weight=settings.kto_weights[0],
        undesirable_weight=settings.kto_weights[1],
    )


def rewards(settings: PreferenceLoss, policy: Responses, reference: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Return what the loss takes for the reward of each response, detached: `beta` times the log-ratio of policy to
    reference; averaged over the response for IPO, and of the policy alone for ORPO and SimPO."""
    with torch.no_grad():
        if settings.kind in ("orpo", "simpo"):
            return settings.beta * policy.means
        ratios = policy.sums - reference
        scaled: Tensor = settings.beta * (ratios / policy.lengths.clamp(min=1) if settings.kind == "ipo" else ratios)
        return scaled
