"""Dynamic filtering of a run: which groups are trained on, and whether the prompts are solved when too few are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from vlmrl.algorithms.shaping import is_within, teaches
from vlmrl.config.run import RlConfig
from vlmrl.trainer.experience import worth
from vlmrl.types import Floats, Group, Score

Verdict = Literal["kept", "constant", "outside", "unscored"]
"""`constant`: all its scored responses are worth the same. `outside`: its mean reward is not in
`algo.dynamic_filtering_range`. `unscored`: fewer than two of its responses have a reward."""

_SAME = 1e-6
"""As in `algorithms.shaping`."""


class Sifted(NamedTuple):
    """A group, and whether it is trained on."""

    group: Group
    scores: list[Score]
    rewards: Floats
    """[G], after shaping; NaN where there is none."""
    worth: Floats
    """[n] of its scored responses: after shaping, step rewards included."""
    verdict: Verdict

    @property
    def is_kept(self) -> bool:
        return self.verdict == "kept"


class Seen(NamedTuple):
    """The least and the most that a response of the run was worth, after shaping."""

    lowest: float = math.inf
    highest: float = -math.inf

    def joined(self, sifted: Sequence[Sifted]) -> Seen:
        """With what these groups show."""
        values = [float(value) for one in sifted for value in one.worth]
        return Seen(min([self.lowest, *values]), max([self.highest, *values]))


def sift(config: RlConfig, groups: Sequence[Group], scores: Sequence[list[Score]]) -> list[Sifted]:
    """Say of each group whether it is trained on. Without dynamic filtering every group is."""
    values = worth(config, groups, scores)
    differs = teaches(values.rewards, step_rewards=values.step_rewards, scored=values.scored).tolist()
    totals = values.rewards + values.step_rewards
    found = []
    for row, (group, judged) in enumerate(zip(groups, scores, strict=True)):
        scored = values.scored[row]
        rewards = values.rewards[row].masked_fill(~scored, math.nan).numpy()
        verdict: Verdict = "kept"
        if config.algo.dynamic_filtering_enable:
            earned = [score.earned for score in judged if score.has_reward]
            verdict = _verdict(earned, differs=differs[row], bounds=config.algo.dynamic_filtering_range)
        found.append(Sifted(group, judged, rewards, totals[row][scored].numpy(), verdict))
    return found


def _verdict(earned: Sequence[float], *, differs: bool, bounds: tuple[float, float] | None) -> Verdict:
    if len(earned) < 2:
        return "unscored"
    if not differs:
        return "constant"
    return "kept" if bounds is None or is_within(float(np.mean(earned)), *bounds) else "outside"


def highest_attainable(config: RlConfig) -> float | None:
    """The most that a response can be worth after shaping; None where a source's own limit is not known.

    The built-in functions give at most 1.
    """
    reward = config.reward
    if reward.has_own_source:
        return None
    total = sum(max(weight, 0.0) for weight in reward.functions.values())
    low, high = reward.clip_range
    return min(max(total, low), high)


def is_solved(config: RlConfig, sifted: Sequence[Sifted], seen: Seen) -> bool:
    """Whether most groups without a difference are at the highest reward: attainable, or seen where that is unknown.

    A run that has seen one reward only cannot tell the highest from the lowest, and has not solved anything.
    """
    highest = highest_attainable(config)
    if highest is None:
        if not seen.highest > seen.lowest + _SAME:
            return False
        highest = seen.highest
    constants = [float(one.worth[0]) for one in sifted if one.verdict == "constant"]
    return 2 * sum(value >= highest - _SAME for value in constants) > len(constants)


def too_few(config: RlConfig, sifted: Sequence[Sifted]) -> str:
    """What a step drew in vain, in one line."""
    algo = config.algo
    counts = Counter(one.verdict for one in sifted)
    values = [float(one.worth[0]) for one in sifted if one.verdict == "constant"]
    span = f" ({min(values):g} to {max(values):g})" if values else ""
    parts = [f"{counts['constant']} had responses of equal worth{span}"]
    if algo.dynamic_filtering_range is not None:
        low, high = algo.dynamic_filtering_range
        parts.append(f"{counts['outside']} a mean reward outside algo.dynamic_filtering_range {low:g} {high:g}")
    if counts["unscored"]:
        parts.append(f"{counts['unscored']} fewer than two scored responses")
    return (
        f"algo.dynamic_filtering_enable kept {counts['kept']} of {len(sifted)} groups in "
        f"{algo.dynamic_filtering_max_draws} draws, and a step needs {config.rollout.batch_size}: {', '.join(parts)}"
    )
