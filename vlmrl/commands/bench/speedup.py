"""The arithmetic of `vlmrl bench async`: modes, their bounds, and the share of the bound that they reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from vlmrl.types import Metrics


class Mode(NamedTuple):
    """Settings of one way to run the loop."""

    queue: int
    """`train.async_queue_size`; 0: synchronous."""
    partial: bool
    """`train.partial_rollout_enable`."""

    @property
    def name(self) -> str:
        if not self.queue:
            return "synchronous"
        return "partial" if self.partial else "drained"


SYNCHRONOUS = Mode(0, partial=False)


class Seconds(NamedTuple):
    """Seconds of a step, averaged over the measured steps of a round."""

    step: float
    rollout: float
    """Of these, waiting for responses."""

    @property
    def rest(self) -> float:
        """Everything else: rewards, checks, log-probs, update, weight sync."""
        return self.step - self.rollout


class Result(NamedTuple):
    """What a mode reached, from the medians over all rounds."""

    seconds_per_step: float
    speedup: float
    """Of the synchronous mode, as a multiple."""
    bound: float
    """The largest possible speed-up."""

    @property
    def reached(self) -> float:
        """Share of the bound."""
        return self.speedup / self.bound


def modes(queue_sizes: Sequence[int]) -> list[Mode]:
    """Return the modes of a round, in their order."""
    return [SYNCHRONOUS, *(Mode(queue, partial) for queue in queue_sizes for partial in (False, True))]


def warm_up(queue_sizes: Sequence[int]) -> int:
    """Return the number of steps at the beginning that are left out: the first checks more, and the next Q find all
    groups of the queue admitted at once. It is equal for all modes, so that they are measured on the same prompts."""
    return 2 + max(queue_sizes)


def averaged(steps: Sequence[Metrics], *, first: int, queue: int) -> Metrics:
    """Return the mean of each metric over the measured steps, from number `first` on (the first one is 0).

    The last Q steps are left out: nothing is sampled any more while they learn. Steps may take turns in being long and
    short, so that a mean is over a multiple of 1 + Q of them.
    """
    measured = steps[first : len(steps) - queue]
    assert measured
    assert len(measured) % (1 + queue) == 0
    names = {name for step in measured for name in step}
    return {name: sum(step.get(name, 0.0) for step in measured) / len(measured) for name in names}


def bound(rollout_s: float, update_s: float, queue: int) -> float:
    """Return the largest possible speed-up.

    A batch takes `rollout_s + update_s` from its admission to its update, and 1 + Q batches are under way at a time;
    only one of them is in its update.
    """
    step_s = rollout_s + update_s
    return step_s / max(update_s, step_s / (1 + queue))


def results(rounds: Mapping[Mode, Sequence[Seconds]]) -> dict[Mode, Result]:
    """Compare all modes with the synchronous one."""
    synchronous = rounds[SYNCHRONOUS]
    rollout_s, rest_s = median(s.rollout for s in synchronous), median(s.rest for s in synchronous)
    step_s = median(s.step for s in synchronous)
    seconds = {mode: median(s.step for s in of_mode) for mode, of_mode in rounds.items()}
    return {
        mode: Result(seconds[mode], step_s / seconds[mode], bound(rollout_s, rest_s, mode.queue)) for mode in rounds
    }
