"""Order of the calls at both ends of a weight sync, and errors of engines with other weights."""

from __future__ import annotations

from typing import Any

import pytest

from vlmrl.cluster.engine_restarts import EngineRestarts
from vlmrl.cluster.remote_call import record_call
from vlmrl.cluster.sync_plan import SyncPlan
from vlmrl.cluster.weight_sync import WeightSync
from vlmrl.config.vllm import Vllm
from vlmrl.errors import ClusterError, EngineLossError, SyncError
from vlmrl.rollout.gpu_transfer import IpcSender, NcclSender

Log = list[tuple[Any, ...]]


class Workers:
    """A group of workers that records its calls, with `by engine 0` for a call on one worker.

    `results`: method -> result, or a list with the result of each worker.
    """

    def __init__(self, name: str, number: int, log: Log, *, nodes: list[int] | None = None, **results: Any) -> None:
        self.name, self.number, self.log, self.results = name, number, log, results
        self.nodes = nodes or [0] * number
        self.fatal: str | None = None
        """Method during which engine 1 dies."""
        self.dead: dict[int, str] = {}

    def __len__(self) -> int:
        return self.number

    def address(self) -> tuple[str, int]:
        return "host", 5

    def call(self, function: Any) -> list[Any]:
        method, args, kwargs = record_call(function)
        self.log.append((method, *args, *kwargs.values()))
        self._die_at(method)
        result = self.results.get(method, f"{self.name} {method}")
        return result if isinstance(result, list) else [result] * self.number

    submit = call

    def submit_to(self, worker: int, function: Any, *item: Any) -> Any:
        method, args, _ = record_call(function, *item)
        self.log.append((f"{method} by {self.name} {worker}", *args))
        self._die_at(method)
        return self.results.get(method, f"{self.name} {worker} {method}")

    def submit_each(self, function: Any, items: list[Any]) -> list[Any]:
        return [self.submit_to(worker, function, item) for worker, item in enumerate(items)]

    def _die_at(self, method: str) -> None:
        if method == self.fatal:
            self.fatal, self.dead = None, {1: "engine 1 died"}
            raise ClusterError("engine 1 died")

    def find_dead(self, check: Any) -> dict[int, str]:
        return self.dead

    def replace(self, numbers: list[int], end: Any) -> None:
        self.log.append(("replace", *numbers))
        self.dead = {}

    def wait(self, refs: Any) -> Any:
        if "connect" in str(refs) or "receive" in str(refs):
            self.log.append(("wait", *refs))
        return refs


class Engines:
    """The part of RemoteEngines that a sync uses."""

    def __init__(self, group: Workers, *, limit: int = 3) -> None:
        self.group = group
        self.resync: Any = None
        self.restarts = EngineRestarts(group, limit=limit, say=lambda line: None)  # type: ignore[arg-type]

    def start_again(self) -> bool:
        return self.restarts.start()

    def abandon_requests(self) -> None:
        self.group.log.append(("abandon",))

    def have_weights(self) -> None:
        self.restarts.have_weights()

    def prepare_for_weights(self) -> None:
        self.group.log.append(("prepare",))


def weight_sync(
    log: Log,
    *,
    part: str = "whole",
    base_goes_first: bool = False,
    held: list[str] | None = None,
    nodes: list[int] | None = None,
    num_buckets: int = 2,
    **vllm: Any,
) -> WeightSync:
    """A sync from two ranks to two engines, of 640 bytes with the fingerprint abc."""
    held = held or ["abc", "abc"]
    policy = Workers(
        *("rank", 2, log),
        begin_sync=num_buckets,
        share=["ticket", None],
        bucket="bytes",
        finish_sync=("abc", 640),
        offer=[{"names": ["a"], "ipc_handles": {f"gpu-{rank}": b""}} for rank in range(2)],
    )
    reports = [[{"layers": 24, "unread": [], "seconds": 0.5}], [{"layers": 23, "unread": ["b"], "seconds": 0.25}]]
    engines = Workers("engine", len(held), log, nodes=nodes, finish_update=held, relay="relayed", readback=reports)
    settings = Vllm.model_validate({"bucket_mib": 2.0, "tensor_parallel_size": 2} | vllm)
    plan = SyncPlan(part, base_goes_first, vision_changes=True, vllm=settings)  # type: ignore[arg-type]
    return WeightSync(policy, Engines(engines), plan)  # type: ignore[arg-type]


