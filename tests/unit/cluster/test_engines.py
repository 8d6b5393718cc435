"""Choice of the engine: for responses the one with the least work, for their log-probs the one that generated them."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vlmrl.cluster import engines as engines_module
from vlmrl.cluster.engine_restarts import EngineRestarts
from vlmrl.cluster.engines import RemoteEngines
from vlmrl.cluster.remote_call import record_call
from vlmrl.errors import ClusterError, ConfigError, EngineLossError, SyncError
from vlmrl.system import stops
from vlmrl.types import Group, Prompt, Sampling

SAMPLING = Sampling(n=1, temperature=1.0, top_p=1.0, max_new_tokens=1, seed=0)


class Engines:
    """Three engines that record their calls."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int, int]] = []

    def __len__(self) -> int:
        return 3

    def call(self, function: Any) -> list[Any]:
        return [None] * len(self)

    def submit_to(self, engine: int, function: Any) -> Any:
        method, (item, *_), _ = record_call(function)
        index = item.prompt.index if method == "score" else item.index
        self.log.append((method, engine, index))
        return (method, index) if method == "respond" else []

    def wait(self, results: Any, timeout_s: float | None = None, **_: Any) -> Any:
        return results


def test_a_wait_for_responses_names_the_prompt_that_waits_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [([("respond", 0)], []), ([], [])]
    monkeypatch.setattr(engines_module, "ray", SimpleNamespace(wait=lambda refs, **kwargs: answers.pop(0)))
    engines = RemoteEngines(Engines(), timeout_s=1.0, sleeps=False)  # type: ignore[arg-type]
    prompts = [Prompt(i, f"toy:{i}", "?", tokens=np.arange(2), request=np.arange(2), label=None) for i in range(3)]
    with pytest.raises(ClusterError, match=r"within 1 s \(2 prompts in flight, the oldest: toy:1\): raise --vllm.gen"):
        engines.generate(prompts, SAMPLING)


def test_an_engine_scores_the_responses_that_it_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines_module, "ray", SimpleNamespace(wait=lambda refs, **kwargs: (refs[:1], [])))
    group = Engines()
    engines = RemoteEngines(group, timeout_s=1.0, sleeps=False)  # type: ignore[arg-type]
    prompts = [Prompt(i, f"row {i}", "?", tokens=np.arange(2), request=np.arange(2), label=None) for i in range(3)]
    engines.generate(prompts, SAMPLING)
    engines.score([Group(prompt, ()) for prompt in prompts[::-1]])
    generated = {index: engine for method, engine, index in group.log if method == "respond"}
    assert sorted(generated.values()) == [0, 1, 2]
    assert {index: engine for method, engine, index in group.log if method == "score"} == generated


def test_a_wait_for_scores_names_the_setting_of_its_limit() -> None:
    class Waits(Engines):
        def wait(self, results: Any, timeout_s: float | None = None, *, flag: str = "", **_: Any) -> Any:
            assert (timeout_s, flag) == (7.0, "--vllm.generate_timeout_s")
            return results

    engines = RemoteEngines(Waits(), timeout_s=7.0, sleeps=False)  # type: ignore[arg-type]
    prompt = Prompt(0, "toy:0", "?", tokens=np.arange(2), request=np.arange(2), label=None)
    assert engines.score([Group(prompt, ())]) == []
    assert engines.begin_scoring([Group(prompt, ())])() == []


@dataclass(eq=False)
class Call:
    """A call under way on an engine, which ends when the test says so."""

    engine: int
    item: Any
    ended: Future[None] = field(default_factory=Future)

    def future(self) -> Future[None]:
        return self.ended


