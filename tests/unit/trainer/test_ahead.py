"""Rollouts that run ahead, in the loop, with engines of random speed in other threads."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scripted_episodes import make_episode_rollout, make_segment
from scripted_loop import (
    CountingPrompts,
    LabelRewarder,
    Notebook,
    RememberingPolicy,
    ScriptedEngine,
    ScriptedSync,
    config,
    make_prompt,
    run,
)

from vlmrl.config.verbs import RlConfig
from vlmrl.errors import ClusterError, DataError, SyncError
from vlmrl.system import stops
from vlmrl.system.stops import Stopped
from vlmrl.trainer.ahead import Ahead
from vlmrl.trainer.collect import ExhaustedError
from vlmrl.trainer.rollouts import InTurn
from vlmrl.trainer.saved_groups import can_save, decode, encode
from vlmrl.types import ChatMessage, Group, Metrics, Pixels, Prompt, Sampling, Score

CORRECTED = {"advantage": {"is_correction_enable": True}}


def ahead_config(queue: int = 1, *, partial: bool = False, **changes: object) -> RlConfig:
    train = {"batch_size": 4, "async_enable": True, "async_queue_size": queue, "partial_rollout_enable": partial}
    return config(**{"train": train, "algo": CORRECTED, "vllm": {"max_logprob_diff": 9.0}} | changes)


class SlowEngine(ScriptedEngine):
    """Each group takes up to a few ms, and comes from the weights that it began with. Groups end in any order."""

    def __init__(self, *, seed: int = 0, longest_s: float = 0.005) -> None:
        super().__init__()
        self.random, self.longest_s = random.Random(seed), longest_s
        self.submitted: list[int] = []
        self.under_way: set[int] = set()
        self.error: Exception | None = None
        self.needs_repair = self.is_down = False

    def repair(self) -> None:
        raise AssertionError("no engine has died")

    def submit(self, prompt: Prompt, sampling: Sampling, on_done: Callable[[Callable[[], Group | None]], None]) -> None:
        (group,) = self.generate([prompt], sampling)
        self.submitted.append(prompt.index)
        self.under_way.add(prompt.index)

        def result() -> Group:
            self.under_way.remove(prompt.index)
            if self.error is not None:
                raise self.error
            return group

        timer = threading.Timer(self.random.uniform(0, self.longest_s), on_done, [result])
        timer.daemon = True
        timer.start()


def make_ahead(
    settings: RlConfig,
    engine: SlowEngine,
    notebook: Notebook,
    *,
    prompts: Any = None,
    rewarder: LabelRewarder | None = None,
    timeout_s: float = 10.0,
) -> Ahead:
    return Ahead(
        settings,
        prompts=prompts or CountingPrompts(),
        engine=engine,
        rewarder=rewarder or LabelRewarder(),
        report=notebook,
        timeout_s=timeout_s,
    )


def run_ahead(
    settings: RlConfig,
    engine: SlowEngine,
    *,
    steps: int,
    rewarder: LabelRewarder | None = None,
    policy: RememberingPolicy | None = None,
    num_prompts: int = 1000,
    timeout_s: float = 10.0,
    prompts: Any = None,
    **hooks: object,
) -> tuple[Notebook, RememberingPolicy, list[list[Group]]]:
    """Run the loop; return the report, the policy, and the groups that each step trained on."""
    notebook, rewarder = Notebook(), rewarder or LabelRewarder()
    policy = policy or RememberingPolicy(engine)
    trained: list[list[Group]] = []

    def keep(step: int, groups: Sequence[Group]) -> Callable[[], Metrics]:
        trained.append(list(groups))
        return dict

    rollouts = make_ahead(settings, engine, notebook, prompts=prompts, rewarder=rewarder, timeout_s=timeout_s)
    rollouts.begin(last_step=steps, num_prompts=num_prompts, version=0)
    try:
        run(
            settings,
            policy,
            steps=steps,
            rewarder=rewarder,
            num_prompts=num_prompts,
            notebook=notebook,
            rollouts=rollouts,
            check_responses=keep,
            **hooks,
        )
    finally:
        rollouts.close()
        assert not [thread for thread in threading.enumerate() if thread.name == "vlmrl-ahead"]
    return notebook, policy, trained


def indices(trained: list[list[Group]]) -> list[list[int]]:
    return [[group.prompt.index for group in groups] for groups in trained]


def versions(trained: list[list[Group]]) -> list[list[int]]:
    return [[v for group in groups for v in group.rollouts[0].versions] for groups in trained]


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("queue", [1, 2, 3])
def test_steps_train_on_the_prompts_of_a_synchronous_run_within_the_bound(queue: int, partial: bool) -> None:
    engine = SlowEngine(seed=queue)
    notebook, _, trained = run_ahead(ahead_config(queue, partial=partial), engine, steps=6)
    assert indices(trained) == [[2 * step, 2 * step + 1] for step in range(6)]
    assert engine.submitted == list(range(12)), "in order, each once, and none that no step takes"
    for step, ages in enumerate(versions(trained)):
        assert all(max(0, step - queue) <= version <= step for version in ages)
    if not partial:
        assert versions(trained) == [[max(0, step - queue)] * 2 for step in range(6)]
    assert ("settle" in notebook.phases) is not partial
    assert notebook.steps[1]["async/staleness_max"] == 0
    assert notebook.steps[6]["async/staleness_max"] == max(6 - 1 - min(min(v) for v in versions(trained)[5:]), 0)


def test_a_synchronous_run_and_one_ahead_report_the_same_rewards_and_lengths() -> None:
    ahead, policy, _ = run_ahead(ahead_config(2), SlowEngine(), steps=3)
    in_turn = run(config(algo=CORRECTED), other := RememberingPolicy(ScriptedEngine()), steps=3)
    for step in (1, 2, 3):
        shared = [name for name in in_turn.steps[step] if name.startswith(("reward/", "response/", "group/"))]
        assert {name: ahead.steps[step][name] for name in shared} == {
            name: in_turn.steps[step][name] for name in shared
        }
        assert "sync/logprob_diff_max" in in_turn.steps[step]
        assert "sync/logprob_diff_max" not in ahead.steps[step], "the recorded ones are of older weights"
    for one, two in zip(policy.taught, other.taught, strict=True):
        assert [list(row) for row in one.advantages] == [list(row) for row in two.advantages]


def test_with_an_empty_queue_it_is_a_synchronous_run_to_the_bit() -> None:
    settings = config(train={"batch_size": 4, "async_enable": True, "async_queue_size": 0})
    ahead, policy, trained = run_ahead(settings, SlowEngine(), steps=5)
    in_turn = run(config(), other := RememberingPolicy(ScriptedEngine()), steps=5)
    assert versions(trained) == [[step] * 2 for step in range(5)]
    for step in range(1, 6):
        assert ahead.steps[step] == in_turn.steps[step] | {"async/groups_ahead": 0.0}
    for one, two in zip(policy.taught, other.taught, strict=True):
        for name in ("advantages", "rollout_logprobs"):
            for left, right in zip(getattr(one, name), getattr(two, name), strict=True):
                np.testing.assert_array_equal(left, right)


class PickyRewarder(LabelRewarder):
    """Every second prompt has responses of equal reward."""

    def score(self, groups: Sequence[Group], *, out_of: int | None = None, failed: int = 0) -> list[list[Score]]:
        return [[Score(0.0), Score(float(group.prompt.index % 2))] for group in groups]


@pytest.mark.parametrize("partial", [False, True])
def test_filtered_groups_are_replaced_in_order(partial: bool) -> None:
    filtering = CORRECTED | {"dynamic_filtering_enable": True, "dynamic_filtering_max_draws": 4}
    notebook, _, trained = run_ahead(
        ahead_config(1, partial=partial, algo=filtering), SlowEngine(), steps=4, rewarder=PickyRewarder()
    )
    assert indices(trained) == [[1, 3], [5, 7], [9, 11], [13, 15]]
    assert notebook.steps[2]["filter/groups_drawn"] == 4
    if not partial:
        # Step 1 reads 0 to 3, and each of the two that it filters admits one more at version 0: 4 and 5. The sync
        # admits 6 and 7, step 2 8 and 9, and so on. Nothing is admitted for a step after the fourth.
        assert versions(trained) == [[0, 0], [0, 1], [1, 2], [2, 3]]


class EqualRewarder(LabelRewarder):
    """From prompt `first` on all responses have the reward `value`."""

    def __init__(self, *, first: int, value: float) -> None:
        super().__init__()
        self.first, self.value = first, value

    def score(self, groups: Sequence[Group], *, out_of: int | None = None, failed: int = 0) -> list[list[Score]]:
        return [
            [Score(self.value)] * 2 if group.prompt.index >= self.first else [Score(0.0), Score(1.0)]
            for group in groups
        ]


class Stuck(SlowEngine):
    """Groups from prompt `first` on never end."""

    def __init__(self, *, first: int) -> None:
        super().__init__()
        self.first = first

    def submit(self, prompt: Prompt, sampling: Sampling, on_done: Callable[[Callable[[], Group]], None]) -> None:
        self.longest_s = 0.001 if prompt.index < self.first else 1e5
        super().submit(prompt, sampling, on_done)


@pytest.mark.parametrize("solved", [True, False])
def test_a_run_ends_early_while_responses_are_under_way(solved: bool) -> None:
    filtering = CORRECTED | {"dynamic_filtering_enable": True, "dynamic_filtering_max_draws": 2}
    engine, rewarder = Stuck(first=8), EqualRewarder(first=4, value=float(solved))
    settings = ahead_config(2, partial=True, algo=filtering)
    if solved:
        notebook, _, trained = run_ahead(settings, engine, steps=9, rewarder=rewarder)
        assert notebook.ending is not None
        assert (notebook.ending.step, notebook.ending.is_solved) == (2, True)
        assert indices(trained) == [[0, 1], [2, 3]]
    else:
        with pytest.raises(ExhaustedError, match="kept 0 of 4 groups in 2 draws"):
            run_ahead(settings, engine, steps=9, rewarder=rewarder)
    assert engine.submitted == list(range(12))
    assert engine.under_way == {8, 9, 10, 11}


def test_the_prompts_of_all_episodes_are_taken_once_and_none_is_sampled_for_nothing() -> None:
    engine = SlowEngine()
    notebook, _, trained = run_ahead(ahead_config(3), engine, steps=3, num_prompts=7)
    assert indices(trained) == [[0, 1], [2, 3], [4, 5]]
    assert engine.submitted == list(range(6)), "the seventh does not fill a batch"
    assert notebook.steps[3]["data/left_out"] == 1


def test_scoring_begins_before_a_step_asks() -> None:
    rewarder = LabelRewarder()
    begun: list[int] = []

    class Policy(RememberingPolicy):
        def update(self, experience: Any, *, step: int) -> Metrics:
            while len(rewarder.begun) < 2 * min(step + 1, 3):  # the next batch is scored during the update
                pass
            begun.append(step)
            return super().update(experience, step=step)

    engine = SlowEngine()
    run_ahead(ahead_config(), engine, steps=3, rewarder=rewarder, policy=Policy(engine))
    assert begun == [1, 2, 3]
    assert sorted(rewarder.begun) == list(range(6))


def test_without_partial_rollouts_nothing_is_under_way_during_a_sync() -> None:
    engine = SlowEngine()

    class Sync(ScriptedSync):
        def sync(self, version: int) -> Metrics:
            assert not engine.under_way
            return super().sync(version)

    run_ahead(ahead_config(2), engine, steps=5, weight_sync=Sync(engine))


def test_an_engine_that_missed_more_syncs_than_the_queue_explains_stops_the_run() -> None:
    class Lost(ScriptedSync):
        def sync(self, version: int) -> Metrics:
            return {}

    engine = SlowEngine()
    with pytest.raises(
        SyncError, match=r"version 0, the trainer is at version 2, and train\.async_queue_size allows 1"
    ):
        run_ahead(ahead_config(1), engine, steps=4, weight_sync=Lost(engine))


@pytest.mark.parametrize("where", ["engine", "data"])
def test_an_error_in_the_thread_is_raised_in_the_loop(where: str) -> None:
    class Bad(CountingPrompts):
        def draw(self, count: int) -> tuple[list[Prompt], Metrics]:
            if where == "data" and self.position >= 4:
                raise DataError("no rows")
            return super().draw(count)

    engine = SlowEngine()
    if where == "engine":
        engine.error = ClusterError("vllm 0 died")
    with pytest.raises((ClusterError, DataError), match="vllm 0 died" if where == "engine" else "no rows"):
        run_ahead(ahead_config(), engine, steps=4, prompts=Bad())


def test_a_step_is_finished_before_an_error_of_what_was_under_way_ends_the_run() -> None:
    class Failing(SlowEngine):
        """Groups after the first step's fail during its update."""

        def submit(
            self, prompt: Prompt, sampling: Sampling, on_done: Callable[[Callable[[], Group | None]], None]
        ) -> None:
            if prompt.index < 2:
                super().submit(prompt, sampling, on_done)
            else:
                waiting.append(on_done)

    class Patient(RememberingPolicy):
        def update(self, experience: Any, *, step: int) -> Metrics:
            for on_done in waiting:
                on_done(fail)
            return super().update(experience, step=step)

    def fail() -> Group:
        raise DataError("row 3: broken")

    waiting: list[Any] = []
    engine, saved = Failing(), list[int]()
    with pytest.raises(DataError, match="row 3: broken"):
        run_ahead(ahead_config(), engine, steps=4, policy=Patient(engine), save=lambda step, state: saved.append(step))
    assert saved == [1]


