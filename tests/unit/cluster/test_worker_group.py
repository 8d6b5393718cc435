"""Workers that have been ended are no workers that have nothing to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

from vlmrl.cluster.deaths import Member, Roster
from vlmrl.cluster.models import PackingPlan, PassMetrics, Ranks, RemotePolicy, Steps
from vlmrl.cluster.worker_group import WorkerGroup
from vlmrl.errors import ClusterError, DiedError


@pytest.fixture
def ended() -> WorkerGroup[Any]:
    """Ended by the watch, since a machine has died, while the driver was between two calls."""
    group: WorkerGroup[Any] = WorkerGroup.__new__(WorkerGroup)
    group.name, group._timeout_s, group._workers, group._roster = "actor", 1.0, [], Roster()
    group.shutdown()
    return group


def test_a_model_is_never_told_to_be_saved_by_workers_that_are_gone(ended: WorkerGroup[Any], tmp_path: Path) -> None:
    ranks = Ranks(ended, PackingPlan("packed", 1, None, lambda sample: 0, None), 1, PassMetrics())
    policy = RemotePolicy(ranks, Steps(1, 1, 0))
    with pytest.raises(ClusterError, match="the workers of actor have been ended"):
        policy.save_model(tmp_path)
    with pytest.raises(ClusterError, match="the workers of actor have been ended"):
        policy.save_checkpoint(tmp_path, {})


def test_who_asks_ended_workers_is_told_so(ended: WorkerGroup[Any]) -> None:
    for ask in (
        lambda: ended.call(lambda policy: policy.table()),
        lambda: ended.each(lambda policy, packs: policy.fit(packs), []),
        lambda: ended.submit_to(0, lambda policy: policy.table()),
        ended.address,
    ):
        with pytest.raises(ClusterError, match="have been ended"):
            ask()
    ended.end(lambda engine: engine.shutdown())  # ending them again is no error


def test_an_engine_whose_process_died_is_named_with_its_rank_and_machine(
    ended: WorkerGroup[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended._workers, ended.pids, ended._addresses = ["a", "b"], [11, 12], ["10.0.0.1", "10.0.0.2"]
    for number, worker in enumerate(ended._workers):
        ended._roster.add(worker, Member("vllm", number, 2, ended._addresses[number], lambda: None))
    cause = DiedError("rollout engine vllm has died")
    traceback = "Traceback (most recent call last):\n  many lines\nDiedError: it has died"
    died = ray.exceptions.RayTaskError("call", traceback, cause, "title", 12, "10.0.0.2")

    def get(refs: object, timeout: float) -> None:
        raise died.as_instanceof_cause()

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(ClusterError, match=r"^vllm 1 of 2 on 10\.0\.0\.2: rollout engine vllm has died$"):
        ended.wait([])
