"""How good the policy is on questions that it does not learn from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import comb
from typing import Protocol, TypeVar

import numpy as np

from vlmrl.config.built_in import REWARD_FUNCTIONS
from vlmrl.config.run import EvalConfig, RlConfig
from vlmrl.errors import RewardError, StorageError, VlmrlError
from vlmrl.observe.report import RunReport
from vlmrl.observe.transcripts import Transcripts
from vlmrl.rollout.sampling import Sampling
from vlmrl.system import stops
from vlmrl.system.stops import Stopped
from vlmrl.trainer.checkpoints import Saves
from vlmrl.trainer.rl import Carried, Ending, Engine, Rewarder
from vlmrl.types import Group, Metrics, Prompt, Score

_SEED = 1_000_003
"""Added to the run's seed: evaluation draws its own numbers, the same before, during and after training."""

PASS_SCORE = 0.5
"""An answer is right when its score is above this: built-in rewards give 1 or 0."""

_CHECKING_REWARDS = [name for name, row in REWARD_FUNCTIONS.items() if row.checks_response]
"""Rewards that say whether a response is right: the first that is used. Without any, the weighted total says it."""

T = TypeVar("T")

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.@+:-]+")
"""What `observe.metrics.check_name` does not take."""


def named(sets: Mapping[str, T]) -> dict[str, T]:
    """The same sets under names that metrics can have, and that are still different.

    Example: `my set` and `my_set` become `my_set` and `my_set-2`.
    """
    found: dict[str, T] = {}
    for name, value in sets.items():
        plain = "/".join(_NOT_IN_NAMES.sub("_", part) for part in name.split("/") if part) or "_"
        free, number = plain, 2
        while free in found:
            free, number = f"{plain}-{number}", number + 1
        found[free] = value
    return found


def pass_at_k(num_answers: int, num_right: int, k: int) -> float:
    """Chance that k answers drawn from these hold a right one: `1 - C(n - c, k) / C(n, k)` (arXiv:2107.03374)."""
    if k > num_answers:
        raise ValueError(f"pass@{k} cannot be told from {num_answers} answers")
    return 1.0 - comb(num_answers - num_right, k) / comb(num_answers, k)


def is_right(score: Score) -> bool:
    """Whether an answer counts as solved: by the verdict of a checking reward, else by all that it earned."""
    verdicts = [score.parts[name] for name in _CHECKING_REWARDS if name in score.parts]
    return (verdicts[0] if verdicts else score.earned) > PASS_SCORE


def evaluate(
    sets: Mapping[str, Sequence[Prompt]],
    *,
    engine: Engine,
    rewarder: Rewarder,
    sampling: Sampling,
    breakdown_key: str | None = None,
) -> tuple[Metrics, dict[str, tuple[list[Group], list[list[Score]]]]]:
    """Answer every prompt of every set; `eval/<set>/pass@1` and its kin, and the answers themselves.

    With a `breakdown_key`, also `eval/<set>/<value>/pass@1` for each value that the prompts' rows have in that column.
    """
    metrics: Metrics = {}
    answers = {}
    for name, prompts in sets.items():
        groups = engine.generate(prompts, sampling, rewarder.begin)
        scores = rewarder.score(groups)
        answers[name] = (groups, scores)
        metrics |= summarise(name, groups, scores)
        if breakdown_key is not None:
            metrics |= break_down(name, groups, scores, key=breakdown_key)
    return metrics, answers


def summarise(name: str, groups: Sequence[Group], scores: Sequence[Sequence[Score]]) -> Metrics:
    """pass@k for k = 1, 2, 4, ... up to the answers per prompt, reward, length and truncation of one set.

    Reward and pass@k are over what has a reward: pass@k over the prompts with at least k such answers, and left out
    where there are none. `eval/<set>/failed` counts the others.
    """
    known = [scored for group in scores if (scored := _known(group))]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    metrics = {
        f"eval/{name}/failed": float(sum(not score.has_reward for group in scores for score in group)),
        f"eval/{name}/tokens_mean": float(np.mean([rollout.num_sampled for rollout in rollouts])),
        f"eval/{name}/truncated_fraction": float(np.mean([r.finish_reason == "length" for r in rollouts])),
    }
    if known:
        metrics[f"eval/{name}/reward"] = float(np.mean([score.earned for group in known for score in group]))
    k = 1
    while enough := [group for group in known if len(group) >= k]:
        metrics[f"eval/{name}/pass@{k}"] = _pass_rate(enough, k)
        k *= 2
    return metrics


def break_down(name: str, groups: Sequence[Group], scores: Sequence[Sequence[Score]], *, key: str) -> Metrics:
    """pass@1 by the value that a prompt's row has in the column `key`; nothing of rows without one.

    What a metric's name cannot hold becomes `_`, and values that are the same then are counted as one.
    """
    parts: dict[str, list[Sequence[Score]]] = {}
    for group, scored in zip(groups, scores, strict=True):
        value = group.prompt.metadata.get(key)
        known = _known(scored)
        if value is not None and str(value) and known:
            parts.setdefault(_NOT_IN_NAMES.sub("_", str(value)), []).append(known)
    return {f"eval/{name}/{part}/pass@1": _pass_rate(parts[part], 1) for part in sorted(parts)}


