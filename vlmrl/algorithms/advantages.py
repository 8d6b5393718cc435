"""Turn the rewards of a step into one advantage per sampled token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vlmrl.algorithms.filtering import teaches
from vlmrl.algorithms.returns import Estimated, gae, normalise, payments, returns, time_first
from vlmrl.algorithms.user_function import OwnFunction, call, declared, name_of
from vlmrl.errors import ConfigError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

FLAG = "algo.advantage.estimator"
OFFERED = ("rewards", "sampled", "values", "penalty", "token_rewards", "scored")
"""What a user's own estimator may declare; see `advantages`."""


def reward_minus_group_mean(
    rewards: Float[Tensor, "N G"], scored: Bool[Tensor, "N G"] | None = None
) -> Float[Tensor, "N G"]:
    """`R - mean_j R`: the baseline of Dr. GRPO (arXiv:2503.20783) and of REINFORCE++ with a group baseline.

    A group that does not teach is exactly 0: the rounding error of a mean must not become a gradient, least of all
    after a division by a deviation that is as small. A response that is not `scored` is in no mean, and 0; None: all
    are.
    """
    scored = _all_scored(rewards) if scored is None else scored
    count = scored.sum(dim=1, keepdim=True).clamp(min=1)
    mean = rewards.masked_fill(~scored, 0.0).sum(dim=1, keepdim=True) / count
    return torch.where(scored & teaches(rewards, scored=scored)[:, None], rewards - mean, 0.0)


def group_norm(rewards: Float[Tensor, "N G"], scored: Bool[Tensor, "N G"] | None = None) -> Float[Tensor, "N G"]:
    """`(R - mean_j R) / (std_j R + 1e-6)` with the unbiased deviation (GRPO, arXiv:2402.03300), over the `scored`."""
    scored = _all_scored(rewards) if scored is None else scored
    centred = reward_minus_group_mean(rewards, scored)
    freedom = (scored.sum(dim=1, keepdim=True) - 1).clamp(min=1)
    return centred / ((centred.square().sum(dim=1, keepdim=True) / freedom).sqrt() + 1e-6)


def rloo(rewards: Float[Tensor, "N G"], scored: Bool[Tensor, "N G"] | None = None) -> Float[Tensor, "N G"]:
    """`R` minus the mean of the other `scored` responses of its group (arXiv:2402.14740)."""
    scored = _all_scored(rewards) if scored is None else scored
    others = (scored.sum(dim=1, keepdim=True) - 1).clamp(min=1)
    left_out = (rewards.masked_fill(~scored, 0.0).sum(dim=1, keepdim=True) - rewards) / others
    return torch.where(scored & teaches(rewards, scored=scored)[:, None], rewards - left_out, 0.0)


def _as_is(rewards: Float[Tensor, "N G"], scored: Bool[Tensor, "N G"] | None = None) -> Float[Tensor, "N G"]:
    return rewards


def _all_scored(rewards: Float[Tensor, "N G"]) -> Bool[Tensor, "N G"]:
    return torch.ones_like(rewards, dtype=torch.bool)


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gae": _as_is,
    "reinforce": _as_is,
    "reinforce_baseline": reward_minus_group_mean,
    "rloo": rloo,
    "group_norm": group_norm,
    "dr_grpo": reward_minus_group_mean,
}
"""`algo.advantage.estimator` -> the scalar of a response, from rewards and what is scored, [N, G] each, to [N, G]."""

_ROUNDING = 1e-6
"""Of fp32, as a share of a number."""

DISCOUNTED = frozenset({"gae", "reinforce", "reinforce_baseline"})
"""Those that discount by gamma, and are normalised over all sampled tokens of the step."""


def check(estimator: str | OwnFunction, *, has_critic: bool = False) -> None:
    """Refuse an estimator that `advantages` could not use.

    Raises:
        ConfigError: no estimator has this name, the user's function demands what it cannot be given, or it has a critic
            that it never asks.
    """
    if callable(estimator):
        if "values" not in declared(estimator, OFFERED, flag=FLAG) and has_critic:
            raise ConfigError(
                f"{FLAG}: {name_of(estimator)} does not declare the values of the critic that "
                "critic.model_name_or_path gives it: leave that out, or declare them"
            )
    elif estimator not in ESTIMATORS:
        raise ConfigError(f"{FLAG}: no estimator is called {estimator}; there are: {', '.join(ESTIMATORS)}")