def calls(log: Log, *names: str) -> Log:
    return [call for call in log if call[0].startswith(names)]


def test_all_buckets_are_loaded_between_begin_and_finish_of_an_update() -> None:
    log: Log = []
    assert weight_sync(log, part="adapter").send("adapter", version=5, readback=None) == 640
    # The first buckets are packed while the engines prepare.
    begin = [("begin_sync", 2 * 2**20, "adapter"), ("share", 0, 0), ("share", 1, 0), ("begin_update", 5, True, None)]
    buckets = [("load by engine 0", "ticket"), ("load by engine 1", "ticket")] * 2
    assert log == [("prepare",), *begin, *buckets, ("finish_sync",), ("finish_update", True)]


def test_three_buckets_are_in_flight_and_memory_is_reused_when_all_engines_have_loaded_it() -> None:
    log: Log = []
    weight_sync(log, num_buckets=5).sync(1)
    assert calls(log, "share") == [
        *[("share", 0, 0), ("share", 1, 0), ("share", 2, 0), ("share", 3, 1), ("share", 4, 2)]
    ]
    assert len(calls(log, "load by engine 1")) == 5


def test_a_bucket_is_sent_to_another_machine_once_for_all_its_engines() -> None:
    log: Log = []
    weight_sync(log, held=["abc"] * 5, nodes=[1, 0, 1, 2, 1], num_buckets=1).sync(1)
    assert calls(log, "bucket", "relay", "load") == [
        *[("bucket by rank 0", "ticket"), ("relay by engine 0", "bytes", 0, 0)],
        *[("bucket by rank 0", "ticket"), ("relay by engine 3", "bytes", 0, 0)],
        *[("load by engine 0", "relayed"), ("load by engine 1", "ticket"), ("load by engine 2", "relayed")],
        *[("load by engine 3", "relayed"), ("load by engine 4", "relayed")],
    ]


def test_on_one_machine_nothing_goes_through_the_object_store() -> None:
    log: Log = []
    weight_sync(log, held=["abc"] * 3, num_buckets=7).sync(1)
    assert not calls(log, "bucket", "relay")


def test_the_base_is_sent_once_and_the_adapter_each_time() -> None:
    log: Log = []
    both = weight_sync(log, part="adapter", base_goes_first=True)
    first, second = both.sync(3), both.sync(4)
    assert [call[2] for call in calls(log, "begin_sync")] == ["base", "adapter", "adapter"]
    readback = {"sync/readback_layers": 23.0, "sync/readback_unread": 1.0, "sync/readback_s": 0.5}
    restarts = {"cluster/engine_restarts": 0.0}
    assert first == {"sync/version": 3.0, "sync/bytes": 1280.0, "sync/adapter_bytes": 640.0} | readback | restarts
    assert second == {"sync/version": 4.0, "sync/bytes": 640.0, "sync/adapter_bytes": 640.0} | restarts
    # Engines always read an adapter back, without a plan.
    plans = [call[3] for call in calls(log, "begin_update")]
    assert plans == [{"seed": 3, "is_full": True}, None, None]


@pytest.mark.parametrize("fatal", ["begin_update", "load", "finish_update", "readback"])
def test_an_engine_that_dies_during_a_sync_is_started_again_and_gets_all_that_a_new_one_gets(fatal: str) -> None:
    log: Log = []
    sync = weight_sync(log, part="whole" if fatal == "readback" else "adapter", base_goes_first=fatal != "readback")
    sync.sync(1)
    log.clear()
    sync._workers.fatal = fatal  # type: ignore[attr-defined]
    metrics = sync.sync(2)
    assert metrics["cluster/engine_restarts"] == 1
    assert not sync._engines.restarts.is_needed
    assert [call for call in log if call[0] == "replace"] == [("replace", 1)]
    after = log[log.index(("replace", 1)) :]
    assert log[log.index(("replace", 1)) - 1] == ("abandon",), "others may have ended what they had under way"
    assert ("start by engine 1",) in after
    # A new base ends what the engines that live have under way.
    before_it = [call[0] for call in after[: after.index(calls(after, "begin_update")[0])]]
    assert ("abandon" in before_it) is (fatal != "readback")
    expected = ["whole"] if fatal == "readback" else ["base", "adapter"]
    assert [call[2] for call in calls(after, "begin_sync")] == expected
    assert next(call[3] for call in calls(after, "begin_update")) == {"seed": 2, "is_full": True}
    log.clear()
    sync._engines.resync()  # type: ignore[misc]
    assert [call[1] for call in calls(log, "begin_update")] == [2], "the version of the last sync"