def test_an_engine_that_hangs_is_an_error() -> None:
    with pytest.raises(ClusterError, match="no engine finished a response within 0 s"):
        run_ahead(ahead_config(), SlowEngine(longest_s=60.0), steps=2, timeout_s=0.05)


class Dying(SlowEngine):
    """The only engine, which dies with everything under way as soon as this prompt is submitted."""

    def __init__(self, prompt: int) -> None:
        super().__init__()
        self.fatal, self.held = prompt, list[Any]()
        self.repaired_at: list[int] = []

    def submit(self, prompt: Prompt, sampling: Sampling, on_done: Callable[[Callable[[], Group | None]], None]) -> None:
        if prompt.index == self.fatal and not self.repaired_at:
            self.needs_repair = self.is_down = True
        if self.is_down:
            self.held.append((prompt, sampling, on_done))
            on_done(lambda: None)
            return
        super().submit(prompt, sampling, on_done)

    def repair(self) -> None:
        self.repaired_at.append(self.version)
        self.needs_repair = self.is_down = False
        held, self.held = self.held, []
        for request in held:
            self.submit(*request)


@pytest.mark.parametrize("partial", [False, True])
def test_a_step_that_waits_for_a_dead_engine_has_it_started_again(partial: bool) -> None:
    engine = Dying(prompt=1)
    _, _, trained = run_ahead(ahead_config(2, partial=partial), engine, steps=4)
    assert engine.repaired_at == [0]
    assert [group.prompt.index for groups in trained for group in groups] == list(range(8))


