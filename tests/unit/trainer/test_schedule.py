"""Order, staleness and progress of asynchronous rollouts, over random schedules with a scripted clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from vlmrl.trainer.schedule import Schedule


class Setup(NamedTuple):
    """A run: its settings, and everything that is random in it."""

    batch: int
    queue: int
    steps: int
    partial: bool
    durations: list[float]
    """Of the groups, repeated."""
    updates: list[float]
    """Of the steps, repeated."""
    kept: list[bool]
    """Whether a group is trained on, repeated."""
    failures: list[int]
    """Attempts of each group that end without a response, repeated."""
    engines: int
    kill: float | None
    """Time at which the run is killed once; it resumes from its last step."""


class Trained(NamedTuple):
    """A group that a step took."""

    position: int
    oldest: int
    """Version of its first token."""
    newest: int
    is_kept: bool
    step: int


class KilledError(Exception):
    """The process is gone."""


class Clock:
    """Simulates engines, each of which makes one group after the other."""

    def __init__(self, setup: Setup, schedule: Schedule[tuple[int, int]], *, kill: float | None, version: int) -> None:
        self.setup, self.schedule, self.kill = setup, schedule, kill
        self.now, self.version = 0.0, version
        self.started = schedule.taken
        self.waiting: list[tuple[int, int]] = []
        """(position, failures to come)"""
        self.running: list[tuple[float, int, int, int]] = []
        """(end, position, version of the first token, failures to come)"""

    def start(self) -> None:
        """Start what may start, in order."""
        for position in range(self.started, self.schedule.limit):
            if position not in self.schedule.finished:
                self.waiting.append((position, at(self.setup.failures, position)))
        self.started = max(self.started, self.schedule.limit)
        while self.waiting and len(self.running) < self.setup.engines:
            position, failures = self.waiting.pop(0)
            heapq.heappush(
                self.running, (self.now + at(self.setup.durations, position), position, self.version, failures)
            )

    def run_until(self, is_done: Callable[[], bool], *, end: float | None = None) -> None:
        """Let engines work until the condition holds, or until `end`."""
        self.start()
        while not is_done():
            if end is not None and (not self.running or self.running[0][0] > end):
                self.pass_to(end)
                return
            assert self.running, "deadlock: the trainer waits, and no engine works"
            when, position, oldest, failures = heapq.heappop(self.running)
            self.pass_to(when)
            if failures:
                self.waiting.insert(0, (position, failures - 1))
            else:
                self.schedule.finish(position, (oldest, self.version))
            self.start()

    def pass_to(self, when: float) -> None:
        if self.kill is not None and when > self.kill:
            raise KilledError
        self.now = when


def at(values: list[float] | list[int] | list[bool], place: int) -> int:
    return values[place % len(values)]  # type: ignore[return-value]


class Saved(NamedTuple):
    step: int
    taken: int
    finished: dict[int, tuple[int, int]]
    trained: list[Trained]


def simulate(setup: Setup) -> list[Trained]:
    """Return all groups that steps took, in order, of a run that is killed at most once."""
    saved = Saved(0, 0, {}, [])
    kill = setup.kill
    while True:
        try:
            for last in steps(setup, saved, kill):
                saved = last
            return saved.trained
        except KilledError:
            kill = None


def steps(setup: Setup, saved: Saved, kill: float | None) -> Iterator[Saved]:
    """Yield the checkpoint of each step after `saved`."""
    schedule: Schedule[tuple[int, int]] = Schedule(
        batch_size=setup.batch,
        queue_size=setup.queue,
        last_step=setup.steps,
        end=10_000,
        taken=saved.taken,
        version=saved.step,
    )
    schedule.published(saved.step)
    for position, group in saved.finished.items():
        assert schedule.is_fresh(position, group[0])
        schedule.finish(position, group)
    clock = Clock(setup, schedule, kill=kill, version=saved.step)
    trained = list(saved.trained)
    for step in range(saved.step + 1, setup.steps + 1):
        missing = setup.batch
        while missing:
            schedule.admit(missing)
            clock.run_until(partial(schedule.is_ready, missing))
            first = schedule.taken
            for i, (oldest, newest) in enumerate(schedule.take(missing)):
                trained.append(Trained(first + i, oldest, newest, bool(at(setup.kept, first + i)), step))
            missing = setup.batch - sum(group.is_kept for group in trained if group.step == step)
        clock.run_until(lambda: False, end=clock.now + at(setup.updates, step))  # type: ignore[arg-type]
        if not setup.partial:
            clock.run_until(lambda: schedule.is_settled)
        clock.version = step
        schedule.published(step)
        clock.start()
        yield Saved(step, schedule.taken, dict(schedule.finished), list(trained))


DURATIONS = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=12)
SETUPS = st.builds(
    Setup,
    batch=st.integers(1, 4),
    queue=st.integers(1, 4),
    steps=st.integers(1, 8),
    partial=st.booleans(),
    durations=DURATIONS,
    updates=st.lists(st.floats(0.01, 10.0), min_size=1, max_size=4),
    kept=st.lists(st.booleans(), min_size=1, max_size=8).map(lambda kept: [*kept, True]),
    failures=st.lists(st.integers(0, 2), min_size=1, max_size=4),
    engines=st.integers(1, 6),
    kill=st.none() | st.floats(0.0, 60.0),
)


@given(SETUPS)
@hypothesis_settings(max_examples=3000, deadline=None)
def test_every_schedule_keeps_order_and_bound_and_ends(setup: Setup) -> None:
    trained = simulate(setup)
    assert [group.position for group in trained] == list(range(len(trained))), "lost, doubled or out of order"
    by_step = {step: [group for group in trained if group.step == step] for step in range(1, setup.steps + 1)}
    for step, groups in by_step.items():
        assert sum(group.is_kept for group in groups) == setup.batch
        assert groups[-1].is_kept, "a step takes no more than it needs"
        assert all(step - 1 - setup.queue <= group.oldest <= group.newest <= step - 1 for group in groups)


@given(SETUPS, DURATIONS, st.integers(1, 6))
@hypothesis_settings(max_examples=1000, deadline=None)
def test_versions_of_a_drained_run_do_not_depend_on_time(setup: Setup, durations: list[float], engines: int) -> None:
    setup = setup._replace(partial=False)
    assert simulate(setup) == simulate(setup._replace(durations=durations, engines=engines, kill=None))


def test_without_filtering_every_group_is_as_old_as_the_queue_is_long() -> None:
    setup = Setup(2, 2, 6, False, [1.0], [1.0], [True], [0], 2, None)
    # The first two steps' groups were all sampled at version 0, with those of step 3; then one batch per version.
    assert [group.oldest for group in simulate(setup)] == [0] * 6 + [1, 1, 2, 2, 3, 3]


def test_the_window_is_that_of_the_docstring() -> None:
    schedule: Schedule[str] = Schedule(batch_size=2, queue_size=1, last_step=9, end=100)
    schedule.published(0)
    assert schedule.limit == 4
    for position in range(4):
        schedule.finish(position, str(position))
    schedule.admit(2)
    assert (schedule.limit, schedule.take(2)) == (4, ["0", "1"])
    schedule.admit(1)  # one of them was filtered
    assert (schedule.limit, schedule.take(1)) == (5, ["2"])
    schedule.published(1)
    assert schedule.limit == 7


def test_nothing_starts_beyond_the_last_step_or_the_last_prompt() -> None:
    schedule: Schedule[str] = Schedule(batch_size=2, queue_size=3, last_step=2, end=100)
    schedule.published(0)
    assert schedule.limit == 4
    short: Schedule[str] = Schedule(batch_size=2, queue_size=3, last_step=9, end=5)
    short.published(0)
    assert short.limit == 5
    assert not short.is_settled
    over: Schedule[str] = Schedule(batch_size=2, queue_size=3, last_step=2, end=100, taken=4)
    over.published(2)
    assert over.limit == 4
    assert over.is_settled


def test_a_group_finishes_once_and_only_when_it_was_admitted() -> None:
    schedule: Schedule[str] = Schedule(batch_size=1, queue_size=1, last_step=9, end=100)
    schedule.published(0)
    schedule.finish(1, "one")
    for position in (1, 2, -1):
        with pytest.raises(ValueError, match=f"group {position} was not admitted"):
            schedule.finish(position, "again")


def test_groups_of_a_longer_queue_are_too_old_for_a_shorter_one() -> None:
    # After step 3 and 6 groups, with batches of 2 now: group 6 is of step 4, at version 3; group 9 of step 5.
    schedule: Schedule[str] = Schedule(batch_size=2, queue_size=1, last_step=9, end=100, taken=6, version=3)
    assert [schedule.is_fresh(6, version) for version in (1, 2, 3)] == [False, True, True]
    assert [schedule.is_fresh(9, version) for version in (2, 3)] == [False, True]
    schedule.published(3)
    for position in range(6, 10):
        schedule.finish(position, "")
    schedule.take(1)
    assert [schedule.is_fresh(7, version) for version in (1, 2)] == [False, True], "still of step 4"
    schedule.take(1)
    assert [schedule.is_fresh(8, version) for version in (2, 3)] == [False, True], "of step 5"
