"""Turn the rewards of a step into one advantage per sampled token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vlmrl.algorithms import estimators
from vlmrl.algorithms.estimators import StepRewards
from vlmrl.algorithms.returns import AdvantageEstimate, returns, reward_per_token, time_first
from vlmrl.algorithms.user_function import UserFunction, call
from vlmrl.errors import ConfigError
from vlmrl.system.user_function import declared, name_of

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

FLAG = "algo.advantage.estimator"
OFFERED = ("rewards", "sampled", "values", "penalty", "token_rewards", "scored")
"""What a user's own estimator may declare; see `advantages`."""


def check(estimator: UserFunction, *, has_critic: bool = False) -> None:
    """Refuse a user's estimator that `advantages` could not use.

    Raises:
        ConfigError: it demands what it cannot be given, or it has a critic that it never asks.
    """
    if "values" not in declared(estimator, OFFERED, flag=FLAG) and has_critic:
        raise ConfigError(
            f"{FLAG}: {name_of(estimator)} does not declare the values of the critic that "
            "critic.model_name_or_path gives it: leave that out, or declare them"
        )


def advantages(
    rewards: Float[Tensor, "N G"],
    sampled: Bool[Tensor, "B T"],
    *,
    estimator: str | UserFunction,
    gamma: float = 1.0,
    lambd: float = 1.0,
    no_std_norm: bool = False,
    penalty: Float[Tensor, "B T"] | None = None,
    token_rewards: Float[Tensor, "B T"] | None = None,
    values: Float[Tensor, "B T"] | None = None,
    scored: Bool[Tensor, "N G"] | None = None,
) -> AdvantageEstimate:
    """The advantage of every token of the step; 0 where the policy did not choose. B is N * G, group by group.

    A response that is not `scored` has no reward (a server was down): it is in no baseline and in no normalisation, and
    its advantages are 0. None: all are scored. For the estimators with a group baseline, so is the only scored response
    of a group, which has nothing to be compared with.

    `penalty` is `beta * kl_t`, for a KL that is part of the reward. It is charged to the token itself and to those
    before it, as every reward is: `A_t = a - sum_{s >= t} penalty_s`. So it acts on groups of equal reward too, which
    are 0 without it. `token_rewards` are those of a process reward model, earned by the token itself and by those
    before it; an estimator with a group baseline first gives them one, `step_advantages`.

    `estimator` is the name of a function in `estimators.py`, or a user's own function. Those that discount by `gamma`
    per sampled token are then normalised over all sampled tokens, so the whole step must be given at once; the
    normalisation moves a group of equal rewards off 0 as it moves all others. Returns are not normalised.

    A user's own function is called with what it declares of `rewards`, `sampled`, `values`, `penalty` and
    `token_rewards`, None for what this run has not. It returns scalars [N, G], which go to every sampled token, or
    advantages [B, T]. Nothing is normalised. Penalty and token rewards are charged as above unless it declares them. It
    may declare `scored` too; in `rewards` a response without a score has the mean of those of its group. Its critic,
    where it has one, is to predict what the sampled tokens are followed by, not discounted.

    Raises:
        ValueError: shapes that do not fit together; no values for an estimator that needs them.
        ConfigError: the user's own estimator cannot be called, fails, or returns something else.
    """
    _check_shapes(rewards, sampled, penalty=penalty, token_rewards=token_rewards, values=values)
    scored = torch.ones_like(rewards, dtype=torch.bool) if scored is None else scored
    sampled = sampled & scored.reshape(-1, 1)
    if token_rewards is not None:
        token_rewards = token_rewards.masked_fill(~scored.reshape(-1, 1), 0.0)
    if callable(estimator):
        given = {"penalty": penalty, "token_rewards": token_rewards, "values": values}
        return _own(estimator, _filled(rewards, scored), sampled, scored=scored, **given)
    penalty, token_rewards, values = (None if x is None else time_first(x) for x in (penalty, token_rewards, values))
    step = StepRewards(
        rewards=rewards.double(),
        scored=scored,
        sampled=time_first(sampled),
        penalty=penalty,
        token_rewards=token_rewards,
        values=values,
        gamma=gamma,
        lambd=lambd,
        divide_by_std=not no_std_norm,
    )
    return _single(getattr(estimators, estimator)(step))


def _filled(rewards: Float[Tensor, "N G"], scored: Bool[Tensor, "N G"]) -> Float[Tensor, "N G"]:
    """The mean of a group's scored responses for those that have no reward; 0 where the group has none at all."""
    count = scored.sum(dim=1, keepdim=True).clamp(min=1)
    mean = rewards.masked_fill(~scored, 0.0).sum(dim=1, keepdim=True) / count
    return torch.where(scored, rewards, mean)


def _own(
    estimator: UserFunction,
    rewards: Float[Tensor, "N G"],
    sampled: Bool[Tensor, "B T"],
    *,
    scored: Bool[Tensor, "N G"],
    penalty: Float[Tensor, "B T"] | None,
    token_rewards: Float[Tensor, "B T"] | None,
    values: Float[Tensor, "B T"] | None,
) -> AdvantageEstimate:
    offered = {
        "rewards": rewards,
        "sampled": sampled,
        "values": values,
        "penalty": penalty,
        "token_rewards": token_rewards,
        "scored": scored,
    }
    shapes = [tuple(rewards.shape), tuple(sampled.shape)]
    found = call(estimator, offered, shapes=shapes, flag=FLAG).double()
    by_response = found.shape == rewards.shape
    on_tokens = found.reshape(-1, 1).expand(sampled.shape) if by_response else found
    on_tokens = torch.where(sampled, on_tokens, 0.0)
    if not bool(on_tokens.isfinite().all()):
        raise ConfigError(f"{FLAG}: an advantage of the estimator {name_of(estimator)} is not a finite number")
    names = declared(estimator, OFFERED, flag=FLAG)
    unseen = reward_per_token(
        torch.zeros(len(sampled), device=sampled.device),
        sampled,
        penalty=None if "penalty" in names else penalty,
        token_rewards=None if "token_rewards" in names else token_rewards,
    )
    targets = None
    if values is not None:
        paid = reward_per_token(rewards.reshape(-1), sampled, penalty=penalty, token_rewards=token_rewards)
        targets = returns(paid, sampled, gamma=1.0)
    return _single(AdvantageEstimate(on_tokens + returns(unseen, sampled, gamma=1.0), targets))


def _check_shapes(rewards: Tensor, sampled: Tensor, **per_token: Tensor | None) -> None:
    if rewards.dim() != 2 or sampled.dim() != 2 or rewards.numel() != len(sampled):
        raise ValueError(f"rewards {list(rewards.shape)} and tokens {list(sampled.shape)} are not N * G responses")
    for name, given in per_token.items():
        if given is not None and given.shape != sampled.shape:
            raise ValueError(f"{name} {list(given.shape)} does not line up with the tokens {list(sampled.shape)}")


def _single(found: AdvantageEstimate) -> AdvantageEstimate:
    advantages, targets = (None if x is None else x.float().contiguous() for x in found)
    assert advantages is not None
    return AdvantageEstimate(advantages, targets)
