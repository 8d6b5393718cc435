"""Conversations with an environment in a training step: their metrics, and the bound on failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import get_args

import numpy as np

from vlmrl.config.verbs import EvalConfig, RlConfig
from vlmrl.errors import RewardError
from vlmrl.types import Episode, Group, Metrics, Rollout, StopReason


def episode_metrics(groups: Sequence[Group]) -> Metrics:
    """Metrics of the conversations; {} if the responses are none."""
    rollouts = [rollout for group in groups for rollout in group.rollouts if rollout.episode is not None]
    episodes = [rollout.episode for rollout in rollouts if rollout.episode is not None]
    if not episodes:
        return {}
    turns = [len(rollout.turns) for rollout in responses_of(groups)] or [0]
    stops = Counter(episode.stop for episode in episodes)
    seconds = [episode.env_s for episode in episodes]
    return {
        "agent/turns_mean": float(np.mean(turns)),
        "agent/turns_max": float(max(turns)),
        "agent/tool_calls": float(sum(episode.tool_calls for episode in episodes)),
        "agent/tool_errors": float(sum(episode.tool_errors for episode in episodes)),
        "agent/env_s": float(np.mean(seconds)),
        "agent/timeouts": float(sum(episode.timeouts for episode in episodes)),
        "agent/retries": float(sum(len(episode.retried) for episode in episodes)),
        "agent/failed": float(stops["failed"]),
        "time/env_s": float(max(seconds)),
        **{f"agent/stop/{reason}": stops[reason] / len(episodes) for reason in get_args(StopReason)},
        **{f"agent/gateway/{name}": float(count) for name, count in sorted(_counts(episodes).items())},
    }


def _counts(episodes: Sequence[Episode]) -> Counter[str]:
    """Sums of the gateway's counts."""
    counts: Counter[str] = Counter()
    for episode in episodes:
        counts.update(episode.counts)
    return counts


def responses_of(groups: Sequence[Group]) -> list[Rollout]:
    """Return the responses without conversations that failed, which have none."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return [rollout for rollout in rollouts if rollout.episode is None or rollout.turns]


def count_failed(groups: Sequence[Group]) -> int:
    """Return the number of conversations that failed."""
    return len(_episodes_that(groups, "failed"))


def _episodes_that(groups: Sequence[Group], stop: StopReason) -> list[tuple[str, Episode]]:
    """Return the conversations that ended so, each with the row of its prompt."""
    return [
        (group.prompt.source, rollout.episode)
        for group in groups
        for rollout in group.rollouts
        if rollout.episode is not None and rollout.episode.stop == stop
    ]


def check_episodes(config: RlConfig | EvalConfig, groups: Sequence[Group], *, num_responses: int | None = None) -> None:
    """Check how many episodes have failed, of `num_responses` in the whole step (None: of these), and that their
    environment or agent did not raise in all others.

    Raises:
        RewardError: more than `agent.max_failed_fraction` have failed, or the user's code raised in all others.
    """
    failed, raised = _episodes_that(groups, "failed"), _episodes_that(groups, "raised")
    num_responses = num_responses or sum(len(group.rollouts) for group in groups)
    bound = config.agent.max_failed_fraction
    if failed and len(failed) > bound * num_responses:
        source, episode = failed[0]
        raise RewardError(
            f"{len(failed)} of {num_responses} episodes failed, more than agent.max_failed_fraction {bound:g}; the "
            f"first, on {source}: {episode.problem}"
        )
    # No reward is known then, and nothing can be learnt: most likely the user's code has a bug.
    if len(raised) > 1 and len(raised) + len(failed) == num_responses and bound < 1:
        source, episode = raised[0]
        raise RewardError(
            f"train.agent_func_path: the environment or agent raised in all {len(raised)} episodes: fix it, or let it "
            f"return a reward for a response that it cannot use; the first, on {source}: {episode.problem}"
        )
