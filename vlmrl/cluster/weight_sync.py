"""Send the policy's weights to the engines, through shared memory or between GPUs, and verify that they arrived."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from vlmrl.cluster.engines import RemoteEngines
from vlmrl.cluster.sync_plan import SyncPlan
from vlmrl.cluster.worker_group import WorkerGroup
from vlmrl.errors import SyncError
from vlmrl.models.shared_memory import NUM_IN_FLIGHT
from vlmrl.rollout.gpu_transfer import IpcSender, NcclSender, init_infos, merge_offers
from vlmrl.rollout.reports import ReadbackPlan
from vlmrl.types import Metrics, Part

if TYPE_CHECKING:
    from vlmrl.learning.policy import Policy
    from vlmrl.learning.weights import MakeSender


class WeightSync:
    """Weight sync from the policy's ranks, which send, to the engines, which load.

    Weights are sent in buckets: through shared memory, or from GPU to GPU with `vllm.sync_backend` nccl or ipc. The
    trainer computes a fingerprint of what it sent, the engines of what they hold; a difference is an error. The
    engines' layers are read back according to the plan.
    """

    def __init__(self, policy: WorkerGroup[Policy], engines: RemoteEngines, plan: SyncPlan) -> None:
        self._policy = policy
        self._engines = engines
        self._workers = engines.group
        self._plan = plan
        self._is_first = True
        """Nothing has been sent yet to these engines."""
        self._is_connected = False
        """Both ends are connected for transfers from GPU to GPU."""
        self._version = 0
        engines.resync = lambda: self.sync(self._version)

    def sync(self, version: int) -> Metrics:
        """Send the current weights to all engines as `version`. Engines that have died are started again first, and get
        all that a new engine gets.

        Raises:
            SyncError: an engine does not hold what was sent.
            EngineLossError: engines have died too often.
        """
        by_device = self._plan.vllm.sync_backend != "shm"
        if by_device:  # a death during a transfer would block the trainer
            self._engines.restarts.find_dead()
        while True:
            if self._engines.start_again():
                self._is_first, self._is_connected = True, False
                if self._plan.base_goes_first:
                    self._engines.abandon_requests()
            try:
                metrics = self._sync(version)
            except Exception:
                if by_device or not self._engines.restarts.find_dead():
                    raise
                # Those that got their buckets from a dead one have ended what they had under way.
                self._engines.abandon_requests()
                continue
            self._version = version
            self._engines.have_weights()
            return metrics | {"cluster/engine_restarts": float(self._engines.restarts.count)}

    def _sync(self, version: int) -> Metrics:
        is_first, self._is_first = self._is_first, False
        parts = self._plan.parts(is_first=is_first)
        readback = self._plan.readback(version, is_first=is_first)
        sent = {part: self.send(part, version=version, readback=readback) for part in parts}
        metrics = {"sync/version": float(version), "sync/bytes": float(sum(sent.values()))}
        if readback is not None and parts != ["adapter"]:
            metrics |= self.readback()
        return metrics | ({"sync/adapter_bytes": float(sent["adapter"])} if "adapter" in sent else {})

    def send(self, part: Part, *, version: int, readback: ReadbackPlan | None) -> int:
        """Send one part of the model to all engines and verify it; returns the number of bytes sent.

        Adapters are small: they always go through main memory, and are always read back.

        Raises:
            SyncError: an engine does not hold what was sent.
        """
        is_adapter = part == "adapter"
        by_device = not is_adapter and self._plan.vllm.sync_backend != "shm"
        self._engines.prepare_for_weights()
        if by_device:
            self._connect()
        max_bytes, vision_changed = self._plan.vllm.bucket_bytes, self._plan.vision_changes
        num_buckets = self._policy.call(lambda policy: policy.begin_sync(max_bytes, part))[0]

        def begin() -> None:
            plan = None if is_adapter else readback
            self._workers.call(lambda engine: engine.begin_update(version, adapter=is_adapter, readback=plan))

        if by_device:
            self._between_devices(num_buckets, begin)
        else:
            self._through_memory(num_buckets, begin)
        expected, num_bytes = self._policy.call(lambda policy: policy.finish_sync())[0]
        held = self._workers.call(lambda engine: engine.finish_update(vision_changed=vision_changed))
        for engine, fingerprint in enumerate(held):
            if fingerprint != expected:
                raise SyncError(
                    f"engine {engine} holds {_OTHER[part]} than the trainer sent for version {version} "
                    f"(fingerprint {fingerprint[:12]}, sent {expected[:12]}): a tensor was lost or changed on the way"
                )
        return num_bytes

    def readback(self) -> Metrics:
        """Metrics of the read-back after the last update of the model: layers per engine, tensors that could not be
        read, and the seconds of the slowest worker.
        """
        by_engine = self._workers.call(lambda engine: engine.readback())
        reports = [report for reports in by_engine for report in reports]
        return {
            "sync/readback_layers": float(min((report["layers"] for report in reports), default=0)),
            "sync/readback_unread": float(max((len(report["unread"]) for report in reports), default=0)),
            "sync/readback_s": max((report["seconds"] for report in reports), default=0.0),
        }

    def _through_memory(self, num_buckets: int, begin: Callable[[], None]) -> None:
        """Send all buckets through shared memory, and to each other machine once through Ray's object store.

        `begin` prepares the engines. vLLM sleeps during 20 of its 26 ms, so the first buckets are packed meanwhile.
        Then `NUM_IN_FLIGHT` buckets are in flight: one is packed while another is loaded and a third waits.
        """
        ahead = min(NUM_IN_FLIGHT, num_buckets)
        shared = [self._share(number, 0) for number in range(ahead)]
        begin()
        loading = [self._load(tickets, number, 0) for number, tickets in enumerate(shared)]
        try:
            for number in range(num_buckets):
                self._policy.wait(shared[number])
                self._workers.wait(loading[number])
                if (later := number + ahead) < num_buckets:
                    shared.append(self._share(later, number + 1))
                    loading.append(self._load(shared[later], later, number + 1))
        except Exception:  # an engine has died: the next attempt must not meet what the others still load
            self._workers.finish([call for calls in loading for call in calls])
            raise

    def _share(self, number: int, num_loaded: int) -> list[Any]:
        """Let all ranks share bucket `number`; the result of rank 0 is the ticket."""
        return self._policy.submit(lambda policy: policy.share(number, num_loaded))

    def _load(self, tickets: list[Any], number: int, num_loaded: int) -> list[Any]:
        """Let all engines load bucket `number`, which the policy's rank 0 shares."""
        ticket_on = {self._policy.nodes[0]: tickets[0]}
        for engine, node in enumerate(self._workers.nodes):
            if node not in ticket_on:
                # The first engine of a machine receives for all of them.
                ticket_on[node] = self._relay(engine, tickets[0], number, num_loaded)
        tickets = [ticket_on[node] for node in self._workers.nodes]
        return self._workers.submit_each(lambda engine, ticket: engine.load(ticket), tickets)

    def _relay(self, engine: int, ticket: Any, number: int, num_loaded: int) -> Any:
        """Copy a shared bucket to the machine of this engine; returns the ticket there."""
        bucket: Any = self._policy.submit_to(0, lambda policy: policy.bucket(ticket))
        return self._workers.submit_to(engine, lambda role: role.relay(bucket, number, num_loaded))

    def _between_devices(self, num_buckets: int, begin: Callable[[], None]) -> None:
        """Send all buckets from GPU to GPU, one after the other."""
        begin()
        for number in range(num_buckets):
            self._send(number)

    def _send(self, number: int) -> None:
        offer = merge_offers(self._policy.call(lambda policy: policy.offer(number)))
        receiving = self._workers.submit(lambda engine: engine.receive(offer))
        # One wait for both: if one end fails, the other hangs in NCCL, and the failure must be raised.
        self._workers.wait([*receiving, *self._policy.submit(lambda policy: policy.send())])

    def _connect(self) -> None:
        """Connect ranks and engines, once. Each waits for the other."""
        if self._is_connected:
            return
        backend = self._plan.vllm.sync_backend
        assert backend != "shm"
        address, port = self._policy.address()
        infos = init_infos(
            backend,
            num_engines=len(self._workers),
            gpus_per_engine=self._plan.vllm.gpus_per_engine,
            address=address,
            port=port,
        )
        sender: MakeSender = IpcSender
        if backend == "nccl":
            sender = partial(NcclSender, address=address, port=port, world_size=infos[0]["world_size"])
        joining = self._workers.submit_each(lambda engine, info: engine.connect(info), infos)
        self._workers.wait([*joining, *self._policy.submit(lambda policy: policy.connect(sender))])
        self._is_connected = True


_OTHER: dict[Part, str] = {"whole": "other weights", "base": "another base", "adapter": "another adapter"}
