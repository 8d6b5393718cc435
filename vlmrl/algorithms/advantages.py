"""Turn the rewards of a step into one advantage per sampled token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


def reward_minus_group_mean(rewards: Float[Tensor, "N G"]) -> Float[Tensor, "N G"]:
    """`R - mean_j R`: the baseline of Dr. GRPO (arXiv:2503.20783) and of REINFORCE++ with a group baseline.

    A group whose rewards are all equal is exactly 0: the rounding error of a mean must not become a gradient, least
    of all after a division by a deviation that is as small.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return torch.where(is_constant(rewards)[:, None], 0.0, centred)


def group_norm(rewards: Float[Tensor, "N G"]) -> Float[Tensor, "N G"]:
    """`(R - mean_j R) / (std_j R + 1e-6)` with the unbiased deviation (GRPO, arXiv:2402.03300)."""
    if rewards.shape[1] == 1:
        return torch.zeros_like(rewards)
    return reward_minus_group_mean(rewards) / (rewards.std(dim=1, keepdim=True) + 1e-6)


def rloo(rewards: Float[Tensor, "N G"]) -> Float[Tensor, "N G"]:
    """`R` minus the mean of the other answers of its group (arXiv:2402.14740)."""
    others = max(rewards.shape[1] - 1, 1)
    left_out = (rewards.sum(dim=1, keepdim=True) - rewards) / others
    return torch.where(is_constant(rewards)[:, None], 0.0, rewards - left_out)


def is_constant(rewards: Float[Tensor, "N G"]) -> Bool[Tensor, " N"]:
    """Groups that teach nothing, because all their answers are worth the same."""
    return rewards.amax(dim=1) == rewards.amin(dim=1)


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "group_norm": group_norm,
    "dr_grpo": reward_minus_group_mean,
    "rloo": rloo,
    "reinforce_baseline": reward_minus_group_mean,
}
"""`algo.advantage.estimator` -> the scalar of an answer, [N, G] -> [N, G]."""


def advantages(
    rewards: Float[Tensor, "N G"],
    sampled: Bool[Tensor, "B T"],
    *,
    estimator: str,
    gamma: float = 1.0,
    no_std_norm: bool = False,
    penalty: Float[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T"]:
    """The advantage of every token of the step; 0 where the policy did not choose. B is N * G, group by group.

    `penalty` is `beta * kl_t`, for a KL that is part of the reward. It is charged to the token itself and to those
    before it, as every reward is: `A_t = a - sum_{s >= t} penalty_s`. So it acts on groups of equal reward too, which
    are 0 without it. The group estimators do not discount, whatever `gamma` says: same scalar on every token.

    `reinforce_baseline` discounts by `gamma` per sampled token and is then normalised over all sampled tokens, so the
    whole step must be given at once; the normalisation moves a group of equal rewards off 0 as it moves all others.
    """
    scalars = ESTIMATORS[estimator](rewards.double()).reshape(-1)
    if estimator != "reinforce_baseline":
        return returns(scalars, sampled, gamma=1.0, penalty=penalty).to(rewards.dtype)
    discounted = returns(scalars, sampled, gamma=gamma, penalty=penalty)
    return normalise(discounted, sampled, by_deviation=not no_std_norm).to(rewards.dtype)


def returns(
    terminal: Float[Tensor, " B"],
    sampled: Bool[Tensor, "B T"],
    *,
    gamma: float,
    penalty: Float[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T"]:
    """Discounted sum of what follows each sampled token, itself included; 0 on the others.

    The reward of a token is `-penalty_t`, plus `terminal` on the last sampled one. Time is counted in sampled tokens:
    those of an environment between two turns decay nothing.
    """
    running = terminal.clone()
    out = torch.zeros_like(sampled, dtype=terminal.dtype)
    is_last = torch.ones_like(terminal, dtype=torch.bool)
    for t in range(sampled.shape[1] - 1, -1, -1):
        here = sampled[:, t]
        running = torch.where(here & ~is_last, running * gamma, running)
        if penalty is not None:
            running = torch.where(here, running - penalty[:, t], running)
        is_last = is_last & ~here
        out[:, t] = torch.where(here, running, 0.0)
    return out


def normalise(
    values: Float[Tensor, "B T"], sampled: Bool[Tensor, "B T"], *, by_deviation: bool
) -> Float[Tensor, "B T"]:
    """Subtract the mean over all sampled tokens and, if asked, divide by their (biased) deviation.

    A deviation under 1e-4 is taken for 1e-4, as in OpenRLHF, so that a step without any signal stays at 0.
    """
    count = sampled.sum().clamp(min=1)
    mean = torch.where(sampled, values, 0.0).sum() / count
    centred = torch.where(sampled, values - mean, 0.0)
    if not by_deviation:
        return centred
    variance = centred.square().sum() / count
    return centred / variance.clamp(min=1e-8).sqrt()
