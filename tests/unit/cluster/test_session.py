from pathlib import Path

import pytest

from vlmrl.cluster.session import Node, Session, check_shared_memory, worker_environment
from vlmrl.errors import ClusterError


def test_missing_shared_memory_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"nowhere is not there.*--shm-size"):
        check_shared_memory(tmp_path / "nowhere")


def test_too_little_shared_memory_is_one_line_that_says_how_much_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"MiB of shared memory are free .*at least 1099511627776 MiB are needed"):
        check_shared_memory(tmp_path, least=2**60)
    check_shared_memory(tmp_path, least=1)


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
