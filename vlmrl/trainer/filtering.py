"""Dynamic filtering: choose the groups to train on, and decide whether the prompts are solved when too few remain."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from vlmrl.algorithms.signal import REWARD_ROUNDING, has_signal, is_within
from vlmrl.config.verbs import RlConfig
from vlmrl.trainer.experience import shaped_rewards
from vlmrl.types import Floats, Group, Score

Outcome = Literal["kept", "constant", "outside", "unscored"]
"""`constant`: all scored responses have the same reward. `outside`: the mean reward is not within
`algo.dynamic_filtering_range`. `unscored`: fewer than two responses have a reward."""


class FilteredGroup(NamedTuple):
    """A group, and the outcome of filtering it."""

    group: Group
    scores: list[Score]
    rewards: Floats
    """[G], after shaping; NaN for a response without a reward."""
    scored_rewards: Floats
    """[n] of the responses that have a reward: after shaping, token rewards included."""
    outcome: Outcome

    @property
    def is_kept(self) -> bool:
        return self.outcome == "kept"


class RewardRange(NamedTuple):
    """The lowest and the highest shaped reward of any response of the run so far."""

    lowest: float = math.inf
    highest: float = -math.inf

    def extended(self, groups: Sequence[FilteredGroup]) -> RewardRange:
        """Include the rewards of these groups."""
        rewards = [float(reward) for group in groups for reward in group.scored_rewards]
        return RewardRange(min([self.lowest, *rewards]), max([self.highest, *rewards]))


def filter_groups(config: RlConfig, groups: Sequence[Group], scores: Sequence[list[Score]]) -> list[FilteredGroup]:
    """Decide for each group whether it is trained on. Without dynamic filtering all are."""
    shaped = shaped_rewards(config, groups, scores)
    signals = has_signal(shaped.rewards, step_rewards=shaped.token_sums, scored=shaped.has_reward).tolist()
    filtered = []
    for row, (group, group_scores) in enumerate(zip(groups, scores, strict=True)):
        has_reward = shaped.has_reward[row]
        rewards = shaped.rewards[row].masked_fill(~has_reward, math.nan).numpy()
        outcome: Outcome = "kept"
        if config.algo.dynamic_filtering_enable:
            earned = [score.earned for score in group_scores if score.has_reward]
            outcome = _outcome(earned, has_signal=signals[row], bounds=config.algo.dynamic_filtering_range)
        scored_rewards = shaped.totals[row][has_reward].numpy()
        filtered.append(FilteredGroup(group, group_scores, rewards, scored_rewards, outcome))
    return filtered


def _outcome(earned: Sequence[float], *, has_signal: bool, bounds: tuple[float, float] | None) -> Outcome:
    if len(earned) < 2:
        return "unscored"
    if not has_signal:
        return "constant"
    return "kept" if bounds is None or is_within(float(np.mean(earned)), *bounds) else "outside"


def highest_possible_reward(config: RlConfig) -> float | None:
    """Return the upper bound of a response's shaped reward; None where the limit of a source is unknown.

    The built-in functions give at most 1.
    """
    reward = config.reward
    if reward.has_user_source or config.has_agent:
        return None
    total = sum(max(weight, 0.0) for weight in reward.functions.values())
    low, high = reward.clip_range
    return min(max(total, low), high)


def is_solved(config: RlConfig, groups: Sequence[FilteredGroup], reward_range: RewardRange) -> bool:
    """Whether most constant groups have the highest reward: the highest possible, or where unknown, seen in the run.

    A run that has seen a single reward cannot tell the highest from the lowest: its prompts do not count as solved.
    """
    highest = highest_possible_reward(config)
    if highest is None:
        if not reward_range.highest > reward_range.lowest + REWARD_ROUNDING:
            return False
        highest = reward_range.highest
    constants = [float(group.scored_rewards[0]) for group in groups if group.outcome == "constant"]
    return 2 * sum(reward >= highest - REWARD_ROUNDING for reward in constants) > len(constants)


def format_shortage(config: RlConfig, groups: Sequence[FilteredGroup]) -> str:
    """Explain in one line why too few of the groups drawn for a step were kept."""
    algo = config.algo
    counts = Counter(group.outcome for group in groups)
    constants = [float(group.scored_rewards[0]) for group in groups if group.outcome == "constant"]
    span = f" ({min(constants):g} to {max(constants):g})" if constants else ""
    parts = [f"{counts['constant']} had responses of equal reward{span}"]
    if algo.dynamic_filtering_range is not None:
        low, high = algo.dynamic_filtering_range
        parts.append(f"{counts['outside']} a mean reward outside algo.dynamic_filtering_range {low:g} {high:g}")
    if counts["unscored"]:
        parts.append(f"{counts['unscored']} fewer than two scored responses")
    return (
        f"algo.dynamic_filtering_enable kept {counts['kept']} of {len(groups)} groups in "
        f"{algo.dynamic_filtering_max_draws} draws, and a step needs {config.rollout.batch_size}: {', '.join(parts)}"
    )