def _known(group: Sequence[Score]) -> list[Score]:
    return [score for score in group if score.has_reward]


def _pass_rate(scores: Sequence[Sequence[Score]], k: int) -> float:
    return float(np.mean([pass_at_k(len(group), sum(is_right(score) for score in group), k) for group in scores]))


def evaluation_sampling(config: RlConfig | EvalConfig) -> Sampling:
    """How evaluation prompts are answered."""
    return Sampling(
        n=config.eval.n_samples_per_prompt,
        temperature=config.eval.temperature,
        top_p=1.0,
        max_new_tokens=config.rollout.max_new_tokens,
        seed=config.train.seed + _SEED,
    )


class EvaluatedPolicy(Protocol):
    """The policy, whose passes during an evaluation are no part of a step's numbers."""

    def uncounted(self) -> AbstractContextManager[None]:
        """Within the context passes through the model are not counted."""


@dataclass
class Evaluations:
    """The evaluations of a run: when they are due, what they write, and what becomes of one that fails."""

    config: RlConfig
    sets: Mapping[str, Sequence[Prompt]]
    engine: Engine
    rewarder: Rewarder
    policy: EvaluatedPolicy
    transcripts: Transcripts
    saves: Saves
    report: RunReport
    last: int
    """Step of the run."""
    failed: VlmrlError | None = None
    """Why the run is to end, once what it has learnt is saved."""
    evaluated: int | None = None
    """The newest step with an evaluation."""

    def after(self, step: int) -> Metrics:
        """What this step's evaluation measures, if one is due."""
        every = self.config.eval.steps
        if step != self.last and (every <= 0 or step % every):
            return {}
        try:
            with stops.abandonable():
                return self._tried(step, is_last=step == self.last)
        except Stopped:  # the step itself is done, and is saved before the run ends
            self.saves.owes_evaluation = True
            return {}

    def _tried(self, step: int, *, is_last: bool) -> Metrics:
        try:
            return self.at(step)
        except VlmrlError as error:
            kept = "whose model is saved" if is_last else "which is saved for --ckpt.load_enable"
            self.failed = type(error)(f"evaluation after step {step}, {kept}: {error}")
            return {}

    def end(self, ending: Ending, *, has_adapter: bool) -> None:
        """What a run has after its last step, where nobody knew beforehand which that is."""
        if ending.why is None:
            return
        self.report.say(ending.why)
        metrics = self._tried(ending.step, is_last=True) if ending.step != self.evaluated else {}
        if ending.left_out:
            metrics = metrics | {"data/left_out": float(ending.left_out)}
        self.report.evaluation(ending.step, metrics)
        if ending.is_solved and self.config.ckpt.save_steps > 0:
            self.saves.save_finished()
        if self.failed is not None:
            self.saves.finish(has_adapter=has_adapter)
            raise self.failed

    def stopped(self, error: RewardError) -> RewardError:
        """The error, with the checkpoint from which another run can go on; nothing that was learnt is lost.

        Of an evaluation that failed the step is saved already.
        """
        try:
            saved = None if error is self.failed else self.saves.save_finished()
        except StorageError as full:  # it must not hide what ended the run
            return type(error)(f"{error}; its last step is not saved: {full}")
        if saved is None:
            return error
        return type(error)(f"{error}; all before it is in {saved}: go on from there with --ckpt.load_enable")

    def save(self, step: int, carried: Carried, *, has_adapter: bool) -> None:
        """A checkpoint, if one is due. Where the evaluation failed it is, and ends the run, at the last step with all
        that a run leaves."""
        try:
            self.saves.save(step, carried, must=self.failed is not None)
            if self.failed is not None and step == self.last:
                self.saves.finish(has_adapter=has_adapter)
        except StorageError as full:
            if self.failed is None:
                raise
            self.failed = type(self.failed)(f"{self.failed}; but {full}")
        if self.failed is not None:
            raise self.failed

    def at(self, step: int) -> Metrics:
        """Evaluate the policy of now."""
        with self.report.phase("eval"), self.policy.uncounted():
            metrics, answers = evaluate(
                self.sets,
                engine=self.engine,
                rewarder=self.rewarder,
                sampling=evaluation_sampling(self.config),
                breakdown_key=self.config.eval.breakdown_key,
            )
            for name, (groups, scores) in answers.items():
                self.transcripts.write_evaluation(step, name, groups, scores)
        with stops.finishing():
            self.saves.keep_best(step, metrics)
        self.evaluated, self.saves.owes_evaluation = step, False
        return metrics