def advantages(
    rewards: Float[Tensor, "N G"],
    sampled: Bool[Tensor, "B T"],
    *,
    estimator: str | OwnFunction,
    gamma: float = 1.0,
    lambd: float = 1.0,
    no_std_norm: bool = False,
    penalty: Float[Tensor, "B T"] | None = None,
    token_rewards: Float[Tensor, "B T"] | None = None,
    values: Float[Tensor, "B T"] | None = None,
    scored: Bool[Tensor, "N G"] | None = None,
) -> Estimated:
    """The advantage of every token of the step; 0 where the policy did not choose. B is N * G, group by group.

    A response that is not `scored` has no reward (a server was down): it is in no baseline and in no normalisation, and
    its advantages are 0. None: all are scored. For the estimators with a group baseline, so is the only scored response
    of a group, which has nothing to be compared with.

    `penalty` is `beta * kl_t`, for a KL that is part of the reward. It is charged to the token itself and to those
    before it, as every reward is: `A_t = a - sum_{s >= t} penalty_s`. So it acts on groups of equal reward too, which
    are 0 without it. `token_rewards` are those of a process reward model, earned by the token itself and by those
    before it; an estimator with a group baseline first gives them one, `step_advantages`.

    The group estimators do not discount, whatever `gamma` says: same scalar on every token. `gae`, `reinforce` and
    `reinforce_baseline` discount by `gamma` per sampled token and are then normalised over all sampled tokens, so the
    whole step must be given at once; the normalisation moves a group of equal rewards off 0 as it moves all others.
    `gae` needs the critic's `values`; its returns are not normalised.

    A user's own `estimator` is called with what it declares of `rewards`, `sampled`, `values`, `penalty` and
    `token_rewards`, None for what this run has not. It returns scalars [N, G], which go to every sampled token, or
    advantages [B, T]. Nothing is normalised. Penalty and token rewards are charged as above unless it declares them. It
    may declare `scored` too; in `rewards` a response without a score has the mean of those of its group. Its critic,
    where it has one, is to predict what the sampled tokens are followed by, not discounted.

    Raises:
        ValueError: shapes that do not fit together; `gae` without values.
        ConfigError: the user's own estimator cannot be called, fails, or returns something else.
    """
    _check_shapes(rewards, sampled, penalty=penalty, token_rewards=token_rewards, values=values)
    check(estimator)
    scored = _all_scored(rewards) if scored is None else scored
    takes_part = scored
    if not callable(estimator) and ESTIMATORS[estimator] is not _as_is:
        takes_part = scored & (scored.sum(dim=1, keepdim=True) > 1)
    sampled = sampled & takes_part.reshape(-1, 1)
    if token_rewards is not None:
        token_rewards = token_rewards.masked_fill(~takes_part.reshape(-1, 1), 0.0)
    if callable(estimator):
        given = {"penalty": penalty, "token_rewards": token_rewards, "values": values}
        return _own(estimator, _filled(rewards, scored), sampled, scored=scored, **given)
    sampled = time_first(sampled)
    penalty, token_rewards, values = (None if x is None else time_first(x) for x in (penalty, token_rewards, values))
    scalars = ESTIMATORS[estimator](rewards.double(), scored)
    if token_rewards is not None and ESTIMATORS[estimator] is not _as_is:
        step_rewards = token_rewards.sum(dim=1).view_as(rewards)
        is_idle = ~teaches(rewards, step_rewards=step_rewards, scored=scored)
        by_deviation = estimator == "group_norm"
        token_rewards = step_advantages(token_rewards, group_size=rewards.shape[1], by_deviation=by_deviation)
        token_rewards = token_rewards.masked_fill(is_idle.repeat_interleave(rewards.shape[1])[:, None], 0.0)
        scalars = scalars.masked_fill(is_idle[:, None], 0.0)
    paid = payments(scalars.reshape(-1), sampled, penalty=penalty, token_rewards=token_rewards)
    if estimator == "gae":
        if values is None:
            raise ValueError("gae needs the values of a critic")
        found = gae(paid, values, sampled, gamma=gamma, lambd=lambd)
    else:
        found = Estimated(returns(paid, sampled, gamma=gamma if estimator in DISCOUNTED else 1.0))
    if estimator in DISCOUNTED:
        found = found._replace(advantages=normalise(found.advantages, sampled, by_deviation=not no_std_norm))
    return _single(found)