def test_groups_of_engines_that_all_died_during_an_update_wait_for_the_next_weights() -> None:
    engine = Dying(prompt=6)
    of_sync: list[int] = []

    class Sync(ScriptedSync):
        """A weight sync starts dead engines again."""

        def sync(self, version: int) -> Metrics:
            metrics = super().sync(version)
            of_sync.append(version)
            if engine.needs_repair:
                engine.repair()
            return metrics

    class Patient(RememberingPolicy):
        def update(self, experience: Any, *, step: int) -> Metrics:
            while step == 2 and not engine.needs_repair:  # prompts 6 and 7 start after the sync of step 1
                time.sleep(0.001)
            return super().update(experience, step=step)

    _, _, trained = run_ahead(ahead_config(2), engine, steps=5, policy=Patient(engine), weight_sync=Sync(engine))
    assert engine.repaired_at == [2]
    assert [group.prompt.index for groups in trained for group in groups] == list(range(10))
    versions = [version for groups in trained for group in groups for r in group.rollouts for version in r.versions]
    assert versions == sorted(versions)
    assert set(versions[12:16]) == {2}, "prompts 6 and 7 have the weights of step 2 instead of step 1"


def test_a_run_that_was_asked_to_stop_does_not_wait_for_what_is_under_way() -> None:
    class Slow(SlowEngine):
        """Only the first step's groups end."""

        def submit(
            self, prompt: Prompt, sampling: Sampling, on_done: Callable[[Callable[[], Group | None]], None]
        ) -> None:
            self.longest_s = 0.001 if prompt.index < 2 else 300.0
            super().submit(prompt, sampling, on_done)

    class Stopping(RememberingPolicy):
        def update(self, experience: Any, *, step: int) -> Metrics:
            os.kill(os.getpid(), signal.SIGTERM)
            return super().update(experience, step=step)

    engine, saved = Slow(), list[int]()
    with pytest.raises(Stopped), stops.handle_signals(60.0), stops.only_in_waits():
        run_ahead(
            ahead_config(1), engine, steps=4, policy=Stopping(engine), save=lambda step, state: saved.append(step)
        )
    assert saved == [1], "the step whose update had begun is finished"
    assert engine.under_way == {2, 3}


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("queue", [1, 2])
@pytest.mark.parametrize("killed_after", [1, 2, 3, 4])
def test_a_killed_run_trains_on_every_prompt_once_with_the_same_tokens(queue: int, killed_after: int) -> None:
    settings = ahead_config(queue)
    _, _, whole = run_ahead(settings, SlowEngine(), steps=6)
    states: list[Any] = []
    engine, notebook = SlowEngine(seed=1), Notebook()
    first = make_ahead(settings, engine, notebook)
    first.begin(last_step=6, num_prompts=1000, version=0)
    broken: list[list[Group]] = []

    def keep(step: int, groups: Sequence[Group]) -> Callable[[], Metrics]:
        broken.append(list(groups))
        return dict

    run(
        settings,
        RememberingPolicy(engine),
        steps=killed_after,
        notebook=notebook,
        rollouts=first,
        check_responses=keep,
        save=lambda step, state: states.append(json.dumps(first.state())),
    )
    first.close()
    resumed_engine, prompts = SlowEngine(seed=2), CountingPrompts()
    resumed_engine.version = killed_after
    second = make_ahead(settings, resumed_engine, notebook, prompts=prompts)
    second.load_state(json.loads(states[-1]))
    assert second.state()["position"] == 2 * killed_after
    second.begin(last_step=6, num_prompts=1000, version=killed_after)
    run(
        settings,
        RememberingPolicy(resumed_engine),
        steps=6,
        first_step=killed_after + 1,
        notebook=notebook,
        rollouts=second,
        check_responses=keep,
    )
    second.close()
    assert indices(broken) == indices(whole)
    assert versions(broken) == versions(whole)
    saved = {int(position) for position in json.loads(states[-1])["ahead"]["groups"]}
    again = [index for index in engine.submitted if index >= 2 * killed_after and index not in saved]
    assert resumed_engine.submitted[: len(again)] == again, "those under way are played again, and first"
    assert not saved & set(resumed_engine.submitted)


