"""The driver's part in publishing weights from GPU to GPU: who meets whom, and who sends while who receives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlmrl.cluster.placement import Place
from vlmrl.cluster.session import Session
from vlmrl.cluster.worker_group import WorkerGroup
from vlmrl.config.vllm import Vllm
from vlmrl.errors import ClusterError, ConfigError
from vlmrl.rollout.transfer import SENDERS, init_infos, merged


class DevicePath:
    """From one learner to all engines. It is opened with the first publish."""

    def __init__(self, engines: WorkerGroup, vllm: Vllm) -> None:
        assert vllm.sync_backend != "shm"
        self._engines = engines
        self._backend = vllm.sync_backend
        self._tensor_parallel_size = vllm.tensor_parallel_size
        self._learner: WorkerGroup | None = None

    def open(self, learner: WorkerGroup) -> None:
        """Let both ends meet, once: each waits for the other."""
        if self._learner is learner:
            return
        address, port = learner.address()
        infos = init_infos(
            self._backend,
            num_engines=len(self._engines),
            tensor_parallel_size=self._tensor_parallel_size,
            address=address,
            port=port,
        )
        settings: dict[str, Any] = {}
        if self._backend == "nccl":
            settings = {"address": address, "port": port, "world_size": infos[0]["world_size"]}
        joining = [self._engines.submit_to(number, "connect", info) for number, info in enumerate(infos)]
        self._engines.wait([*joining, *learner.submit("connect", SENDERS[self._backend], **settings)])
        self._learner = learner

    def send(self, number: int) -> None:
        """Bring bucket `number` to every engine."""
        assert self._learner is not None
        offer = merged(self._learner.call("offer", number))
        receiving = self._engines.submit("receive", offer)
        # Waited for together: when one end fails the other hangs in NCCL, and the failure must be heard.
        self._engines.wait([*receiving, *self._learner.submit("send")])


def check_devices(vllm: Vllm, machines: Session, places: Mapping[str, Sequence[Place]]) -> None:
    """Whether `vllm.sync_backend` can work on these machines.

    Raises:
        ConfigError: there is no GPU.
        ClusterError: the GPUs of trainer and engines are not the same for ipc, or not others for nccl.
    """
    if vllm.sync_backend == "shm":
        return
    if not machines.has_gpus:
        raise ConfigError(
            f"vllm.sync_backend {vllm.sync_backend} moves weights between GPUs, and there is none here: use shm"
        )
    trainer, engines = ({(place.node, s) for place in places[role] for s in place.slots} for role in ("actor", "vllm"))
    if vllm.sync_backend == "ipc" and trainer != engines:
        raise ClusterError(
            f"vllm.sync_backend ipc needs trainer and engines on the same GPUs, and they have {len(trainer)} and "
            f"{len(engines)} with {len(trainer & engines)} in common: make actor.num_nodes x actor.num_gpus_per_node "
            "equal vllm.num_engines x vllm.tensor_parallel_size"
        )
    if vllm.sync_backend == "nccl" and trainer & engines:
        raise ClusterError(
            "vllm.sync_backend nccl needs GPUs of their own for trainer and engines: use ipc with train.colocate_all"
        )
