"""Evaluate the policy on held-out prompts, and decide what a failed or interrupted evaluation means for the run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import comb
from typing import Protocol, TypeVar

import numpy as np

from vlmrl.config.built_in import REWARD_FUNCTIONS
from vlmrl.config.verbs import EvalConfig, RlConfig
from vlmrl.errors import StorageError, VlmrlError
from vlmrl.observe.report import RunReport
from vlmrl.observe.transcripts import Transcripts
from vlmrl.system import stops
from vlmrl.system.stops import Stopped
from vlmrl.trainer.collect import Ending
from vlmrl.trainer.episodes import check_episodes, responses_of
from vlmrl.trainer.protocols import Engine, Rewarder
from vlmrl.trainer.rl import LoopState
from vlmrl.trainer.run_checkpoints import RunCheckpoints
from vlmrl.types import Group, Metrics, Prompt, Sampling, Score

_SEED = 1_000_003
"""Added to the run's seed: evaluations sample with their own seeds, the same before, during and after training."""

PASS_SCORE = 0.5
"""A response is correct when its score is above this: built-in rewards give 1 or 0."""

_CHECKING_REWARDS = [name for name, row in REWARD_FUNCTIONS.items() if row.checks_response]
"""Rewards that check whether a response is correct. The first one in use decides; without any, the total score."""

T = TypeVar("T")
_Ending = TypeVar("_Ending", bound=VlmrlError)

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.@+:-]+")
"""Characters that `observe.metrics.check_name` rejects."""

Responses = dict[str, tuple[list[Group], list[list[Score]]]]
"""Set name -> groups and their scores."""


def with_metric_names(sets: Mapping[str, T]) -> dict[str, T]:
    """Rename the sets so that metrics can carry their names, and the names stay distinct.

    Example: `my set` and `my_set` become `my_set` and `my_set-2`.
    """
    renamed: dict[str, T] = {}
    for name, value in sets.items():
        plain = "/".join(_NOT_IN_NAMES.sub("_", part) for part in name.split("/") if part) or "_"
        free, number = plain, 2
        while free in renamed:
            free, number = f"{plain}-{number}", number + 1
        renamed[free] = value
    return renamed


def pass_at_k(num_responses: int, num_correct: int, k: int) -> float:
    """Probability that k of these responses include a correct one: `1 - C(n - c, k) / C(n, k)` (arXiv:2107.03374)."""
    if k > num_responses:
        raise ValueError(f"pass@{k} cannot be computed from {num_responses} responses")
    return 1.0 - comb(num_responses - num_correct, k) / comb(num_responses, k)


def is_correct(score: Score) -> bool:
    """Whether a response is correct, by the score of a checking reward, else by its total."""
    checks = [score.parts[name] for name in _CHECKING_REWARDS if name in score.parts]
    return (checks[0] if checks else score.earned) > PASS_SCORE


def evaluate(
    sets: Mapping[str, Sequence[Prompt]],
    *,
    engine: Engine,
    rewarder: Rewarder,
    sampling: Sampling,
    breakdown_key: str | None = None,
) -> tuple[Metrics, Responses]:
    """Sample and score responses to every prompt of every set; return metrics and the responses.

    With a `breakdown_key` there is also `eval/<set>/<value>/pass@1` for each value in that column of the prompts' rows.
    """
    metrics: Metrics = {}
    responses: Responses = {}
    for name, prompts in sets.items():
        groups = engine.generate(prompts, sampling, rewarder.begin)
        scores = rewarder.score(groups)
        responses[name] = (groups, scores)
        metrics |= set_metrics(name, groups, scores)
        if breakdown_key is not None:
            metrics |= pass_rate_by_value(name, groups, scores, key=breakdown_key)
    return metrics, responses


def check_sets(config: RlConfig | EvalConfig, responses: Responses) -> None:
    """Check the episodes of each set, see `check_episodes`. Raises RewardError."""
    for groups, _ in responses.values():
        check_episodes(config, groups)


def set_metrics(name: str, groups: Sequence[Group], scores: Sequence[Sequence[Score]]) -> Metrics:
    """Compute pass@k for k = 1, 2, 4, ... up to the responses per prompt, and reward, length and truncation of a set.

    Reward and pass@k are over the responses that have a reward; `eval/<set>/failed` counts the others. pass@k is over
    the prompts with at least k such responses, and is left out when there are none.
    """
    scored = [with_reward for group in scores if (with_reward := _with_reward(group))]
    rollouts = responses_of(groups)
    metrics = {f"eval/{name}/failed": float(sum(not score.has_reward for group in scores for score in group))}
    if rollouts:
        metrics |= {
            f"eval/{name}/tokens_mean": float(np.mean([rollout.num_sampled for rollout in rollouts])),
            f"eval/{name}/truncated_fraction": float(np.mean([r.finish_reason == "length" for r in rollouts])),
        }
    if any(rollout.episode is not None for rollout in rollouts):
        metrics[f"eval/{name}/turns_mean"] = float(np.mean([len(rollout.turns) for rollout in rollouts]))
    if scored:
        metrics[f"eval/{name}/reward"] = float(np.mean([score.earned for group in scored for score in group]))
    k = 1
    while large_enough := [group for group in scored if len(group) >= k]:
        metrics[f"eval/{name}/pass@{k}"] = _pass_rate(large_enough, k)
        k *= 2
    return metrics