class Background(Engines):
    """Engines that can die, whose calls end when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way: list[Call] = []
        self.lost: list[Call] = []
        self.aborted: list[Call] = []
        self.dead: set[int] = set()
        self.fails_to_start = 0

    def submit_to(self, engine: int, function: Any) -> Any:
        if record_call(function).method == "start":
            self.fails_to_start -= 1
            return "failed" if self.fails_to_start >= 0 else None
        super().submit_to(engine, function)
        _, _, index = self.log[-1]
        self.under_way.append(Call(engine, index))
        if engine in self.dead:
            self.kill(engine)
        return self.under_way[-1]

    def end(self, index: int) -> None:
        next(call for call in self.under_way if call.item == index and not call.ended.done()).ended.set_result(None)

    def kill(self, engine: int) -> None:
        """Let an engine die; its calls end."""
        self.dead.add(engine)
        for call in self.under_way:
            if call.engine == engine and not call.ended.done():
                self.lost.append(call)
                call.ended.set_result(None)

    def wait(self, results: Any, timeout_s: float | None = None, **_: Any) -> Any:
        if isinstance(results, Call) and results in self.aborted:
            raise SyncError("a bucket was lost")
        if isinstance(results, Call) and results in self.lost:
            raise ClusterError(f"vllm {results.engine} died")
        if isinstance(results, list):
            if "failed" in results:
                raise ClusterError("no memory is left")
            return [self.wait(result) for result in results]
        return f"group {results.item}" if isinstance(results, Call) else results

    def find_dead(self, check: Any) -> dict[int, str]:
        assert record_call(check).method == "check"
        return {engine: f"vllm {engine} died" for engine in self.dead}

    def replace(self, numbers: list[int], end: Any) -> None:
        assert record_call(end).method == "shutdown"
        self.dead -= set(numbers)


def prompt_of(index: int) -> Prompt:
    return Prompt(index, f"row {index}", "?", tokens=np.arange(2), request=np.arange(2), label=None)


def test_submitted_prompts_go_to_the_engine_with_the_fewest_in_flight() -> None:
    group = Background()
    engines = RemoteEngines(group, timeout_s=1.0, sleeps=False)  # type: ignore[arg-type]
    ended: list[Any] = []

    def submit(index: int) -> None:
        engines.submit(prompt_of(index), SAMPLING, ended.append)

    for index in range(4):
        submit(index)
    assert [engine for _, engine, _ in group.log] == [0, 1, 2, 0]
    group.end(1)
    submit(4)
    assert group.log[-1][1] == 1, "it has one in flight as long as its result is not read, and so has engine 2"
    assert [result() for result in ended] == ["group 1"]
    submit(5)
    submit(6)
    assert [engine for _, engine, _ in group.log[-2:]] == [1, 2]


class Story:
    """Three engines, prompts that were submitted to them, and what has come back."""

    def __init__(self, *, limit: int = 3, obstacle: str | None = None) -> None:
        self.group, self.said, self.ended = Background(), list[str](), list[Any]()
        restarts = EngineRestarts(self.group, limit=limit, obstacle=obstacle, say=self.said.append)  # type: ignore[arg-type]
        self.engines = RemoteEngines(self.group, timeout_s=1.0, sleeps=False, restarts=restarts)  # type: ignore[arg-type]

    def submit(self, *indices: int) -> None:
        for index in indices:
            self.engines.submit(prompt_of(index), SAMPLING, self.ended.append)

    def results(self) -> list[Any]:
        """Results of the calls that have ended; None for those that are sampled again."""
        ended, self.ended[:] = list(self.ended), []
        return [result() for result in ended]

    def wait_and_kill(self, refs: list[Call], **_: Any) -> tuple[list[Call], list[Call]]:
        """Take the place of `ray.wait`. Engine 1 dies once five calls have been made."""
        if len(self.group.under_way) == 5:
            self.group.kill(1)
        done = [call for call in refs if call in self.group.lost] or refs[:1]
        return done[:1], []

    @property
    def engine_of(self) -> dict[int, int]:
        """Prompt -> the engine that it was sent to last."""
        return {index: engine for _, engine, index in self.group.log}


def test_prompts_of_an_engine_that_dies_are_sampled_by_the_others_at_once() -> None:
    story = Story()
    story.submit(0, 1, 2, 3)
    story.group.kill(0)
    assert story.results() == [None, None]
    assert story.engines.needs_repair
    assert not story.engines.is_down
    assert {story.engine_of[0], story.engine_of[3]} == {1, 2}
    story.submit(4)
    assert story.engine_of[4] != 0, "it has died, and is not started again yet"
    synced: list[None] = []
    story.engines.resync = lambda: (story.engines.start_again(), synced.append(None), story.engines.have_weights())
    story.engines.repair()
    assert (story.said, len(synced)) == (["vllm 0 died; it is started again (1 of vllm.max_restarts 3)"], 1)
    assert not story.engines.needs_repair
    story.submit(5)
    assert story.engine_of[5] == 0
    for index in range(6):
        story.group.end(index)
    assert sorted(story.results()) == [f"group {index}" for index in range(6)]


def test_prompts_wait_when_all_engines_have_died_and_for_the_weights_when_they_are_started() -> None:
    story = Story()
    story.submit(0, 1, 2)
    for engine in range(3):
        story.group.kill(engine)
    assert story.results() == [None, None, None]
    assert story.engines.is_down
    sent = len(story.group.log)
    assert story.engines.start_again()
    story.submit(3)
    assert story.engines.is_down, "the engines have no weights"
    assert len(story.group.log) == sent
    story.engines.have_weights()
    assert sorted(index for _, _, index in story.group.log[sent:]) == [0, 1, 2, 3]
    assert story.engines.restarts.count == 3


def test_a_call_that_ends_after_its_engine_was_started_again_is_repeated() -> None:
    story = Story()
    story.submit(0, 1, 2)
    story.group.kill(1)
    story.engines.restarts.find_dead()
    story.engines.repair()
    assert story.results() == [None]
    story.group.end(1)
    assert story.results() == ["group 1"]


def test_an_error_of_a_living_engine_is_raised() -> None:
    story = Story()
    story.submit(0)
    story.group.lost.append(story.group.under_way[0])
    story.group.under_way[0].ended.set_result(None)
    with pytest.raises(ClusterError, match="vllm 0 died"):
        story.results()


def test_a_request_that_another_engines_death_ended_waits_for_its_restart() -> None:
    """The neighbours of an engine that relays buckets on its machine abort their requests when it dies."""
    story = Story()
    story.submit(0, 1, 2)
    story.group.aborted.append(story.group.under_way[1])
    story.group.end(1)
    with pytest.raises(SyncError, match="a bucket was lost"):
        story.results()
    story.submit(1)
    story.group.dead.add(0)
    story.group.aborted.append(story.group.under_way[-1])
    story.group.end(1)
    assert story.results() == [None]
    assert story.engines.is_down, "an update does not wait for it"
    story.engines.repair()
    assert not story.engines.is_down
    story.group.end(1)
    assert story.results() == ["group 1"]


def test_engines_are_not_started_again_while_the_run_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story()
    story.group.kill(0)
    story.engines.restarts.find_dead()
    monkeypatch.setattr(stops, "is_stopping", lambda: True)
    with pytest.raises(EngineLossError, match=r"^vllm 0 died; it is not started again, because the run is stopping$"):
        story.engines.repair()


def test_responses_of_a_step_are_sampled_again_if_their_engine_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story()

    monkeypatch.setattr(engines_module, "ray", SimpleNamespace(wait=story.wait_and_kill))
    groups = story.engines.generate([prompt_of(index) for index in range(5)], SAMPLING)
    assert groups == [f"group {index}" for index in range(5)]
    assert len(story.said) == 1
    # Both prompts of the dead engine, and no other.
    assert [index for _, _, index in story.group.log] == [0, 1, 2, 3, 4, 1, 4]


def test_scoring_is_repeated_if_an_engine_dies() -> None:
    story = Story()
    story.group.kill(2)
    assert story.engines.score([Group(prompt_of(index), ()) for index in range(3)]) == list("group 0group 1group 2")
    assert story.engines.restarts.count == 1


def test_scores_that_are_taken_later_are_lost_with_an_engine_and_do_not_start_it_again() -> None:
    """By then the policy may hold newer weights than the engines."""
    story = Story()
    groups = [Group(prompt_of(index), ()) for index in range(3)]
    assert story.engines.begin_scoring(groups)() == list("group 0group 1group 2")
    take = story.engines.begin_scoring(groups)
    story.group.kill(2)
    assert take() is None
    assert (story.engines.restarts.count, story.engines.needs_repair) == (0, True)
    assert story.engines.begin_scoring(groups)() is not None, "the next step starts it again first"
    assert story.engines.restarts.count == 1


def test_an_engine_that_hangs_while_it_scores_for_later_ends_the_run_after_its_step() -> None:
    story = Story()
    take = story.engines.begin_scoring([Group(prompt_of(0), ())])

    def hang(results: Any, timeout_s: float | None = None, *, flag: str = "") -> Any:
        raise ClusterError("vllm did not respond within 1 s")

    story.group.wait = hang  # type: ignore[method-assign]
    with pytest.raises(EngineLossError, match="did not respond within 1 s"):
        take()


def test_engines_are_started_again_as_often_as_the_limit_allows() -> None:
    story = Story(limit=3)
    for engine in (0, 1):
        story.group.kill(engine)
    story.engines.restarts.find_dead()
    story.engines.repair()
    assert story.engines.restarts.count == 2
    story.group.kill(0)
    story.group.fails_to_start = 1
    story.engines.restarts.find_dead()
    with pytest.raises(
        EngineLossError, match=r"^no memory is left; this came after 3 restarts \(vllm.max_restarts 3\)$"
    ):
        story.engines.repair()


def test_an_engine_on_the_trainers_gpu_is_not_started_again() -> None:
    story = Story(obstacle="the GPU is full")
    story.group.kill(0)
    story.engines.restarts.find_dead()
    with pytest.raises(EngineLossError, match=r"^vllm 0 died; the GPU is full$"):
        story.engines.repair()


def test_one_death_is_searched_for_once_however_many_requests_it_ends() -> None:
    story = Story()
    searches: list[None] = []
    find_dead = story.group.find_dead
    story.group.find_dead = lambda check: (searches.append(None), find_dead(check))[1]  # type: ignore[method-assign]
    story.submit(*range(9))
    story.group.kill(0)
    assert story.results() == [None] * 3
    assert len(searches) == 1


def test_requests_of_living_engines_that_get_a_new_base_are_sampled_again() -> None:
    story = Story()
    story.submit(0, 1, 2)
    story.group.kill(0)

    def resync() -> None:
        story.engines.start_again()
        story.engines.abandon_requests()
        story.submit(3)  # arrives while no engine has an adapter
        for call in story.group.under_way:  # the new base ends what was under way
            if not call.ended.done():
                story.group.lost.append(call)
                call.ended.set_result(None)
        story.engines.have_weights()

    story.engines.resync = resync
    story.engines.restarts.find_dead()
    sent = len(story.group.log)
    story.engines.repair()
    assert [index for _, _, index in story.group.log[sent:]] == [3], "only what came meanwhile was held"
    assert story.results() == [None, None, None]
    for index in range(4):
        story.group.end(index)
    assert sorted(story.results()) == [f"group {index}" for index in range(4)]


def test_a_step_goes_on_if_a_new_base_ends_the_responses_of_living_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story()

    def resync() -> None:
        story.engines.start_again()
        story.engines.abandon_requests()
        story.group.lost += [call for call in story.group.under_way if call not in story.group.lost]
        story.engines.have_weights()

    story.engines.resync = resync
    monkeypatch.setattr(engines_module, "ray", SimpleNamespace(wait=story.wait_and_kill))
    groups = story.engines.generate([prompt_of(index) for index in range(5)], SAMPLING)
    assert groups == [f"group {index}" for index in range(5)]
    assert [index for _, _, index in story.group.log] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]


def test_evaluations_do_not_sample_from_engines_that_a_failed_sync_left_behind() -> None:
    story = Story(limit=0)
    story.group.kill(1)
    story.engines.restarts.find_dead()
    with pytest.raises(EngineLossError, match="max_restarts 0"):
        story.engines.generate([prompt_of(0)], SAMPLING)
    assert story.group.log == []


def test_an_engine_that_dies_while_it_sleeps_is_started_again() -> None:
    story = Story()
    story.engines._sleeps = True
    story.engines._awake.clear()
    calls: list[str] = []

    def call(function: Any) -> list[Any]:
        calls.append(record_call(function).method)
        if story.group.dead:
            raise ClusterError("vllm 1 died")
        return [None] * 3

    story.group.call = call  # type: ignore[method-assign]
    story.group.dead = {1}
    assert story.engines.score([]) == []
    assert calls == ["wake", "wake", "sleep"]
    assert story.engines.restarts.count == 1


def test_any_error_of_a_start_counts_as_a_restart() -> None:
    story = Story(limit=2)
    wait = story.group.wait

    def fail(results: Any, timeout_s: float | None = None, **_: Any) -> Any:
        if isinstance(results, list) and "failed" in results:
            raise ConfigError("agent.py: there is no function run")
        return wait(results, timeout_s)

    story.group.wait, story.group.fails_to_start = fail, 9  # type: ignore[method-assign]
    story.group.kill(0)
    story.engines.restarts.find_dead()
    with pytest.raises(EngineLossError, match=r"there is no function run; this came after 2 restarts"):
        story.engines.repair()


def test_a_group_whose_images_were_lost_with_its_engine_is_sampled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    story, lost = Story(), list[str]()

    def keep(group: Any, prompt: Prompt) -> Any:
        if story.group.log[-1][1:] == (prompt.index % 3, prompt.index) and not lost:
            lost.append(group)
            story.group.dead.add(prompt.index % 3)  # it dies after it has responded
            raise RuntimeError("the owner of the object has died")
        return f"kept {group}"

    story.engines._keep = keep
    story.submit(0)
    story.group.end(0)
    assert story.results() == [None]
    assert story.engine_of[0] != 0
    story.group.under_way[-1].ended.set_result(None)
    assert story.results() == ["kept group 0"]
    lost.clear()
    story.engines.repair()
    monkeypatch.setattr(engines_module, "ray", SimpleNamespace(wait=lambda refs, **_: (refs[:1], [])))
    assert story.engines.generate([prompt_of(0)], SAMPLING) == ["kept group 0"]
    assert (lost, story.engines.restarts.count) == (["group 0"], 2)
