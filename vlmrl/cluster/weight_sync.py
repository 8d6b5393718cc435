"""Brings the policy's weights to the engines, through shared memory or between GPUs, and proves that they arrived."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from vlmrl.cluster.engines import RemoteEngines
from vlmrl.cluster.sync_plan import SyncPlan
from vlmrl.cluster.worker_group import WorkerGroup
from vlmrl.errors import SyncError
from vlmrl.models.transfer import NUM_UNDER_WAY
from vlmrl.rollout.reports import ReadbackPlan
from vlmrl.rollout.transfer import IpcSender, NcclSender, init_infos, merge_offers
from vlmrl.types import Metrics, Part

if TYPE_CHECKING:
    from vlmrl.learning.policy import Policy
    from vlmrl.learning.weights import MakeSender


class WeightSync:
    """The one object that knows both ends: the policy's ranks, which send, and the engines, which load.

    Weights go in buckets: through memory that the processes of a machine share, or from GPU to GPU with
    `vllm.sync_backend` nccl or ipc. Both ends compute a fingerprint of what they sent and hold; a difference is an
    error. The engines' layers are read back as the plan says.
    """

    def __init__(self, policy: WorkerGroup[Policy], engines: RemoteEngines, plan: SyncPlan) -> None:
        self._policy = policy
        self._engines = engines
        self._workers = engines.group
        self._plan = plan
        self._is_first = True
        """The engines have just started: nothing has been sent yet."""
        self._have_met = False
        """Both ends have joined, so that weights can go from GPU to GPU."""

    def sync(self, version: int) -> Metrics:
        """Bring the current weights to all engines as `version`.

        Raises:
            SyncError: an engine holds something else than what was sent.
        """
        is_first, self._is_first = self._is_first, False
        parts = self._plan.parts(is_first=is_first)
        readback = self._plan.readback(version, is_first=is_first)
        sent = {part: self.send(part, version=version, readback=readback) for part in parts}
        metrics = {"sync/version": float(version), "sync/bytes": float(sum(sent.values()))}
        if readback is not None and parts != ["adapter"]:
            metrics |= self.readback()
        return metrics | ({"sync/adapter_bytes": float(sent["adapter"])} if "adapter" in sent else {})

    def send(self, part: Part, *, version: int, readback: ReadbackPlan | None) -> int:
        """Bring one part of the model to all engines, with proof; returns the bytes that were sent.

        Adapters are small: they always go through main memory, and are read back whatever `readback` says.

        Raises:
            SyncError: an engine holds something else than what was sent.
        """
        is_adapter = part == "adapter"
        by_device = not is_adapter and self._plan.vllm.sync_backend != "shm"
        self._engines.prepare_for_weights()
        if by_device:
            self._meet()
        max_bytes, vision_changed = self._plan.vllm.bucket_bytes, self._plan.vision_changes
        num_buckets = self._policy.call(lambda policy: policy.begin_sync(max_bytes, part))[0]
        read = None if is_adapter else readback

        def begin() -> None:
            self._workers.call(lambda engine: engine.begin_update(version, adapter=is_adapter, readback=read))

        if by_device:
            self._between_devices(num_buckets, begin)
        else:
            self._through_memory(num_buckets, begin)
        wanted, num_bytes = self._policy.call(lambda policy: policy.finish_sync())[0]
        held = self._workers.call(lambda engine: engine.finish_update(vision_changed=vision_changed))
        for engine, fingerprint in enumerate(held):
            if fingerprint != wanted:
                raise SyncError(
                    f"engine {engine} holds {_OTHER[part]} than the trainer sent for version {version} "
                    f"(fingerprint {fingerprint[:12]}, sent {wanted[:12]}): a tensor was lost or changed on the way"
                )
        return num_bytes

    def readback(self) -> Metrics:
        """What the engines read back from their layers after the last update of the model: the number of layers of
        each, the tensors that could not be read, and the seconds of the slowest worker.
        """
        by_engine = self._workers.call(lambda engine: engine.readback())
        reports = [report for reports in by_engine for report in reports]
        return {
            "sync/readback_layers": float(min((report["layers"] for report in reports), default=0)),
            "sync/readback_unread": float(max((len(report["unread"]) for report in reports), default=0)),
            "sync/readback_s": max((report["seconds"] for report in reports), default=0.0),
        }

    def _through_memory(self, num_buckets: int, begin: Callable[[], None]) -> None:
        """Bring all buckets to all engines through memory that the processes of a machine share, and to other machines
        through Ray's object store, to each of them once.

        `begin` makes the engines ready, in which vLLM sleeps 20 ms of 26: the first buckets are packed meanwhile. Later
        on `NUM_UNDER_WAY` of them are on their way: one is packed while another is loaded and a third waits.
        """
        ahead = min(NUM_UNDER_WAY, num_buckets)
        shared = [self._share(number, 0) for number in range(ahead)]
        begin()
        loading = [self._load(tickets, number, 0) for number, tickets in enumerate(shared)]
        for number in range(num_buckets):
            self._policy.wait(shared[number])
            self._workers.wait(loading[number])
            if (later := number + ahead) < num_buckets:
                shared.append(self._share(later, number + 1))
                loading.append(self._load(shared[later], later, number + 1))

    def _share(self, number: int, num_loaded: int) -> list[Any]:
        """Let every rank share bucket `number`; rank 0's result is the ticket."""
        return self._policy.submit(lambda policy: policy.share(number, num_loaded))

    def _load(self, tickets: list[Any], number: int, num_loaded: int) -> list[Any]:
        """Let every engine load bucket `number`, which the policy's rank 0 shares."""
        ticket_on = {self._policy.nodes[0]: tickets[0]}
        for engine, node in enumerate(self._workers.nodes):
            if node not in ticket_on:
                # The first engine of a machine receives for all of them.
                ticket_on[node] = self._relay(engine, tickets[0], number, num_loaded)
        tickets = [ticket_on[node] for node in self._workers.nodes]
        return self._workers.submit_each(lambda engine, ticket: engine.load(ticket), tickets)

    def _relay(self, engine: int, ticket: Any, number: int, num_loaded: int) -> Any:
        """Bring a shared bucket to the machine of this engine; returns the ticket there."""
        bucket: Any = self._policy.submit_to(0, lambda policy: policy.bucket(ticket))
        return self._workers.submit_to(engine, lambda role: role.relay(bucket, number, num_loaded))

    def _between_devices(self, num_buckets: int, begin: Callable[[], None]) -> None:
        """Bring all buckets to all engines from GPU to GPU, one after the other."""
        begin()
        for number in range(num_buckets):
            self._send(number)

    def _send(self, number: int) -> None:
        offer = merge_offers(self._policy.call(lambda policy: policy.offer(number)))
        receiving = self._workers.submit(lambda engine: engine.receive(offer))
        # Waited for together: when one end fails the other hangs in NCCL, and the failure must be heard.
        self._workers.wait([*receiving, *self._policy.submit(lambda policy: policy.send())])

    def _meet(self) -> None:
        """Let ranks and engines join, once: each waits for the other."""
        if self._have_met:
            return
        backend = self._plan.vllm.sync_backend
        assert backend != "shm"
        address, port = self._policy.address()
        infos = init_infos(
            backend,
            num_engines=len(self._workers),
            tensor_parallel_size=self._plan.vllm.tensor_parallel_size,
            address=address,
            port=port,
        )
        sender: MakeSender = IpcSender
        if backend == "nccl":
            sender = partial(NcclSender, address=address, port=port, world_size=infos[0]["world_size"])
        joining = self._workers.submit_each(lambda engine, info: engine.connect(info), infos)
        self._workers.wait([*joining, *self._policy.submit(lambda policy: policy.connect(sender))])
        self._have_met = True


_OTHER: dict[Part, str] = {"whole": "other weights", "base": "another base", "adapter": "another adapter"}
