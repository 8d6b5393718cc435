"""Reward sources of a run: functions and servers in separate processes, and reward models over ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from vlmrl.cluster.models import Ranks
from vlmrl.cluster.worker_group import WorkerGroup
from vlmrl.config.reward import Scoring
from vlmrl.data.packing import by_response
from vlmrl.data.responses import to_samples
from vlmrl.errors import RewardError
from vlmrl.rewards.bounds import problem_of_reward
from vlmrl.rewards.failures import FirstFailures
from vlmrl.types import Floats, Group, Rollout, Sample, Score

if TYPE_CHECKING:
    from vlmrl.learning.reward_model import RewardModel
    from vlmrl.rewards.rewarder import Rewarder


@dataclass(frozen=True, slots=True, kw_only=True)
class RewarderSettings:
    """Settings of `Rewarder`."""

    reward: Scoring
    token: str | None
    """Token for reward servers that require one."""
    log: Path
    """File for the output of functions."""
    label_key: str
    """The column of the label."""

    def build(self) -> Rewarder:
        from vlmrl.rewards.rewarder import Rewarder

        return Rewarder(self.reward, token=self.token, log=self.log, label_key=self.label_key)


class RemoteRewarder:
    """Reward functions and reward servers, in an async actor with scoring processes below it."""

    def __init__(self, group: WorkerGroup[Rewarder], *, say: Callable[[str], None]) -> None:
        """Start them.

        Args:
            say: shows users why responses could not be scored, once for each kind of failure.

        Raises:
            ConfigError: as `Rewarder.start`.
        """
        self._group = group
        self._first_failures = FirstFailures(say)
        self._begun: list[ray.ObjectRef[Any]] = []
        self._lock = threading.Lock()
        """Guards `_begun`: groups may be begun in another thread than that which collects their scores."""
        group.call(lambda rewarder: rewarder.start())

    def begin(self, group: Group) -> None:
        """Start to score a group, and return at once."""
        with self._lock:
            self._begun += self._group.submit(lambda rewarder: rewarder.begin(group))

    def score(self, groups: Sequence[Group], *, out_of: int | None = None, failed: int = 0) -> list[list[Score]]:
        """Return one score per response, group by group; see `Rewarder.score`."""
        with self._lock:
            begun, self._begun = self._begun, []
        # An async actor may run calls in another order than that of their submission.
        with suppress(RewardError):  # `score` raises it too
            self._group.wait(begun)
        scores = self._group.call(lambda rewarder: rewarder.score(list(groups), out_of=out_of, failed=failed))[0]
        self._first_failures.see(groups, scores)
        return scores

    def close(self) -> None:
        self._group.end(lambda rewarder: rewarder.close())


@dataclass(frozen=True, slots=True)
class RemoteRewardModel:
    """A reward model over ranks."""

    name: str
    """Name in metrics: `model` or `process`."""
    ranks: Ranks[RewardModel]
    weight: float
    is_process: bool
    """Whether it scores the steps of a response, each at its last token, instead of the response."""

    def score(self, samples: Sequence[Sample], *, as_odds: bool = False) -> Sequence[float | Floats]:
        """Return the score of each sample; for a process reward model the scores of its steps, [T], or their
        log-odds."""
        if self.is_process:
            return self.ranks.forward(lambda model, packs: model.step_scores(packs, as_odds=as_odds), samples)
        return self.ranks.forward(lambda model, packs: model.score(packs), samples)

    def score_by_token(self, groups: Sequence[Group]) -> list[Floats]:
        """Return the score of each response, repeated on all its tokens: [T], to be compared like log-probs.

        For a process reward model the sum of its steps' log-odds: probabilities close to 0 or 1 hardly change.
        """
        samples = to_samples(groups)
        scores = self.score(samples, as_odds=True)
        return [np.full(len(s.tokens), np.sum(score), np.float32) for s, score in zip(samples, scores, strict=True)]

    def score_responses(self, groups: Sequence[Group]) -> list[float | Floats]:
        """Return the score of each response: that of its last segment, which ends with all of its conversation; for a
        process reward model the scores of its steps over all segments end to end."""
        samples = to_samples(groups)
        scores = self.score(samples)
        of_responses = [[scores[i] for i in members] for members in by_response(samples)]
        return [np.concatenate(parts) if self.is_process else parts[-1] for parts in of_responses]


ENVIRONMENT = "environment"
"""Name of an environment's rewards in metrics."""