def step_advantages(
    token_rewards: Float[Tensor, "B T"], *, group_size: int, by_deviation: bool
) -> Float[Tensor, "B T"]:
    """The rewards of reasoning steps against those of all steps of the group (arXiv:2402.03300, section 4.1.3).

    A step is a token whose reward is not 0, its share of the mean over the answer's steps. Of the steps' own rewards,
    the mean of the group is subtracted; `by_deviation` divides by the unbiased deviation + 1e-6, too. What is left is
    shared out among the answer's steps again, so that many steps earn no more than few, and lose no more: compared
    share by share, an answer would lose by having many. Steps that are all worth the same are exactly 0.
    """
    is_step = token_rewards != 0
    num_steps = is_step.sum(dim=1, keepdim=True).clamp(min=1)
    token_rewards = token_rewards * num_steps

    def of_group(by_answer: Float[Tensor, " B"], combine: Callable[[Tensor], Tensor]) -> Float[Tensor, "B 1"]:
        return combine(by_answer.reshape(-1, group_size)).repeat_interleave(group_size)[:, None]

    def group_sum(per_token: Float[Tensor, "B T"]) -> Float[Tensor, "B 1"]:
        return of_group(per_token.sum(dim=1), lambda answers: answers.sum(dim=1))

    highest = of_group(token_rewards.amax(dim=1), lambda answers: answers.amax(dim=1))
    lowest = of_group(token_rewards.amin(dim=1), lambda answers: answers.amin(dim=1))
    # Counted from one of the steps, because the rounding error of a mean must not become the gradient of equal steps.
    origin = torch.where(highest > 0, highest, lowest).double()
    counts = group_sum(is_step)
    centred = (token_rewards - origin).masked_fill_(~is_step, 0.0)
    centred.masked_fill_(centred.abs() <= _ROUNDING * origin.abs(), 0.0)
    centred.sub_(group_sum(centred) / counts.clamp(min=1)).masked_fill_(~is_step, 0.0)
    if by_deviation:
        variance = group_sum(centred.square()) / (counts - 1).clamp(min=1)
        centred.div_(variance.sqrt() + 1e-6)
    return centred.div_(num_steps)


def _filled(rewards: Float[Tensor, "N G"], scored: Bool[Tensor, "N G"]) -> Float[Tensor, "N G"]:
    """The mean of a group's scored responses for those that have no reward; 0 where the group has none at all."""
    count = scored.sum(dim=1, keepdim=True).clamp(min=1)
    mean = rewards.masked_fill(~scored, 0.0).sum(dim=1, keepdim=True) / count
    return torch.where(scored, rewards, mean)


def _own(
    estimator: OwnFunction,
    rewards: Float[Tensor, "N G"],
    sampled: Bool[Tensor, "B T"],
    *,
    scored: Bool[Tensor, "N G"],
    penalty: Float[Tensor, "B T"] | None,
    token_rewards: Float[Tensor, "B T"] | None,
    values: Float[Tensor, "B T"] | None,
) -> Estimated:
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
    by_answer = found.shape == rewards.shape
    on_tokens = found.reshape(-1, 1).expand(sampled.shape) if by_answer else found
    on_tokens = torch.where(sampled, on_tokens, 0.0)
    if not bool(on_tokens.isfinite().all()):
        raise ConfigError(f"{FLAG}: an advantage of the estimator {name_of(estimator)} is not a finite number")
    names = declared(estimator, OFFERED, flag=FLAG)
    unseen = payments(
        torch.zeros(len(sampled), device=sampled.device),
        sampled,
        penalty=None if "penalty" in names else penalty,
        token_rewards=None if "token_rewards" in names else token_rewards,
    )
    targets = None
    if values is not None:
        paid = payments(rewards.reshape(-1), sampled, penalty=penalty, token_rewards=token_rewards)
        targets = returns(paid, sampled, gamma=1.0)
    return _single(Estimated(on_tokens + returns(unseen, sampled, gamma=1.0), targets))


def _check_shapes(rewards: Tensor, sampled: Tensor, **per_token: Tensor | None) -> None:
    if rewards.dim() != 2 or sampled.dim() != 2 or rewards.numel() != len(sampled):
        raise ValueError(f"rewards {list(rewards.shape)} and tokens {list(sampled.shape)} are not N * G answers")
    for name, given in per_token.items():
        if given is not None and given.shape != sampled.shape:
            raise ValueError(f"{name} {list(given.shape)} does not line up with the tokens {list(sampled.shape)}")


def _single(found: Estimated) -> Estimated:
    advantages, targets = (None if x is None else x.float().contiguous() for x in found)
    assert advantages is not None
    return Estimated(advantages, targets)