def pass_rate_by_value(name: str, groups: Sequence[Group], scores: Sequence[Sequence[Score]], *, key: str) -> Metrics:
    """Compute pass@1 for each value in the column `key` of the prompts' rows; rows without a value are left out.

    Characters that metric names cannot hold become `_`; values that are equal after that are counted together.
    """
    parts: dict[str, list[Sequence[Score]]] = {}
    for group, group_scores in zip(groups, scores, strict=True):
        value = group.prompt.metadata.get(key)
        scored = _with_reward(group_scores)
        if value is not None and str(value) and scored:
            parts.setdefault(_NOT_IN_NAMES.sub("_", str(value)), []).append(scored)
    return {f"eval/{name}/{part}/pass@1": _pass_rate(parts[part], 1) for part in sorted(parts)}


def _with_reward(group: Sequence[Score]) -> list[Score]:
    return [score for score in group if score.has_reward]


def _pass_rate(scores: Sequence[Sequence[Score]], k: int) -> float:
    return float(np.mean([pass_at_k(len(group), sum(is_correct(score) for score in group), k) for group in scores]))


def evaluation_sampling(config: RlConfig | EvalConfig) -> Sampling:
    """Sampling settings of evaluations."""
    return Sampling(
        n=config.eval.n_samples_per_prompt,
        temperature=config.eval.temperature,
        top_p=1.0,
        max_new_tokens=config.rollout.max_new_tokens,
        seed=config.train.seed + _SEED,
    )


class EvaluatedPolicy(Protocol):
    """The policy, as evaluations need it."""

    def uncounted(self) -> AbstractContextManager[None]:
        """Exclude model passes within the context from the step's metrics."""


@dataclass
class Evaluations:
    """The evaluations of a run. One that fails ends the run, after its step has been saved."""

    config: RlConfig
    sets: Mapping[str, Sequence[Prompt]]
    engine: Engine
    rewarder: Rewarder
    policy: EvaluatedPolicy
    transcripts: Transcripts
    checkpoints: RunCheckpoints
    report: RunReport
    last: int
    """Last step of the run."""
    error: VlmrlError | None = None
    """The failure of an evaluation, which ends the run once the step is saved."""
    last_evaluated: int | None = None
    """The newest step with an evaluation."""

    def after_step(self, step: int) -> Metrics:
        """Evaluate if this step is due; return the metrics."""
        interval = self.config.eval.steps
        if step != self.last and (interval <= 0 or step % interval):
            return {}
        try:
            with stops.interruptible():
                return self._run_and_keep_error(step, is_last=step == self.last)
        except Stopped:  # the step itself is finished, and is saved before the run ends
            self.checkpoints.evaluation_is_pending = True
            return {}

    def _run_and_keep_error(self, step: int, *, is_last: bool) -> Metrics:
        try:
            return self.run(step)
        except VlmrlError as error:
            saved = "whose model is saved" if is_last else "which is saved for --ckpt.load_enable"
            self.error = type(error)(f"evaluation after step {step}, {saved}: {error}")
            return {}

    def finish_early(self, ending: Ending, *, has_adapter: bool) -> None:
        """Evaluate and save the last step of a run that ended before `self.last`; otherwise do nothing."""
        if ending.reason is None:
            return
        self.report.say(ending.reason)
        metrics: Metrics = {}
        if ending.step != self.last_evaluated:
            metrics = self._run_and_keep_error(ending.step, is_last=True)
        if ending.left_out:
            metrics = metrics | {"data/left_out": float(ending.left_out)}
        self.report.evaluation(ending.step, metrics)
        if ending.is_solved and self.config.ckpt.save_steps > 0:
            self.checkpoints.save_last_step()
        if self.error is not None:
            self.checkpoints.finish(has_adapter=has_adapter)
            raise self.error

    def save_on_error(self, error: _Ending) -> _Ending:
        """Save the last step; return the error with the checkpoint to resume from.

        The step of a failed evaluation is saved already.
        """
        try:
            saved = None if error is self.error else self.checkpoints.save_last_step()
        except VlmrlError as second_error:  # it must not hide why the run ended
            return type(error)(f"{error}; its last step is not saved: {second_error}")
        if saved is None:
            return error
        return type(error)(f"{error}; the steps before it are saved: resume from {saved} with --ckpt.load_enable")

    def save(self, step: int, state: LoopState, *, has_adapter: bool) -> None:
        """Write a checkpoint if one is due.

        After a failed evaluation one is always written, and the final models too if it was the last step; then the
        error is raised.
        """
        try:
            self.checkpoints.save(step, state, force=self.error is not None)
            if self.error is not None and step == self.last:
                self.checkpoints.finish(has_adapter=has_adapter)
        except StorageError as storage_error:
            if self.error is None:
                raise
            self.error = type(self.error)(f"{self.error}; but {storage_error}")
        if self.error is not None:
            raise self.error

    def run(self, step: int) -> Metrics:
        """Evaluate the current policy."""
        with self.report.phase("eval"), self.policy.uncounted():
            metrics, responses = evaluate(
                self.sets,
                engine=self.engine,
                rewarder=self.rewarder,
                sampling=evaluation_sampling(self.config),
                breakdown_key=self.config.eval.breakdown_key,
            )
            for name, (groups, scores) in responses.items():
                self.transcripts.write_evaluation(step, name, groups, scores)
            check_sets(self.config, responses)
        with stops.uninterrupted():
            self.checkpoints.keep_best(step, metrics)
        self.last_evaluated, self.checkpoints.evaluation_is_pending = step, False
        return metrics
