"""Preference losses of responses: DPO, IPO, ORPO, SimPO, BCO, KTO, and the Bradley-Terry loss of reward models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


def response_sums(
    values: Float[Tensor, "B T"], sampled: Bool[Tensor, "B T"], owner: Int[Tensor, "B T"], *, num_responses: int
) -> Float[Tensor, " N"]:
    """Sum over the sampled tokens of each response; 0 for a response without any.

    `owner` is the response of each position, from 0 to `num_responses` - 1: a row of a pack holds several.
    """
    sums = torch.zeros(num_responses, dtype=values.dtype, device=values.device)
    return sums.index_add(0, owner[sampled], values[sampled])


def response_means(
    values: Float[Tensor, "B T"], sampled: Bool[Tensor, "B T"], owner: Int[Tensor, "B T"], *, num_responses: int
) -> Float[Tensor, " N"]:
    """Mean over the sampled tokens of each response; 0 for a response without any."""
    counts = response_sums(torch.ones_like(values), sampled, owner, num_responses=num_responses)
    return response_sums(values, sampled, owner, num_responses=num_responses) / counts.clamp(min=1)


def dpo_loss(
    chosen: Float[Tensor, " P"],
    rejected: Float[Tensor, " P"],
    *,
    ref_chosen: Float[Tensor, " P"],
    ref_rejected: Float[Tensor, " P"],
    beta: float,
    label_smoothing: float = 0.0,
) -> Float[Tensor, " P"]:
    """`-log sigmoid(beta h)` with `h = (chosen - rejected) - (ref_chosen - ref_rejected)` (DPO, arXiv:2305.18290).

    All four are log-probs of responses, summed over their tokens. With `label_smoothing` s, a label is
    wrong with probability s: `-(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h)` (cDPO,
    ericmitchell.ai/cdpo.pdf).

    Raises:
        ValueError: `label_smoothing` is not in [0, 0.5): from a half on, the loss would teach nothing or the opposite.
    """
    if not 0.0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing {label_smoothing:g} is not in [0, 0.5)")
    scaled = beta * ((chosen - rejected) - (ref_chosen - ref_rejected))
    return -(1 - label_smoothing) * F.logsigmoid(scaled) - label_smoothing * F.logsigmoid(-scaled)


def ipo_loss(
    chosen: Float[Tensor, " P"],
    rejected: Float[Tensor, " P"],
    *,
    ref_chosen: Float[Tensor, " P"],
    ref_rejected: Float[Tensor, " P"],
    beta: float,
) -> Float[Tensor, " P"]:
    """`(h - 1 / (2 beta))^2` (IPO, arXiv:2310.12036), `h` as in `dpo_loss`.

    All four are log-probs of responses, **averaged** over their tokens, so that length does not matter.
    """
    difference = (chosen - rejected) - (ref_chosen - ref_rejected)
    return (difference - 1 / (2 * beta)).square()


def simpo_loss(
    chosen: Float[Tensor, " P"], rejected: Float[Tensor, " P"], *, beta: float, gamma: float
) -> Float[Tensor, " P"]:
    """`-log sigmoid(beta (chosen - rejected) - gamma)` of log-probs **averaged** over the response (SimPO,
    arXiv:2405.14734). There is no reference."""
    return -F.logsigmoid(beta * (chosen - rejected) - gamma)


def orpo_loss(chosen: Float[Tensor, " P"], rejected: Float[Tensor, " P"], *, weight: float) -> Float[Tensor, " P"]:
    """`-chosen - weight * log sigmoid(log_odds(chosen) - log_odds(rejected))` of log-probs **averaged** over the
    response, with `log_odds(lp) = lp - log(1 - exp(lp))` (ORPO, arXiv:2403.07691). There is no reference."""
    return -chosen - weight * F.logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def bco_loss(
    chosen: Float[Tensor, " P"], rejected: Float[Tensor, " P"], *, beta: float, delta: float
) -> Float[Tensor, " P"]:
    """`-log sigmoid(beta chosen - delta) - log sigmoid(delta - beta rejected)` (BCO, arXiv:2404.04656).

    Both are log-ratios of policy to reference, summed over the response; `delta` is the running mean of all
    `beta (chosen + rejected) / 2`.
    """
    return -F.logsigmoid(beta * chosen - delta) - F.logsigmoid(delta - beta * rejected)


def kto_loss(
    ratios: Float[Tensor, " N"],
    desirable: Bool[Tensor, " N"],
    *,
    baseline: float,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Float[Tensor, " N"]:
    """`w_D (1 - sigmoid(beta (r - z)))` of desirable and `w_U (1 - sigmoid(beta (z - r)))` of undesirable responses
    (KTO, arXiv:2402.01306).

    `ratios` r are log-ratios of policy to reference, summed over the response. `baseline` z is the mean r of responses
    to other prompts than their own, and at least 0.
    """
    scaled = beta * (ratios - baseline)
    good = desirable_weight * torch.sigmoid(-scaled)
    return torch.where(desirable, good, undesirable_weight * torch.sigmoid(scaled))


def bradley_terry_loss(
    chosen: Float[Tensor, " P"], rejected: Float[Tensor, " P"], *, margin: Float[Tensor, " P"] | float = 0.0
) -> Float[Tensor, " P"]:
    """`-log sigmoid(chosen - rejected - margin)` of the rewards of two responses (arXiv:1706.03741, section 2.2.3).

    `margin` is by how much the preferred response is better, if annotators rated it (arXiv:2307.09288, section 3.2.2).
    """
    return -F.logsigmoid(chosen - rejected - margin)


def _log_odds(logprobs: Float[Tensor, " P"]) -> Float[Tensor, " P"]:
    # Log-probs of 0 exactly, as of an empty response, would have infinite odds.
    clipped = logprobs.clamp(max=-torch.finfo(logprobs.dtype).eps)
    return clipped - torch.log(-torch.expm1(clipped))


def step_loss(log_odds: Float[Tensor, " S"], labels: Float[Tensor, " S"]) -> Float[Tensor, " S"]:
    """Cross-entropy of steps that are correct with the log-odds of a process reward model (arXiv:2305.20050).

    A label is 1 for a correct step, 0 for a wrong one, and in between where it was estimated from samples
    (arXiv:2312.08935).
    """
    return F.binary_cross_entropy_with_logits(log_odds, labels, reduction="none")