def test_a_checkpoint_of_a_longer_queue_does_not_train_on_what_is_too_old() -> None:
    engine = SlowEngine()
    first = make_ahead(ahead_config(3), engine, Notebook())
    first.begin(last_step=9, num_prompts=1000, version=0)
    first.published(0)
    first.take(2)
    first.settle()
    engine.version = 1
    first.published(1)
    first.settle()
    state = json.loads(json.dumps(first.state()))
    first.close()
    assert sorted(map(int, state["ahead"]["groups"])) == list(range(2, 10))
    engine = SlowEngine()
    engine.version = 1
    second = make_ahead(ahead_config(1), engine, Notebook())
    second.load_state(state)
    second.begin(last_step=9, num_prompts=1000, version=1)
    second.published(1)
    groups, _ = second.take(2)
    assert [v for group in groups for v in group.rollouts[0].versions] == [0, 0]
    second.settle()
    # 4 and 5 are of the step after, which holds version 2: version 0 would be 2 behind.
    assert engine.submitted == [4, 5]
    assert sorted(map(int, second.state()["ahead"]["groups"])) == [4, 5], "nor would those after them be new enough"
    second.close()


def resumed_with(before: RlConfig, after: RlConfig) -> tuple[list[int], list[list[int]], list[list[int]]]:
    """Resume after step 2 with other settings; return the positions that are sampled again or later, and the positions
    and versions that steps 3 to 6 train on."""
    engine = SlowEngine()
    first = make_ahead(before, engine, Notebook())
    states: list[str] = []
    first.begin(last_step=6, num_prompts=1000, version=0)
    run(
        before,
        RememberingPolicy(engine),
        steps=2,
        rollouts=first,
        save=lambda step, state: (first.settle(), states.append(json.dumps(first.state()))),
    )
    first.close()
    engine, trained = SlowEngine(), list[list[Group]]()
    engine.version = 2
    second = make_ahead(after, engine, Notebook())
    second.load_state(json.loads(states[-1]))
    second.begin(last_step=6, num_prompts=1000, version=2)

    def keep(step: int, groups: Sequence[Group]) -> Callable[[], Metrics]:
        trained.append(list(groups))
        return dict

    policy = RememberingPolicy(engine)
    run(after, policy, steps=6, first_step=3, rollouts=second, check_responses=keep)
    second.close()
    return engine.submitted, indices(trained), versions(trained)


