"""Who says what answers are worth: reward functions in processes of their own, and reward models over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray

from vlmrl.cluster.models import Ranks
from vlmrl.cluster.worker_group import WorkerGroup
from vlmrl.data.responses import to_samples
from vlmrl.errors import RewardError
from vlmrl.rewards.failures import FirstFailures
from vlmrl.types import Floats, Group, Sample, Score


class RemoteRewarder:
    """Reward functions and reward servers, in an async actor with scoring processes below it."""

    def __init__(self, group: WorkerGroup, *, say: Callable[[str], None]) -> None:
        """Starts them. `say` shows people why responses could not be scored, once for each kind of failure.

        Raises ConfigError as `Rewarder.start` does.
        """
        self._group = group
        self._first = FirstFailures(say)
        self._begun: list[ray.ObjectRef[Any]] = []
        group.call("start")

    def begin(self, group: Group) -> None:
        """Start on a group, and return at once."""
        self._begun += self._group.submit("begin", group)

    def score(self, groups: Sequence[Group], *, out_of: int | None = None, failed: int = 0) -> list[list[Score]]:
        begun, self._begun = self._begun, []
        # An async actor may run calls in another order than they were submitted.
        with suppress(RewardError):  # `score` raises it, too
            self._group.wait(begun)
        scores: list[list[Score]] = self._group.call("score", list(groups), out_of=out_of, failed=failed)[0]
        self._first.see(groups, scores)
        return scores

    def close(self) -> None:
        self._group.end("close")


@dataclass(frozen=True, slots=True)
class RewardModel:
    """A model over ranks as one of the sources of reward."""

    name: str
    """What its metrics are called: `model` or `process`."""
    ranks: Ranks
    weight: float
    is_process: bool
    """It scores the steps of an answer, each at the token that ends it, and not the answer."""

    def ask(self, samples: Sequence[Sample], *, as_odds: bool = False) -> list[float | Floats]:
        """Its score of each sample; of a process reward model those of its steps, [T], or their log-odds."""
        if self.is_process:
            found = self.ranks.ask("step_scores", samples, as_odds=as_odds)
        else:
            found = self.ranks.ask("score", samples)
        return [found[number] for number in range(len(samples))]

    def everywhere(self, groups: Sequence[Group]) -> list[Floats]:
        """Its score of each answer, on each of the answer's tokens: [T] like log-probs, for who compares these.

        Of a process reward model it is the log-odds of its steps: probabilities next to 0 or 1 hardly change.
        """
        samples = to_samples(groups)
        found = self.ask(samples, as_odds=True)
        return [np.full(len(s.tokens), np.sum(f), np.float32) for s, f in zip(samples, found, strict=True)]


class Judges:
    """All sources of a run's rewards: functions and servers score while answers are written, models once all are."""

    def __init__(self, functions: RemoteRewarder | None, models: Sequence[RewardModel]) -> None:
        self._functions = functions
        self.models = models

    def begin(self, group: Group) -> None:
        """Start on a group, and return at once."""
        if self._functions is not None:
            self._functions.begin(group)

    def score(self, groups: Sequence[Group], *, out_of: int | None = None, failed: int = 0) -> list[list[Score]]:
        """One score per answer, group by group: the weighted sum over all sources. See `trainer.Rewarder`.

        An answer that could not be scored by its own doing gets 0, or the lowest score of its group if that is less; in
        a group without a score, the lowest of all groups: it does not pay to break a reward. One that the
        infrastructure failed gets 0, which nobody uses.

        Raises RewardError when a model's score is not a number.
        """
        if self._functions is not None:
            by_group = self._functions.score(groups, out_of=out_of, failed=failed)
            scores = [score for group in by_group for score in group]
        else:
            scores = [Score(0.0) for group in groups for _ in group.rollouts]
        samples = to_samples(groups)
        for source in self.models:
            found = zip(scores, source.ask(samples), samples, strict=True)
            scores = [_with(score, source, said, sample.source) for score, said, sample in found]
        ahead = iter(scores)
        return [_with_lowest([next(ahead) for _ in group.rollouts], every=scores) for group in groups]


def _with_lowest(scores: list[Score], *, every: Sequence[Score]) -> list[Score]:
    """The scores of a group, none that failed by the response's doing above another; `every` is of all groups."""
    known = [score.earned for score in scores if not score.failed]
    lowest = min([0.0, *(known or [score.earned for score in every if not score.failed])])
    # Its steps are compared with those of others all the same: without any it would be spared what poor ones cost.
    return [
        replace(score, total=score.total + lowest - score.earned) if score.failure == "response" else score
        for score in scores
    ]


def _with(score: Score, source: RewardModel, found: float | Floats, where: str) -> Score:
    """The score with what one more source says; of one that another source could not give the total stays as it is."""
    total = float(found.sum()) if source.is_process else float(found)  # type: ignore[union-attr]
    if not math.isfinite(total):
        raise RewardError(f"the {source.name} reward of an answer to {where} is {total}: the model is broken")
    score = replace(score, parts={**score.parts, source.name: total})
    if not score.has_reward or (score.failed and not source.is_process):
        return score
    if not source.is_process:
        return replace(score, total=score.total + source.weight * total)
    return replace(score, token_rewards=source.weight * found)  # type: ignore[arg-type]
