"""Signals: what they interrupt, what they wait for, and that a resumed run lacks nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from processes import runs
from scripted_loop import (
    CountingPrompts,
    LabelRewarder,
    Notebook,
    RememberingPolicy,
    ScriptedEngine,
    ScriptedSync,
    config,
    run,
)

from vlmrl.data.experience import Experience
from vlmrl.errors import ClusterError
from vlmrl.system import stops
from vlmrl.system.stops import Stopped
from vlmrl.trainer.collect import PromptBudget
from vlmrl.trainer.rl import LoopState
from vlmrl.types import Group, Metrics, Prompt, Sample, Sampling, Score

GRACE_S = 60.0


@contextmanager
def stopped_run() -> Iterator[list[Stopped]]:
    """Handle signals within the context, which one must stop: the list receives the exception."""
    caught: list[Stopped] = []
    try:
        with stops.handle_signals(GRACE_S):
            yield caught
    except Stopped as stopped:
        caught.append(stopped)
    assert caught, "it was not stopped"


def ask(number: int = signal.SIGTERM) -> None:
    """Send this process a signal, as others would."""
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 143)],
    ids=str,
)
def test_a_signal_stops_with_the_exit_code_that_others_expect(number: int, code: int) -> None:
    before = signal.getsignal(number)
    signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
    try:
        with stopped_run() as caught:
            ask(number)
            time.sleep(30)
    finally:
        signal.signal(number, before)
    assert caught[0].exit_code == code
    assert str(caught[0]) == f"stopped by {signal.Signals(number).name}: nothing was saved"
    assert not stops.is_stopping(), "the next run starts anew"


def test_a_step_that_has_begun_is_finished_and_no_other_begins() -> None:
    done = []
    with stopped_run(), stops.only_in_waits():
        with stops.uninterrupted():
            ask()
            with stops.interruptible_wait():
                done.append("a wait inside")
        done.append("what comes after, up to the next wait")
        with stops.interruptible_wait():
            done.append("never")
    assert done == ["a wait inside", "what comes after, up to the next wait"]


def test_related_calls_are_not_interrupted_between_waits() -> None:
    done = []
    with stopped_run(), stops.only_in_waits():
        ask()
        done += ["rank 0", "rank 1"]
        with stops.interruptible_wait():
            done.append("never")
    assert done == ["rank 0", "rank 1"]


def test_waits_during_shutdown_are_not_interrupted() -> None:
    with stopped_run():
        try:
            ask()
            time.sleep(30)
        finally:
            with stops.interruptible_wait():
                time.sleep(0.01)


def test_a_request_during_shutdown_does_not_hide_the_error() -> None:
    with stopped_run() as caught:
        try:
            raise ClusterError("an engine has died")
        finally:
            ask()
            time.sleep(30)
    assert str(caught[0]) == "stopped by SIGTERM: nothing was saved; the run was ending: an engine has died"
    assert caught[0].exit_code == 143


def test_rays_own_interrupt_counts_as_ours() -> None:
    # Ray's waits catch what a handler raises, and raise a plain KeyboardInterrupt in its place.
    with stopped_run() as caught, stops.interruptible_wait():
        try:
            ask()
            time.sleep(30)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None
    assert caught[0].exit_code == 143


def test_interruptible_parts_may_be_interrupted_inside_uninterrupted() -> None:
    done = []
    with stopped_run(), stops.only_in_waits():
        with stops.uninterrupted():
            try:
                with stops.interruptible(), stops.interruptible_wait():
                    ask()
                    time.sleep(30)
            except Stopped:
                done.append("no evaluation")
            with stops.interruptible_wait():
                done.append("a checkpoint")
        stops.raise_if_requested()
    assert done == ["no evaluation", "a checkpoint"]


def test_each_sigusr1_requests_one_checkpoint() -> None:
    with stops.handle_signals(GRACE_S):
        assert not stops.take_checkpoint_request()
        ask(signal.SIGUSR1)
        assert stops.take_checkpoint_request()
        assert not stops.take_checkpoint_request()
    assert not stops.take_checkpoint_request()


def test_a_request_after_the_work_is_done_changes_nothing() -> None:
    left = []
    with stops.handle_signals(GRACE_S):
        stops.mark_done()
        ask()
        left.append("Ray")
        with stops.interruptible_wait():
            left.append("engines")
    assert left == ["Ray", "engines"]


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stops.handle_signals(GRACE_S):
            ask(signal.SIGHUP)
            assert not stops.is_stopping()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_other_threads_neither_handle_signals_nor_are_interrupted() -> None:
    done = []

    def wait() -> None:
        with (
            stops.handle_signals(GRACE_S),
            stops.interruptible_wait(),
            stops.uninterrupted(),
            stops.interruptible(),
            stops.only_in_waits(),
        ):
            stops.raise_if_requested()
            done.append("other")

    with stopped_run(), stops.uninterrupted():
        ask()
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
        stops.raise_if_requested()
    assert done == ["other"]


def test_outside_of_its_context_everything_does_nothing() -> None:
    stops.install_handlers()
    stops.raise_if_requested()
    with stops.interruptible_wait(), stops.uninterrupted(), stops.interruptible(), stops.only_in_waits():
        pass


ENDS_AT_ONCE = """
import signal, subprocess, sys, time
from vlmrl.system import stops
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
with stops.handle_signals(float(sys.argv[1])), stops.uninterrupted():
    print(child.pid, flush=True)
    time.sleep(60)
