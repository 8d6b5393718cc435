"""Evaluate the policy on held-out prompts: sample responses, score them, and compute pass@k."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from math import comb
from typing import Protocol, TypeVar

import numpy as np

from vlmrl.config.built_in import REWARD_FUNCTIONS
from vlmrl.config.verbs import EvalConfig, RlConfig
from vlmrl.errors import VlmrlError
from vlmrl.observe.transcripts import Transcripts
from vlmrl.trainer.episodes import check_episodes, responses_of
from vlmrl.trainer.protocols import Engine, Rewarder
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


def evaluate_policy(
    step: int,
    *,
    config: RlConfig | EvalConfig,
    sets: Mapping[str, Sequence[Prompt]],
    engine: Engine,
    rewarder: Rewarder,
    policy: EvaluatedPolicy,
    transcripts: Transcripts,
) -> Metrics:
    """Evaluate the policy of a training run after this step, and write its responses."""
    with policy.uncounted():
        metrics, responses = evaluate(
            sets,
            engine=engine,
            rewarder=rewarder,
            sampling=evaluation_sampling(config),
            breakdown_key=config.eval.breakdown_key,
        )
        for name, (groups, scores) in responses.items():
            transcripts.write_evaluation(step, name, groups, scores)
        check_sets(config, responses)
    return metrics