def test_a_run_resumes_with_another_batch_size() -> None:
    larger = ahead_config(1, rollout={"batch_size": 4, "n_samples_per_prompt": 2, "max_new_tokens": 4})
    submitted, positions, ages = resumed_with(ahead_config(1), larger)
    assert positions == [list(range(start, start + 4)) for start in (4, 8, 12, 16)]
    # Before the run was killed, 4 and 5 were sampled at version 1, and 6 and 7 at version 2.
    assert submitted == list(range(8, 20))
    assert ages == [[1, 1, 2, 2], [2] * 4, [3] * 4, [4] * 4]


@pytest.mark.parametrize(
    "changed",
    [
        {"rollout": {"batch_size": 2, "n_samples_per_prompt": 4, "max_new_tokens": 4}},
        {"rollout": {"batch_size": 2, "n_samples_per_prompt": 2, "max_new_tokens": 4, "temperature": 0.5}},
        {"data": {"prompt_dataset": "toy", "max_image_pixels": 12_544}},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_groups_that_other_settings_sampled_are_sampled_again(changed: dict[str, Any]) -> None:
    settings = ahead_config(1)
    submitted, positions, _ = resumed_with(settings, ahead_config(1, **changed))
    assert submitted == list(range(4, 12)), "with 2 or 4 responses for each prompt, but not with both"
    assert positions == [[4, 5], [6, 7], [8, 9], [10, 11]]
    assert resumed_with(settings, settings)[0] == list(range(8, 12))


def test_a_synchronous_run_resumes_from_a_checkpoint_of_one_ahead_and_the_other_way_round() -> None:
    engine = SlowEngine()
    first = make_ahead(ahead_config(1), engine, Notebook())
    first.begin(last_step=9, num_prompts=1000, version=0)
    first.published(0)
    first.take(1)
    state = first.state()
    first.close()
    prompts = CountingPrompts()
    rewarder, notebook = LabelRewarder(), Notebook()
    in_turn = InTurn(config(), prompts=prompts, engine=engine, rewarder=rewarder, report=notebook)
    in_turn.load_state(state)
    assert [group.prompt.index for group in in_turn.take(2)[0]] == [1, 2]
    second = make_ahead(ahead_config(1), engine, Notebook())
    second.load_state(in_turn.state())
    second.begin(last_step=9, num_prompts=1000, version=0)
    second.published(0)
    assert [group.prompt.index for group in second.take(2)[0]] == [3, 4]
    second.close()


class Image:
    """An image that only its hash describes."""

    size = (28, 28)

    def __init__(self, name: str) -> None:
        self.hash = name

    def fetch(self) -> Pixels:
        raise AssertionError("pixels are not saved")


def test_a_saved_group_is_the_same_to_the_bit() -> None:
    row = replace(make_prompt(7), media=(Image("a"), Image("b")))
    first = replace(row, text="look", tokens=np.arange(4), request=np.arange(3), media=(row.media[1],), is_chat=True)
    first = replace(first, messages=(ChatMessage("user", ("look: ", row.media[1])),))
    one = replace(make_segment([[1, 2], [3, 4], [5], [6]], [0.25, 0.5], version=3), media=(row.media[1],))
    one = replace(one, logprobs=np.array([0, 0, -1 / 3, -np.pi, 0, -1e-20], dtype=np.float32))
    group = Group(
        first,
        (
            make_episode_rollout(one, make_segment([[9], [8]]), tool_calls=2, env_s=0.1, retried=("it hung",)),
            make_episode_rollout(make_segment([[1, 2]]), stop="failed", failure="infrastructure", problem="lost"),
        ),
    )
    assert can_save(group, row)
    again = decode(json.loads(json.dumps(encode(group))), row)
    assert again.prompt.text == "look"
    assert again.prompt.is_chat
    assert again.prompt.media == (row.media[1],)
    assert again.prompt.messages == first.messages
    assert again.prompt.index == 7
    assert again.prompt.label == "right"
    np.testing.assert_array_equal(again.prompt.request, np.arange(3))
    for before, after in zip(group.rollouts, again.rollouts, strict=True):
        assert (before.text, before.finish_reason, before.episode) == (after.text, after.finish_reason, after.episode)
        for old, new in zip(before.segments, after.segments, strict=True):
            for name in ("tokens", "sampled", "logprobs", "versions"):
                np.testing.assert_array_equal(getattr(old, name), getattr(new, name))
                assert getattr(old, name).dtype == getattr(new, name).dtype
            assert (old.turns, old.media) == (new.turns, new.media)


def test_images_of_an_environment_cannot_be_saved() -> None:
    row = replace(make_prompt(7), media=(Image("a"),))
    seen = make_segment([[1], [2], [3], [4]], media=(row.media[0], Image("of the environment")))
    assert not can_save(Group(row, (make_episode_rollout(seen),)), row)