def test_engines_that_die_too_often_during_syncs_end_the_run() -> None:
    sync = weight_sync([])
    sync._engines.restarts._limit = 0
    sync._workers.fatal = "load"  # type: ignore[attr-defined]
    with pytest.raises(EngineLossError, match=r"engine 1 died; .*max_restarts 0"):
        sync.sync(1)


def test_a_death_during_a_transfer_over_nccl_ends_the_run_and_one_before_it_does_not() -> None:
    log: Log = []
    sync = weight_sync(log, sync_backend="nccl")
    sync.sync(1)
    sync._workers.dead = {0: "engine 0 died"}  # type: ignore[attr-defined]
    assert sync.sync(2)["cluster/engine_restarts"] == 1
    assert len(calls(log, "connect by engine 0")) == 2, "with the new process"
    sync._workers.fatal = "receive"  # type: ignore[attr-defined]
    with pytest.raises(ClusterError, match=r"^engine 1 died$"):
        sync.sync(3)


def test_all_layers_are_read_back_at_first_and_then_according_to_the_plan() -> None:
    log: Log = []
    whole = weight_sync(log, readback_steps=4)
    for version in (6, 7, 8):
        assert whole.sync(version)["sync/readback_layers"] == 23
    assert [call[3]["is_full"] for call in calls(log, "begin_update")] == [True, False, True]


def test_without_a_plan_nothing_is_read_back() -> None:
    for sync in (weight_sync([], part="adapter"), weight_sync([], readback_steps=-1)):
        assert "sync/readback_layers" not in sync.sync(1)


def test_ranks_and_engines_connect_once_before_anything_is_sent_over_nccl() -> None:
    log: Log = []
    nccl = weight_sync(log, num_buckets=1, sync_backend="nccl")
    nccl.sync(1)
    nccl.sync(2)
    world = {"master_address": "host", "master_port": 5, "world_size": 5, "packed": False}
    _, first, second, third, wait, *rest = log
    assert (first, second) == (
        ("connect by engine 0", world | {"rank_offset": 1}),
        ("connect by engine 1", world | {"rank_offset": 3}),
    )
    assert third[0] == "connect"
    assert (third[1].func, third[1].keywords) == (NcclSender, {"address": "host", "port": 5, "world_size": 5})
    assert wait == ("wait", "engine 0 connect", "engine 1 connect", "rank connect", "rank connect")
    assert rest[0] == ("begin_sync", 2 * 2**20, "whole")
    assert not calls(rest, "connect")


def test_engines_receive_while_the_ranks_send_from_gpu_to_gpu() -> None:
    log: Log = []
    weight_sync(log, sync_backend="ipc").sync(1)
    assert calls(log, "connect")[-1] == ("connect", IpcSender)
    offer = {"names": ["a"], "ipc_handles": {"gpu-0": b"", "gpu-1": b""}}
    waited = ("wait", "engine receive", "engine receive", "rank send", "rank send")
    steps = log[[call[0] for call in log].index("begin_update") + 1 :]
    assert steps[:8] == [step for n in (0, 1) for step in (("offer", n), ("receive", offer), ("send",), waited)]
    assert steps[8] == ("finish_sync",)
    assert not calls(log, "share")


def test_adapters_go_through_main_memory_even_if_weights_do_not() -> None:
    log: Log = []
    weight_sync(log, part="adapter", sync_backend="nccl").sync(1)
    assert not calls(log, "connect", "offer")
    assert calls(log, "share") == [("share", 0, 0), ("share", 1, 0)]


@pytest.mark.parametrize(
    ("part", "content"), [("adapter", "another adapter"), ("base", "another base"), ("whole", "other weights")]
)
def test_an_engine_that_does_not_hold_what_was_sent_ends_the_run(part: str, content: str) -> None:
    different = weight_sync([], held=["abc", "abd"])
    with pytest.raises(SyncError, match=rf"engine 1 holds {content} than .* for version 5 \(fingerprint abd, sent abc"):
        different.send(part, version=5, readback=None)  # type: ignore[arg-type]
