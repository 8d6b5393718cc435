import pytest

from vlmrl import machine
from vlmrl.cluster.session import Node, Session, session, worker_environment
from vlmrl.errors import ClusterError
from vlmrl.machine import Finding


def test_ray_is_not_started_without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = Finding("shared memory", ok=False, essential=True, detail="none", mend="get some")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(machine, "shared_memory", lambda: lacking)
    with pytest.raises(ClusterError, match=r"^shared memory: none: get some$"), session():
        pytest.fail("it has begun")


def test_slots_are_gpus_where_there_are_any() -> None:
    mixed = Session((Node("a", num_cpus=16, num_gpus=2), Node("b", num_cpus=8, num_gpus=0)))
    assert (mixed.slots, mixed.unit) == ([2, 0], "GPU")
    plain = Session((Node("a", num_cpus=2, num_gpus=0),))
    assert (plain.slots, plain.unit) == ([2], "CPU core")


def test_the_workers_of_a_role_share_the_cores_of_their_node() -> None:
    machines = Session((Node("a", num_cpus=8, num_gpus=0),))
    assert worker_environment(machines, num_workers=2, slots=[0], node=0)["OMP_NUM_THREADS"] == "4"
    assert "CUDA_VISIBLE_DEVICES" not in worker_environment(machines, num_workers=2, slots=[0], node=0)


def test_a_worker_sees_its_own_gpus_only() -> None:
    machines = Session((Node("a", num_cpus=8, num_gpus=4),))
    assert worker_environment(machines, num_workers=1, slots=[2, 3], node=0)["CUDA_VISIBLE_DEVICES"] == "2,3"
