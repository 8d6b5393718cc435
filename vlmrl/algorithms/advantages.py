"""Advantages of the sampled tokens of a step, computed by a function of `estimators.py` or a user's function."""

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
ARGUMENTS = ("rewards", "sampled", "values", "kl_penalty", "token_rewards", "scored")
"""Arguments that a user's estimator may declare; see `advantages`."""


def check(estimator: UserFunction, *, has_critic: bool = False) -> None:
    """Check that `advantages` can call a user's estimator.

    Raises:
        ConfigError: it requires other arguments, or it has a critic and does not declare `values`.
    """
    if "values" not in declared(estimator, ARGUMENTS, flag=FLAG) and has_critic:
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
    kl_penalty: Float[Tensor, "B T"] | None = None,
    token_rewards: Float[Tensor, "B T"] | None = None,
    values: Float[Tensor, "B T"] | None = None,
    scored: Bool[Tensor, "N G"] | None = None,
) -> AdvantageEstimate:
    """Compute the advantage of every token of the step; 0 where not sampled. B is N * G, group by group.

    A response that is not `scored` has no reward (a server was down): baselines and normalisation ignore it, and its
    advantages are 0. None: all are scored. Estimators with a group baseline treat the only scored response of a group
    in the same way, because it cannot be compared.

    `kl_penalty` is `beta * kl_t`, for a KL that is part of the reward. Like any reward it counts for the token itself
    and for all earlier ones: `A_t = a - sum_{s >= t} kl_penalty_s`. So it also acts on groups of equal reward, whose
    advantages are 0 without it. `token_rewards` come from a process reward model and count for the token itself and all
    earlier ones; estimators with a group baseline first compare them within the group (`step_advantages`).

    `estimator` is the name of a function in `estimators.py`, or a user's function. The estimators that discount by
    `gamma` per sampled token also normalise over all sampled tokens, so they need the whole step in one call; this
    shifts a group of equal rewards away from 0 like all others. Returns are not normalised.

    A user's function is called with the `ARGUMENTS` that it declares, None for those that the run does not have. It
    returns scalars [N, G], which apply to every sampled token, or advantages [B, T], which are not normalised. Penalty
    and token rewards are added as above unless it declares them. In its `rewards`, a response without a score has the
    mean of its group. The targets of its critic, if it has one, are undiscounted returns.

    Raises:
        ValueError: shapes do not match, or values are missing for an estimator that needs them.
        ConfigError: the user's estimator cannot be called, fails, or returns something else.
    """
    _check_shapes(rewards, sampled, kl_penalty=kl_penalty, token_rewards=token_rewards, values=values)
    scored = torch.ones_like(rewards, dtype=torch.bool) if scored is None else scored
    sampled = sampled & scored.reshape(-1, 1)
    if token_rewards is not None:
        token_rewards = token_rewards.masked_fill(~scored.reshape(-1, 1), 0.0)
    if callable(estimator):
        optional = {"kl_penalty": kl_penalty, "token_rewards": token_rewards, "values": values}
        return _user_advantages(estimator, _fill_unscored(rewards, scored), sampled, scored=scored, **optional)
    kl_penalty, token_rewards, values = (
        None if x is None else time_first(x) for x in (kl_penalty, token_rewards, values)
    )
    step = StepRewards(
        rewards=rewards.double(),
        scored=scored,
        sampled=time_first(sampled),
        kl_penalty=kl_penalty,
        token_rewards=token_rewards,
        values=values,
        gamma=gamma,
        lambd=lambd,
        divide_by_std=not no_std_norm,
    )
    return _to_float32(getattr(estimators, estimator)(step))


def _fill_unscored(rewards: Float[Tensor, "N G"], scored: Bool[Tensor, "N G"]) -> Float[Tensor, "N G"]:
    """Give responses without a reward the mean of their group's scored responses; 0 if the group has none."""
    count = scored.sum(dim=1, keepdim=True).clamp(min=1)
    mean = rewards.masked_fill(~scored, 0.0).sum(dim=1, keepdim=True) / count
    return torch.where(scored, rewards, mean)


def _user_advantages(
    estimator: UserFunction,
    rewards: Float[Tensor, "N G"],
    sampled: Bool[Tensor, "B T"],
    *,
    scored: Bool[Tensor, "N G"],
    kl_penalty: Float[Tensor, "B T"] | None,
    token_rewards: Float[Tensor, "B T"] | None,
    values: Float[Tensor, "B T"] | None,
) -> AdvantageEstimate:
    offered = {
        "rewards": rewards,
        "sampled": sampled,
        "values": values,
        "kl_penalty": kl_penalty,
        "token_rewards": token_rewards,
        "scored": scored,
    }
    shapes = [tuple(rewards.shape), tuple(sampled.shape)]
    returned = call(estimator, offered, shapes=shapes, flag=FLAG).double()
    is_per_response = returned.shape == rewards.shape
    per_token = returned.reshape(-1, 1).expand(sampled.shape) if is_per_response else returned
    per_token = torch.where(sampled, per_token, 0.0)
    if not bool(per_token.isfinite().all()):
        raise ConfigError(f"{FLAG}: an advantage of the estimator {name_of(estimator)} is not a finite number")
    names = declared(estimator, ARGUMENTS, flag=FLAG)
    undeclared = reward_per_token(
        torch.zeros(len(sampled), device=sampled.device),
        sampled,
        kl_penalty=None if "kl_penalty" in names else kl_penalty,
        token_rewards=None if "token_rewards" in names else token_rewards,
    )
    targets = None
    if values is not None:
        token_totals = reward_per_token(
            rewards.reshape(-1), sampled, kl_penalty=kl_penalty, token_rewards=token_rewards
        )
        targets = returns(token_totals, sampled, gamma=1.0)
    return _to_float32(AdvantageEstimate(per_token + returns(undeclared, sampled, gamma=1.0), targets))


def _check_shapes(rewards: Tensor, sampled: Tensor, **per_token: Tensor | None) -> None:
    if rewards.dim() != 2 or sampled.dim() != 2 or rewards.numel() != len(sampled):
        raise ValueError(f"rewards {list(rewards.shape)} and tokens {list(sampled.shape)} are not of N * G responses")
    for name, tensor in per_token.items():
        if tensor is not None and tensor.shape != sampled.shape:
            raise ValueError(f"{name} {list(tensor.shape)} does not have the shape of the tokens {list(sampled.shape)}")


def _to_float32(estimate: AdvantageEstimate) -> AdvantageEstimate:
    advantages, targets = (None if x is None else x.float().contiguous() for x in estimate)
    assert advantages is not None
    return AdvantageEstimate(advantages, targets)
