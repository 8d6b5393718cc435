"""The order in which both ends are called, and machines where it cannot work."""

from __future__ import annotations

from typing import Any

import pytest

from vlmrl.cluster.device_path import DevicePath, check_devices
from vlmrl.cluster.placement import Place
from vlmrl.cluster.session import Node, Session
from vlmrl.config.vllm import Vllm
from vlmrl.errors import ClusterError, ConfigError
from vlmrl.rollout.transfer import SENDERS

GPUS = Session((Node(id="n", num_cpus=8, num_gpus=4),))
CORES = Session((Node(id="n", num_cpus=8, num_gpus=0),))


class Group:
    """Workers that write down what they are asked."""

    def __init__(self, name: str, size: int, log: list[tuple[Any, ...]]) -> None:
        self.name, self.size, self.log = name, size, log

    def __len__(self) -> int:
        return self.size

    def address(self) -> tuple[str, int]:
        return "host", 5

    def submit(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        self.log.append((self.name, method, *args, kwargs))
        return [f"{self.name} {method}"] * self.size

    def submit_to(self, worker: int, method: str, *args: Any) -> Any:
        self.log.append((f"{self.name} {worker}", method, *args))
        return f"{self.name} {worker} {method}"

    def call(self, method: str, number: int) -> list[Any]:
        return [{"names": [str(number)], "ipc_handles": {f"gpu-{rank}": b""}} for rank in range(self.size)]

    def wait(self, refs: list[Any]) -> None:
        self.log.append(("wait", *refs))


def told(backend: str, *, num_buckets: int = 1) -> list[tuple[Any, ...]]:
    log: list[tuple[Any, ...]] = []
    engines, learner = Group("engine", 2, log), Group("learner", 2, log)
    path = DevicePath(engines, vllm(backend))  # type: ignore[arg-type]
    for number in range(num_buckets):
        path.open(learner)  # type: ignore[arg-type]
        path.send(number)
    return log


def vllm(backend: str) -> Vllm:
    return Vllm.model_validate({"sync_backend": backend, "tensor_parallel_size": 2})


def test_all_meet_before_anything_is_sent() -> None:
    world = {"master_address": "host", "master_port": 5, "world_size": 5, "packed": False}
    assert told("nccl")[:4] == [
        ("engine 0", "connect", world | {"rank_offset": 1}),
        ("engine 1", "connect", world | {"rank_offset": 3}),
        ("learner", "connect", SENDERS["nccl"], {"address": "host", "port": 5, "world_size": 5}),
        ("wait", "engine 0 connect", "engine 1 connect", "learner connect", "learner connect"),
    ]


def test_engines_receive_while_the_learner_sends_and_they_meet_once() -> None:
    log = told("ipc", num_buckets=2)
    assert sum(call[1] == "connect" for call in log) == 3
    received = [call for call in log if call[1] == "receive"]
    handles = {"gpu-0": b"", "gpu-1": b""}
    assert [call[2] for call in received] == [{"names": [n], "ipc_handles": handles} for n in ("0", "1")]
    assert log[-1] == ("wait", "engine receive", "engine receive", "learner send", "learner send")


def places(engines: list[int]) -> dict[str, list[Place]]:
    return {"actor": [Place(0, (0,)), Place(0, (1,))], "vllm": [Place(0, tuple(engines))]}


@pytest.mark.parametrize(("backend", "engines"), [("shm", [0]), ("nccl", [2, 3]), ("ipc", [0, 1])])
def test_places_that_can_work_pass(backend: str, engines: list[int]) -> None:
    check_devices(vllm(backend), GPUS, places(engines))


def test_shared_memory_needs_no_gpu() -> None:
    check_devices(Vllm(), CORES, {})


@pytest.mark.parametrize("backend", ["nccl", "ipc"])
def test_without_a_gpu_it_is_refused(backend: str) -> None:
    with pytest.raises(ConfigError, match=f"vllm.sync_backend {backend} moves weights between GPUs.* use shm"):
        check_devices(vllm(backend), CORES, places([0, 1]))


@pytest.mark.parametrize("engines", [[0], [1, 2], [0, 1, 2]])
def test_ipc_wants_an_engine_worker_on_each_rank_s_gpu_and_on_no_other(engines: list[int]) -> None:
    with pytest.raises(ClusterError, match="needs trainer and engines on the same GPUs"):
        check_devices(vllm("ipc"), GPUS, places(engines))


def test_nccl_wants_gpus_of_its_own_for_each_end() -> None:
    with pytest.raises(ClusterError, match="GPUs of their own"):
        check_devices(vllm("nccl"), GPUS, places([1, 2]))
