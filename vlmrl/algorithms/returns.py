"""Rewards per token (score and token rewards minus the KL penalty), their discounted returns, and generalised advantage
estimation with a critic's values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


class AdvantageEstimate(NamedTuple):
    """Advantages of the tokens of a step, and targets of the critic; 0 where not sampled."""

    advantages: Float[Tensor, "B T"]
    returns: Float[Tensor, "B T"] | None = None
    """Targets of the critic; None without one."""


def time_first(per_token: Tensor) -> Tensor:
    """Store [B, T] with the values of one token contiguous, which makes loops over tokens several times faster.

    All functions here take either layout, and return the layout of their input.
    """
    return per_token.T.contiguous().T


def reward_per_token(
    terminal: Float[Tensor, " B"],
    sampled: Bool[Tensor, "B T"],
    *,
    kl_penalty: Float[Tensor, "B T"] | None = None,
    token_rewards: Float[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T"]:
    """Sum the rewards of each token, in double precision: `terminal` at a response's last sampled token, and
    `token_rewards - kl_penalty` at all sampled tokens; 0 elsewhere. A response without sampled tokens gets no reward.

    Raises:
        ValueError: a token reward is not at a sampled token, so it would be lost.
    """
    if kl_penalty is None:
        rewards = torch.zeros_like(sampled, dtype=torch.float64)
    else:
        # Not a product with the mask: the penalty may hold infinities where not sampled.
        rewards = kl_penalty.to(torch.float64, copy=True).neg_().masked_fill_(~sampled, 0.0)
    if token_rewards is not None:
        if bool((~sampled & (token_rewards != 0)).any()):
            raise ValueError("a token reward is at a token that the policy did not sample")
        rewards.add_(token_rewards)
    distance_from_end = sampled.contiguous().to(torch.uint8).flip(1).argmax(dim=1)
    rows = sampled.any(dim=1).nonzero()[:, 0]
    rewards[rows, -1 - distance_from_end[rows]] += terminal[rows].double()
    return rewards


def returns(rewards: Float[Tensor, "B T"], sampled: Bool[Tensor, "B T"], *, gamma: float) -> Float[Tensor, "B T"]:
    """`G_t = r_t + gamma G_{t+1}` at the sampled tokens, 0 at the others.

    t + 1 is the next **sampled** token: tokens of an environment between two turns do not discount.
    """
    totals = torch.zeros_like(rewards)
    next_total = torch.zeros_like(rewards[:, 0])
    for total, is_sampled, reward in _backwards(totals, sampled, rewards):
        torch.add(reward, next_total, alpha=gamma, out=total)
        torch.where(is_sampled, total, next_total, out=next_total)
    return totals.masked_fill_(~sampled, 0.0)


def gae(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    sampled: Bool[Tensor, "B T"],
    *,
    gamma: float,
    lambd: float,
) -> AdvantageEstimate:
    """Generalised advantage estimation (arXiv:1506.02438), before any normalisation.

    `A_t = d_t + gamma lambd A_{t+1}` with `d_t = r_t + gamma V_{t+1} - V_t`, and `returns = A + V`; t + 1 is the next
    sampled token, and the value after the last one is 0. `values` [B, T] are predictions before each token.
    """
    masked_values = values.to(torch.float64, copy=True).masked_fill_(~sampled, 0.0)
    totals = torch.zeros_like(rewards)
    next_total = torch.zeros_like(rewards[:, 0])
    # The same recursion in terms of the returns: G_t = r_t + gamma ((1 - lambd) V_{t+1} + lambd G_{t+1}).
    for total, is_sampled, reward, value in _backwards(totals, sampled, rewards, masked_values):
        torch.add(reward, next_total, alpha=gamma, out=total)
        torch.where(is_sampled, value.lerp(total, lambd), next_total, out=next_total)
    totals.masked_fill_(~sampled, 0.0)
    return AdvantageEstimate(advantages=masked_values.neg_().add_(totals), returns=totals)


def normalise(
    values: Float[Tensor, "B T"], sampled: Bool[Tensor, "B T"], *, divide_by_std: bool
) -> Float[Tensor, "B T"]:
    """Subtract the mean over all sampled tokens and, with `divide_by_std`, divide by their (biased) deviation.

    A standard deviation below 1e-4 is replaced by 1e-4, as in OpenRLHF, so that a step without signal stays at 0.
    """
    count = sampled.count_nonzero().clamp(min=1)
    # Relative to one of the values: the rounding error of a mean must not become the gradient of equal values.
    row = int(sampled.any(dim=1).to(torch.uint8).argmax())
    origin = values[row, sampled[row].to(torch.uint8).argmax()]
    centred = (values - origin).masked_fill_(~sampled, 0.0)
    centred.sub_(centred.sum() / count).masked_fill_(~sampled, 0.0)
    if divide_by_std:
        centred.div_((torch.linalg.vector_norm(centred).square() / count).clamp(min=1e-8).sqrt())
    return centred


def _backwards(*per_token: Float[Tensor, "B T"]) -> Iterator[tuple[Tensor, ...]]:
    """Iterate over the columns of several [B, T], from the last token to the first."""
    return zip(*(reversed(tensor.unbind(dim=1)) for tensor in per_token), strict=True)
