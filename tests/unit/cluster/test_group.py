"""Workers that have been ended are no workers that have nothing to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmrl.cluster.deaths import Roster
from vlmrl.cluster.group import WorkerGroup
from vlmrl.cluster.learners import Cut, Ranks, RemotePolicy, Steps, Tally
from vlmrl.cluster.publish import Publication
from vlmrl.errors import ClusterError


@pytest.fixture
def ended() -> WorkerGroup:
    """Ended by the watch, since a machine has died, while the driver was between two calls."""
    group = WorkerGroup.__new__(WorkerGroup)
    group.name, group._timeout_s, group._workers, group._roster = "actor", 1.0, [], Roster()
    group.shutdown()
    return group


def test_a_model_is_never_told_to_be_saved_by_workers_that_are_gone(ended: WorkerGroup, tmp_path: Path) -> None:
    ranks = Ranks(ended, Cut("packed", 1, None, lambda sample: 0, None), 1, Tally())
    policy = RemotePolicy(ranks, Steps(1, 1, 0), Publication("whole", False, 1, False, -1))
    with pytest.raises(ClusterError, match="the workers of actor have been ended"):
        policy.save_model(tmp_path)
    with pytest.raises(ClusterError, match="the workers of actor have been ended"):
        policy.save_checkpoint(tmp_path, {})


def test_who_asks_ended_workers_is_told_so(ended: WorkerGroup) -> None:
    for ask in (
        lambda: ended.call("publish"),
        lambda: ended.each("update", []),
        lambda: ended.submit_to(0, "fit"),
        ended.address,
    ):
        with pytest.raises(ClusterError, match="have been ended"):
            ask()
    ended.end("shutdown")  # ending them again is no error
