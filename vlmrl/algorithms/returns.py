"""What each sampled token is followed by: discounted returns, and generalised advantages over a critic's values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


class AdvantageEstimate(NamedTuple):
    """What a step's rewards say of each token; 0 where the policy did not choose."""

    advantages: Float[Tensor, "B T"]
    returns: Float[Tensor, "B T"] | None = None
    """What a critic should have predicted; None where nobody asks one."""


def time_first(per_token: Tensor) -> Tensor:
    """The same [B, T] with the rows of a token side by side in memory: what goes back in time is several times faster.

    All functions here take either, and give back what they are given.
    """
    return per_token.T.contiguous().T


def reward_per_token(
    terminal: Float[Tensor, " B"],
    sampled: Bool[Tensor, "B T"],
    *,
    penalty: Float[Tensor, "B T"] | None = None,
    token_rewards: Float[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T"]:
    """The reward of each token, in double precision: `terminal` on a response's last sampled one, `token_rewards -
    penalty` on all sampled ones, 0 elsewhere. A response without a sampled token is paid nothing.

    Raises:
        ValueError: a token reward stands on a token that the policy did not choose, so nobody would earn it.
    """
    if penalty is None:
        paid = torch.zeros_like(sampled, dtype=torch.float64)
    else:
        # Not a product with the mask: nothing is promised of the penalty outside of it.
        paid = penalty.to(torch.float64, copy=True).neg_().masked_fill_(~sampled, 0.0)
    if token_rewards is not None:
        if bool((~sampled & (token_rewards != 0)).any()):
            raise ValueError("a token reward stands on a token that the policy did not sample")
        paid.add_(token_rewards)
    from_the_end = sampled.contiguous().to(torch.uint8).flip(1).argmax(dim=1)
    rows = sampled.any(dim=1).nonzero()[:, 0]
    paid[rows, -1 - from_the_end[rows]] += terminal[rows].double()
    return paid


def returns(paid: Float[Tensor, "B T"], sampled: Bool[Tensor, "B T"], *, gamma: float) -> Float[Tensor, "B T"]:
    """`G_t = r_t + gamma G_{t+1}` on the sampled tokens, 0 on the others.

    t + 1 is the next **sampled** token: those of an environment between two turns decay nothing.
    """
    found = torch.zeros_like(paid)
    after = torch.zeros_like(paid[:, 0])
    for here, chosen, reward in _backwards(found, sampled, paid):
        torch.add(reward, after, alpha=gamma, out=here)
        torch.where(chosen, here, after, out=after)
    return found.masked_fill_(~sampled, 0.0)


def gae(
    paid: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    sampled: Bool[Tensor, "B T"],
    *,
    gamma: float,
    lambd: float,
) -> AdvantageEstimate:
    """Generalised advantage estimation (arXiv:1506.02438), before any normalisation.

    `A_t = d_t + gamma lambd A_{t+1}` with `d_t = r_t + gamma V_{t+1} - V_t`, and `returns = A + V`; t + 1 is the next
    sampled token, and the value after the last one is 0. `values` [B, T] are predicted from the state before the token.
    """
    known = values.to(torch.float64, copy=True).masked_fill_(~sampled, 0.0)
    found = torch.zeros_like(paid)
    after = torch.zeros_like(paid[:, 0])
    # The same, written for the returns: G_t = r_t + gamma ((1 - lambd) V_{t+1} + lambd G_{t+1}).
    for here, chosen, reward, value in _backwards(found, sampled, paid, known):
        torch.add(reward, after, alpha=gamma, out=here)
        torch.where(chosen, value.lerp(here, lambd), after, out=after)
    found.masked_fill_(~sampled, 0.0)
    return AdvantageEstimate(advantages=known.neg_().add_(found), returns=found)


def normalise(
    values: Float[Tensor, "B T"], sampled: Bool[Tensor, "B T"], *, divide_by_std: bool
) -> Float[Tensor, "B T"]:
    """Subtract the mean over all sampled tokens and, if asked, divide by their (biased) deviation.

    A deviation under 1e-4 is taken for 1e-4, as in OpenRLHF, so that a step without any signal stays at 0.
    """
    count = sampled.count_nonzero().clamp(min=1)
    # Counted from one of them, because the rounding error of a mean must not become the gradient of equal values.
    row = int(sampled.any(dim=1).to(torch.uint8).argmax())
    origin = values[row, sampled[row].to(torch.uint8).argmax()]
    centred = (values - origin).masked_fill_(~sampled, 0.0)
    centred.sub_(centred.sum() / count).masked_fill_(~sampled, 0.0)
    if divide_by_std:
        centred.div_((torch.linalg.vector_norm(centred).square() / count).clamp(min=1e-8).sqrt())
    return centred


def _backwards(*per_token: Float[Tensor, "B T"]) -> Iterator[tuple[Tensor, ...]]:
    """The columns of several [B, T], from the last token to the first."""
    return zip(*(reversed(each.unbind(dim=1)) for each in per_token), strict=True)
