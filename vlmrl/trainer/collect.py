"""Collect the scored groups of a step, until the batch is full or the run has to end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vlmrl.config.verbs import RlConfig
from vlmrl.errors import RewardError
from vlmrl.trainer.episodes import check_episodes, count_failed, episode_metrics
from vlmrl.trainer.experience import batch_metrics, shaped_rewards
from vlmrl.trainer.filtering import FilteredGroup, RewardRange, filter_groups, format_shortage, is_solved
from vlmrl.trainer.protocols import Report, Rewarder, Rollouts
from vlmrl.types import Group, Metrics
from vlmrl.verify.logprobs import check_versions


class PromptBudget:
    """The prompts of a run: `total` over all its episodes, of which `drawn` have been drawn."""

    def __init__(self, total: int, *, drawn: int = 0) -> None:
        self.total = total
        self.drawn = drawn

    @property
    def left(self) -> int:
        # A resumed run may have fewer episodes than it has already made.
        return max(self.total - self.drawn, 0)


class Collected(NamedTuple):
    """The groups of a step."""

    groups: list[FilteredGroup]
    """All groups, those that are not trained on included."""
    metrics: Metrics

    @property
    def kept(self) -> list[FilteredGroup]:
        return [group for group in self.groups if group.is_kept]


class Ending(NamedTuple):
    """The end of a run."""

    step: int
    """The last finished step."""
    reason: str | None = None
    """Message for users when the run ended early; None when it made its last step."""
    is_solved: bool = False
    """The prompts are solved: nothing is left to learn from them."""
    left_out: int = 0
    """Prompts at the end of the data that did not fill another batch."""


class ExhaustedError(RewardError):
    """Dynamic filtering kept too few groups, though the prompts are not solved."""


def collect(
    config: RlConfig,
    step: int,
    *,
    rollouts: Rollouts,
    rewarder: Rewarder,
    report: Report,
    budget: PromptBudget,
    reward_range: RewardRange,
) -> Collected | Ending:
    """Take groups in the order of their prompts, and score them.

    With `algo.dynamic_filtering_enable` (DAPO, arXiv:2503.14476) groups without a learning signal are replaced by those
    of fresh prompts until the batch is full. The run ends when the budget's prompts cannot fill it, or when most of the
    constant groups are solved. Metrics of rewards and lengths are over all groups, whether kept or not.

    Raises:
        SyncError: a response comes from other weights than the trainer's.
        ExhaustedError: too few groups are kept after `algo.dynamic_filtering_max_draws` draws.
        RewardError: the prompts of the whole run do not fill one batch.
    """
    algo, size = config.algo, config.rollout.batch_size
    max_draws = size * (algo.dynamic_filtering_max_draws if algo.dynamic_filtering_enable else 1)
    collected: list[FilteredGroup] = []
    missing, left_out = size, budget.left
    num_failed, num_without_reward = 0, 0
    data_metrics: Metrics = {}
    while missing:
        if budget.left < missing:
            solved = is_solved(config, collected, reward_range.extended(collected))
            return _out_of_prompts(config, step, budget, left_out, solved)
        if len(collected) == max_draws:
            return _exhausted(config, step, collected, reward_range.extended(collected))
        groups, draw_metrics = rollouts.take(min(missing, max_draws - len(collected)))
        budget.drawn += len(groups)
        check_versions(groups, version=step - 1, max_age=config.train.queue_size)
        num_responses = config.rollout.n_samples_per_prompt * max(size, len(collected) + len(groups))
        check_episodes(config, [*(each.group for each in collected), *groups], num_responses=num_responses)
        with report.phase("reward"):
            scores = rewarder.score(groups, out_of=num_responses, failed=num_without_reward)
            num_failed += sum(score.failed for group_scores in scores for score in group_scores)
            without_reward = sum(not score.has_reward for group_scores in scores for score in group_scores)
            num_without_reward += without_reward - count_failed(groups)  # they have a bound of their own
        bytes_moved = data_metrics.get("media/bytes_moved", 0.0) + draw_metrics["media/bytes_moved"]
        data_metrics = draw_metrics | {"media/bytes_moved": bytes_moved}
        collected += filter_groups(config, groups, scores)
        missing = size - sum(group.is_kept for group in collected)
    data_metrics["reward/failed"] = float(num_failed)
    return Collected(collected, data_metrics | _collected_metrics(config, step, collected))


def _collected_metrics(config: RlConfig, step: int, groups: Sequence[FilteredGroup]) -> Metrics:
    """Metrics of all groups; with dynamic filtering, of the kept ones as well."""

    def metrics_of(some: Sequence[FilteredGroup]) -> Metrics:
        plain, scores = [group.group for group in some], [group.scores for group in some]
        return batch_metrics(plain, scores, shaped_rewards(config, plain, scores))

    metrics = metrics_of(groups) | episode_metrics([group.group for group in groups])
    if not config.scores_responses:  # a teacher alone: rewards that are always 0 would only look like a failure
        metrics = {name: value for name, value in metrics.items() if not name.startswith(("reward/", "group/"))}
    if config.train.queue_size:
        metrics |= staleness_metrics([group.group for group in groups if group.is_kept], version=step - 1)
    if config.algo.dynamic_filtering_enable:
        kept = [group for group in groups if group.is_kept]
        metrics |= {"filter/kept_fraction": len(kept) / len(groups), "filter/groups_drawn": float(len(groups))}
        metrics |= {_NAME_OF_KEPT[name]: value for name, value in metrics_of(kept).items() if name in _NAME_OF_KEPT}
    return metrics


def staleness_metrics(groups: Sequence[Group], *, version: int) -> Metrics:
    """How many versions the weights that sampled a token are behind `version`, over all sampled tokens."""
    segments = [segment for group in groups for segment in group.segments]
    ages = version - np.concatenate([segment.versions[segment.sampled] for segment in segments])
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return {
        "async/staleness_mean": float(ages.mean()) if len(ages) else 0.0,
        "async/staleness_max": float(ages.max(initial=0)),
        "async/mixed_fraction": sum(len(rollout.versions) > 1 for rollout in rollouts) / len(rollouts),
    }


_NAME_OF_KEPT = {
    "reward/mean": "filter/reward_mean",
    "reward/std": "filter/reward_std",
    "response/tokens_mean": "filter/tokens_mean",
    "response/truncated_fraction": "filter/truncated_fraction",
}
"""Name of a metric over all groups -> its name over the kept groups."""


def _out_of_prompts(config: RlConfig, step: int, budget: PromptBudget, left_out: int, solved: bool) -> Ending:
    episodes, size = config.train.num_episodes, config.rollout.batch_size
    if step == 1 and not solved:
        raise RewardError(
            f"of the run's {budget.total} prompts (train.num_episodes {episodes}) fewer than one batch of {size} give "
            "a learning signal: lower --rollout.batch_size, choose easier or harder prompts, or raise "
            "--train.num_episodes"
        )
    reason = f"the run ends after step {step - 1}: the {budget.total} prompts of its episodes are drawn"
    if left_out:
        reason += f"; the last {left_out} do not fill a batch of {size} and are left out"
    if solved:
        reason += "; most of them are solved"
    return Ending(step - 1, reason=reason, is_solved=solved, left_out=left_out)


def _exhausted(config: RlConfig, step: int, groups: Sequence[FilteredGroup], reward_range: RewardRange) -> Ending:
    shortage = format_shortage(config, groups)
    if is_solved(config, groups, reward_range):
        reason = f"the run ends after step {step - 1}, its prompts are solved: {shortage}"
        return Ending(step - 1, reason=reason, is_solved=True)
    raise ExhaustedError(
        f"{shortage}; choose easier or harder prompts, widen the range, or raise --algo.dynamic_filtering_max_draws"
    )
