"""Calls on stopped workers are errors, and errors name the worker."""

from __future__ import annotations

import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import ray

from vlmrl.cluster import worker_group
from vlmrl.cluster.models import PackingPlan, PassMetrics, Ranks, RemotePolicy, StepPlan
from vlmrl.cluster.worker_deaths import Member, Roster
from vlmrl.cluster.worker_group import WorkerGroup, search_working_directory_last
from vlmrl.errors import ClusterError, DiedError
from vlmrl.parallel import run_parallel


@pytest.fixture
def stopped() -> WorkerGroup[Any]:
    """A group that the watch has stopped between two calls, because a machine has died."""
    group: WorkerGroup[Any] = WorkerGroup.__new__(WorkerGroup)
    group.name, group._timeout_s, group._workers, group._roster = "actor", 1.0, [], Roster()
    group.shutdown()
    return group


def test_saving_a_model_on_stopped_workers_is_an_error(stopped: WorkerGroup[Any], tmp_path: Path) -> None:
    ranks = Ranks(stopped, PackingPlan("packed", 1, None, lambda sample: 0, None), 1, PassMetrics())
    policy = RemotePolicy(ranks, StepPlan(1, 1, 0))
    with pytest.raises(ClusterError, match="the workers of actor have been stopped"):
        policy.save_model(tmp_path)
    with pytest.raises(ClusterError, match="the workers of actor have been stopped"):
        policy.save_checkpoint(tmp_path, {})


def test_all_calls_on_stopped_workers_are_errors(stopped: WorkerGroup[Any]) -> None:
    for call in (
        lambda: stopped.call(lambda policy: policy.table()),
        lambda: stopped.each(lambda policy, packs: policy.fit(packs), []),
        lambda: stopped.submit_to(0, lambda policy: policy.table()),
        stopped.address,
    ):
        with pytest.raises(ClusterError, match="have been stopped"):
            call()
    stopped.end(lambda engine: engine.shutdown())  # stopping them again is no error


def test_an_engine_whose_process_died_is_named_with_its_index_and_machine(
    stopped: WorkerGroup[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped._workers, stopped.pids, stopped._addresses = ["a", "b"], [11, 12], ["10.0.0.1", "10.0.0.2"]
    for number, worker in enumerate(stopped._workers):
        stopped._roster.add(worker, Member("vllm", number, 2, stopped._addresses[number], lambda: None))
    cause = DiedError("rollout engine vllm has died")
    traceback = "Traceback (most recent call last):\n  many lines\nDiedError: it has died"
    died = ray.exceptions.RayTaskError("call", traceback, cause, "title", 12, "10.0.0.2")

    def get(refs: object, timeout: float) -> None:
        raise died.as_instanceof_cause()

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(ClusterError, match=r"^vllm 1 of 2 on 10\.0\.0\.2: rollout engine vllm has died$"):
        stopped.wait([])


def test_a_worker_that_cannot_be_reached_is_asked_again_until_ray_knows_whether_it_died(
    stopped: WorkerGroup[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: dict[str, list[Exception | None]] = {
        "a": [None],
        "b": [
            ray.exceptions.ActorUnavailableError("not known yet", b"0" * 16),
            ray.exceptions.ActorDiedError(),
        ],
        "c": [ray.exceptions.ActorUnavailableError("not known yet", b"0" * 16), None],
    }
    stopped._workers = list(errors)
    monkeypatch.setattr(worker_group, "_start", lambda worker, call: worker)
    monkeypatch.setattr(ray, "wait", lambda refs, **kwargs: (refs, []))

    def get(ref: str) -> None:
        error = errors[ref].pop(0)
        if error is not None:
            raise error

    monkeypatch.setattr(ray, "get", get)
    assert list(stopped.find_dead(lambda engine: engine.check())) == [1]
    assert not any(errors.values())


def test_calls_of_two_threads_reach_all_workers_in_the_same_order(
    stopped: WorkerGroup[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repair of an engine sends weights while a check computes log-probs: both are collectives of the policy."""
    stopped._workers, stopped._starting = ["rank 0", "rank 1"], threading.Lock()
    started: dict[str, list[str]] = {"rank 0": [], "rank 1": []}

    def start(worker: str, call: Any) -> None:
        started[worker].append(call.method)
        time.sleep(0.02 if call.method == "share" else 0.001)

    monkeypatch.setattr(worker_group, "_start", start)
    for _ in range(5):
        run_parallel(
            lambda: stopped.submit(lambda policy: policy.share(0, 0)),
            lambda: stopped.submit_each(lambda policy, packs: policy.logprobs(packs), [[], []]),
        )
    assert started["rank 0"] == started["rank 1"]


def test_modules_in_the_working_directory_are_not_those_of_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("colorsys", "only_here"):
        (tmp_path / f"{name}.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    search_working_directory_last()
    found = [find_spec(name) for name in ("colorsys", "only_here")]
    assert [spec is not None and Path(str(spec.origin)).parent == tmp_path for spec in found] == [False, True]