"""


def start(grace_s: float) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(
        [sys.executable, "-c", ENDS_AT_ONCE, str(grace_s)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_a_second_signal_kills_the_run_but_an_echo_does_not() -> None:
    process, child = start(60)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)  # as `timeout` does: to the process, and to its group
    time.sleep(1.2)
    assert process.poll() is None, "it finishes what has begun"
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=10)
    assert process.returncode == 143
    assert stderr == "vlmrl: ended immediately: SIGTERM came after SIGTERM\n"
    assert not runs(child)


def test_a_stop_that_exceeds_the_grace_period_is_killed() -> None:
    process, child = start(0.5)
    process.send_signal(signal.SIGHUP)
    _, stderr = process.communicate(timeout=10)
    assert process.returncode == 143
    assert stderr == "vlmrl: ended immediately: stopping took longer than train.stop_grace_s 0.5\n"
    assert not runs(child)


def test_processes_with_blocked_signals_survive() -> None:
    with stops.signals_blocked():
        child = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"], stdout=-1)
    assert child.stdout is not None
    child.stdout.readline()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT):
        child.send_signal(number)
    time.sleep(0.1)
    assert child.poll() is None
    child.kill()
    child.communicate()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []), "the parent has its own again"


# ---- the loop


class Asked:
    """A script of when to ask: in a step, at a place."""

    def __init__(self, step: int, place: str) -> None:
        self.step, self.place, self.now = step, place, 0

    def at(self, place: str) -> None:
        with stops.interruptible_wait():
            if (self.now, place) == (self.step, self.place):
                ask()
                time.sleep(0.001)


class Prompts(CountingPrompts):
    def __init__(self, asked: Asked, position: int) -> None:
        super().__init__(position)
        self.asked = asked

    def draw(self, count: int) -> tuple[list[Prompt], Metrics]:
        self.asked.now += 1
        drawn = super().draw(count)
        self.asked.at("data")
        return drawn


class Engine(ScriptedEngine):
    def __init__(self, asked: Asked, version: int) -> None:
        super().__init__()
        self.asked, self.version = asked, version

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, on_group: Callable[[Group], None] | None = None
    ) -> list[Group]:
        groups = super().generate(prompts, sampling, on_group)
        self.asked.at("rollout")
        return groups


class Rewarder(LabelRewarder):
    def __init__(self, asked: Asked) -> None:
        super().__init__()
        self.asked = asked

    def score(self, groups: Sequence[Group], *, out_of: int | None = None, failed: int = 0) -> list[list[Score]]:
        self.asked.at("reward")
        return super().score(groups, out_of=out_of, failed=failed)


class Policy(RememberingPolicy):
    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.asked = engine.asked

    def update(self, experience: Experience, *, step: int) -> Metrics:
        self.asked.at("update")
        return super().update(experience, step=step)

    def logprobs(self, samples: Sequence[Sample]) -> Any:
        self.asked.at("logprob")
        return super().logprobs(samples)


class WeightSync(ScriptedSync):
    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.asked = engine.asked

    def sync(self, version: int) -> Metrics:
        self.asked.at("sync")
        return super().sync(version)


STEPS, PER_STEP = 4, 2


def train(asked: Asked, saved: tuple[int, int], notebook: Notebook) -> tuple[int, int]:
    """Run the steps after `saved` = (step, position in the prompts); what is saved at the end, or at a stop."""
    done, position = saved
    asked.now = done
    prompts = Prompts(asked, position)
    policy = Policy(Engine(asked, done))
    finished = [saved]

    def save(step: int, state: LoopState) -> None:
        asked.at("save")
        finished.append((step, prompts.position))

    try:
        with stops.handle_signals(GRACE_S), stops.only_in_waits():
            run(
                config(train={"batch_size": 2}),  # two updates per step: old log-probs are asked for
                policy,
                steps=STEPS,
                rewarder=Rewarder(asked),
                notebook=notebook,
                prompts=prompts,
                weight_sync=WeightSync(policy.engine),
                budget=PromptBudget(1000, drawn=position),
                first_step=done + 1,
                save=save,
            )
    except Stopped:
        notebook.stopped = True  # type: ignore[attr-defined]
    notebook.indices = [  # type: ignore[attr-defined]
        *getattr(notebook, "indices", []),
        *(sample.group for taught in policy.taught for sample in taught.samples),
    ]
    return finished[-1]


@pytest.mark.parametrize("place", ["data", "rollout", "reward", "logprob", "update", "sync", "save"])
def test_a_stopped_run_resumes_with_the_metrics_of_an_uninterrupted_one(place: str) -> None:
    whole = Notebook()
    train(Asked(-1, ""), (0, 0), whole)
    broken = Notebook()
    saved = train(Asked(3, place), (0, 0), broken)
    has_begun = place in ("update", "sync", "save")
    assert broken.stopped, place  # type: ignore[attr-defined]
    assert saved == ((3, 3 * PER_STEP) if has_begun else (2, 2 * PER_STEP))
    assert sorted(broken.steps) == list(range(1, saved[0] + 1)), "a step is reported when it is done, and only then"
    assert train(Asked(-1, ""), saved, broken) == (STEPS, STEPS * PER_STEP)
    assert broken.steps == whole.steps
    assert broken.indices == whole.indices, "a prompt was lost or trained on twice"  # type: ignore[attr-defined]


def test_a_role_that_the_same_signal_ended_does_not_turn_a_stop_into_an_error() -> None:
    def run() -> None:
        with stops.handle_signals(GRACE_S), stops.uninterrupted():
            ask()
            raise ClusterError("actor 1 of 4 was killed by signal 15 (SIGTERM)")

    with pytest.raises(Stopped) as stopped:
        run()
    assert stopped.value.exit_code == 143
    assert str(stopped.value) == (
        "stopped by SIGTERM: the current step was not finished: actor 1 of 4 was killed by signal 15 (SIGTERM)"
    )
    with pytest.raises(ClusterError), stops.handle_signals(GRACE_S):
        raise ClusterError("nobody has asked for a stop")
