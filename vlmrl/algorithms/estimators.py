"""The advantage estimators: one function per row of `vlmrl.config.built_in.ESTIMATORS`, with the same name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from vlmrl.algorithms import returns
from vlmrl.algorithms.baselines import normalize_by_group, step_advantages, subtract_group_mean, subtract_mean_of_others
from vlmrl.algorithms.returns import AdvantageEstimate, time_first
from vlmrl.algorithms.signal import has_signal

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


class StepRewards(NamedTuple):
    """The rewards of a whole step, and the settings of `advantages` that an estimator may read."""

    rewards: Float[Tensor, "N G"]
    scored: Bool[Tensor, "N G"]
    sampled: Bool[Tensor, "B T"]
    kl_penalty: Float[Tensor, "B T"] | None
    token_rewards: Float[Tensor, "B T"] | None
    values: Float[Tensor, "B T"] | None
    gamma: float
    lambd: float
    divide_by_std: bool
    """Normalisation over the step divides by the standard deviation."""

    @property
    def per_token(self) -> Float[Tensor, "B T"]:
        """The total reward of each token."""
        return returns.reward_per_token(
            self.rewards.reshape(-1), self.sampled, kl_penalty=self.kl_penalty, token_rewards=self.token_rewards
        )


def gae(step: StepRewards) -> AdvantageEstimate:
    """PPO with a critic: generalised advantage estimation (arXiv:1506.02438), normalised over the step.

    Raises:
        ValueError: `values` is None.
    """
    if step.values is None:
        raise ValueError("gae needs the values of a critic")
    return _normalise(step, returns.gae(step.per_token, step.values, step.sampled, gamma=step.gamma, lambd=step.lambd))


def reinforce(step: StepRewards) -> AdvantageEstimate:
    """REINFORCE++ (arXiv:2501.03262): discounted returns, normalised over the step."""
    return _normalise(step, AdvantageEstimate(returns.returns(step.per_token, step.sampled, gamma=step.gamma)))


def reinforce_baseline(step: StepRewards) -> AdvantageEstimate:
    """REINFORCE++ with a group baseline (arXiv:2501.03262)."""
    return reinforce(_compare(step, subtract_group_mean))


def rloo(step: StepRewards) -> AdvantageEstimate:
    """RLOO (arXiv:2402.14740): the baseline is the mean of the other responses."""
    return _accumulate(_compare(step, subtract_mean_of_others))


def group_norm(step: StepRewards) -> AdvantageEstimate:
    """GRPO (arXiv:2402.03300): rewards normalised within the group."""
    return _accumulate(_compare(step, normalize_by_group, divide_by_std=True))


def dr_grpo(step: StepRewards) -> AdvantageEstimate:
    """Dr. GRPO (arXiv:2503.20783): rewards minus the group's mean, not divided by the deviation."""
    return _accumulate(_compare(step, subtract_group_mean))


def _compare(
    step: StepRewards, baseline: Callable[[Tensor, Tensor], Tensor], *, divide_by_std: bool = False
) -> StepRewards:
    """Compare rewards, and those of reasoning steps, within each group.

    The only scored response of a group is masked, because it cannot be compared.
    """
    group_size = step.rewards.shape[1]
    is_compared = step.scored & (step.scored.sum(dim=1, keepdim=True) > 1)
    rewards = baseline(step.rewards, step.scored)
    token_rewards = step.token_rewards
    if token_rewards is not None:
        token_rewards = time_first(token_rewards.masked_fill(~is_compared.reshape(-1, 1), 0.0))
        step_rewards = token_rewards.sum(dim=1).view_as(step.rewards)
        has_no_signal = ~has_signal(step.rewards, step_rewards=step_rewards, scored=step.scored)
        token_rewards = step_advantages(token_rewards, group_size=group_size, divide_by_std=divide_by_std)
        token_rewards = token_rewards.masked_fill(has_no_signal.repeat_interleave(group_size)[:, None], 0.0)
        rewards = rewards.masked_fill(has_no_signal[:, None], 0.0)
    sampled = time_first(step.sampled & is_compared.reshape(-1, 1))
    return step._replace(rewards=rewards, sampled=sampled, token_rewards=token_rewards)


def _accumulate(step: StepRewards) -> AdvantageEstimate:
    """Sum the rewards of each token and all later ones, without discount."""
    return AdvantageEstimate(returns.returns(step.per_token, step.sampled, gamma=1.0))


def _normalise(step: StepRewards, estimate: AdvantageEstimate) -> AdvantageEstimate:
    advantages = returns.normalise(estimate.advantages, step.sampled, divide_by_std=step.divide_by_std)
    return estimate._replace(advantages=advantages)