class RewardSources:
    """All reward sources of a run: functions and servers score during the rollout, models after it."""

    def __init__(
        self,
        functions: RemoteRewarder | None,
        models: Sequence[RemoteRewardModel],
        *,
        say: Callable[[str], None] = print,
    ) -> None:
        """Combine sources.

        Args:
            say: shows users why conversations failed, once for each kind of failure.
        """
        self._functions = functions
        self.models = models
        self._first_failures = FirstFailures(say)

    def begin(self, group: Group) -> None:
        """Start to score a group, and return at once."""
        if self._functions is not None and (scorable := _scorable(group)).rollouts:
            self._functions.begin(scorable)

    def score(self, groups: Sequence[Group], *, out_of: int | None = None, failed: int = 0) -> list[list[Score]]:
        """Return one score per response, group by group: the weighted sum over all sources. See `trainer.protocols`.

        A response that made its scorer fail gets the smaller of 0 and the lowest score of its group, or of all groups
        if its own has none, so that breaking a scorer never pays. A response that the infrastructure failed gets 0,
        which is not used.

        Raises:
            RewardError: a model's score is not finite.
        """
        self._first_failures.see_episodes(groups)
        scorable = [group for group in map(_scorable, groups) if group.rollouts]
        known = iter(self._score(scorable, out_of=out_of, failed=failed))
        scores = [
            _with_turns(_failed(rollout) or next(known), rollout) for group in groups for rollout in group.rollouts
        ]
        remaining = iter(scores)
        return [_with_lowest([next(remaining) for _ in group.rollouts], of_all=scores) for group in groups]

    def _score(self, groups: Sequence[Group], *, out_of: int | None, failed: int) -> list[Score]:
        """Return the scores of the sources that read the responses."""
        if not groups:
            return []
        scores = [Score(0.0) for group in groups for _ in group.rollouts]
        if self._functions is not None:
            by_group = self._functions.score(groups, out_of=out_of, failed=failed)
            scores = [score for group in by_group for score in group]
        prompts = [group.prompt.source for group in groups for _ in group.rollouts]
        for source in self.models:
            rows = zip(scores, source.score_responses(groups), prompts, strict=True)
            scores = [_with(score, source, value, prompt) for score, value, prompt in rows]
        return scores


def _scorable(group: Group) -> Group:
    """Leave out conversations whose environment failed or raised: they are not scored."""
    return replace(group, rollouts=tuple(rollout for rollout in group.rollouts if _failed(rollout) is None))


def _failed(rollout: Rollout) -> Score | None:
    """Return the score of a conversation whose environment failed or raised; None if it did not."""
    episode = rollout.episode
    if episode is None or episode.failure is None:
        return None
    return Score(0.0, failure=episode.failure, problem=episode.problem)


def _with_turns(score: Score, rollout: Rollout) -> Score:
    """Add the rewards that an environment gave for the turns of a conversation."""
    if rollout.episode is None or not score.has_reward:
        return score
    rewards = tuple(turn.reward for turn in rollout.turns)
    parts = {**score.parts, **rollout.episode.parts, ENVIRONMENT: sum(rewards)}
    return replace(score, parts=parts, turn_rewards=rewards)


def _with_lowest(scores: list[Score], *, of_all: Sequence[Score]) -> list[Score]:
    """Lower the failed scores of a group to its lowest, or to that of all groups (`of_all`)."""
    known = [score.earned for score in scores if not score.failed]
    lowest = min([0.0, *(known or [score.earned for score in of_all if not score.failed])])
    return [_lowered(score, lowest) if score.failure == "response" else score for score in scores]


def _lowered(score: Score, lowest: float) -> Score:
    """Lower a failed score to `lowest`, at the last turn of a conversation: `reward.clip_range` would cut the total.

    The scores of its steps and turns are kept: without them the response would avoid the cost of poor ones.
    """
    change = lowest - score.earned
    if not score.turn_rewards:
        return replace(score, total=score.total + change)
    return replace(score, turn_rewards=(*score.turn_rewards[:-1], score.turn_rewards[-1] + change))


def _with(score: Score, source: RemoteRewardModel, value: float | Floats, prompt_source: str) -> Score:
    """Add the score of one more source. The total does not change if another source failed."""
    total = float(np.sum(value))
    if problem_of_reward(total):
        raise RewardError(
            f"the {source.name} reward of a response to {prompt_source} is {total:g}: the model is broken"
        )
    score = replace(score, parts={**score.parts, source.name: total})
    if not score.has_reward or (score.failed and not source.is_process):
        return score
    if not source.is_process:
        return replace(score, total=score.total + source.weight * total)
    return replace(score, token_rewards=source.weight * value)  # type: ignore[arg-type]
