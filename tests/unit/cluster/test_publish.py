"""What the engines get at a publish, by which way, and what becomes of it when they hold something else."""

from __future__ import annotations

from typing import Any

import pytest

from vlmrl.cluster.publish import Publication, check_publication, described, publication, send, why_merged
from vlmrl.config.ds import Ds
from vlmrl.config.lora import Lora
from vlmrl.config.vllm import Vllm
from vlmrl.errors import ConfigError, SyncError
from vlmrl.models.adapter_plan import AdapterPlan

LAYER = "model.layers.0.self_attn.q_proj"
QLORA = Ds(load_in_4bit=True, lora=Lora(rank=8))


def plan(*groups: str, rank: int = 8, dora: bool = False) -> AdapterPlan:
    return AdapterPlan(
        rank=rank,
        alpha=16.0,
        dropout=0.0,
        is_rank_stabilized=False,
        has_magnitude=dora,
        targets=(LAYER,),
        groups=frozenset(groups or ("language",)),  # type: ignore[arg-type]
    )


def made(adapter: AdapterPlan | None, ds: Ds, base: str = "dequantized", **vllm: Any) -> Publication:
    return publication(adapter, ds=ds, vllm=Vllm(qlora_base=base, bucket_mib=2.0, **vllm), vision_trains=False)


class Workers:
    """A group of workers that notes what it is asked; answers come from a table."""

    def __init__(self, number: int, log: list[tuple[Any, ...]], *, nodes: list[int] | None = None, **answers: Any):
        self.number, self.log, self.answers = number, log, answers
        self.nodes = nodes or [0] * number

    def __len__(self) -> int:
        return self.number

    def call(self, method: str, *given: Any, **how: Any) -> list[Any]:
        self.log.append((method, *given, *how.values()))
        answer = self.answers.get(method)
        return answer if isinstance(answer, list) else [answer] * self.number

    submit = call

    def submit_to(self, worker: int, method: str, *given: Any) -> Any:
        self.log.append((f"{method} by {worker}", *given))
        return self.answers.get(method)

    def wait(self, answers: Any) -> Any:
        return answers


class Way:
    """From GPU to GPU."""

    def __init__(self, log: list[tuple[Any, ...]]) -> None:
        self.log = log

    def open(self, learner: Any) -> None:
        self.log.append(("open",))

    def send(self, number: int) -> None:
        self.log.append(("by device", number))


class Engines:
    """Takes what is sent: a byte for an adapter, a hundred for a base, two hundred for a model."""

    def __init__(self) -> None:
        self.got: list[tuple[str, int, bool]] = []
        self.plans: list[Any] = []

    def readback(self) -> dict[str, float]:
        return {"sync/readback_layers": 24.0}

    def load(
        self, learner: Any, *, version: int, max_bytes: int, vision_changed: bool, part: str, readback: Any
    ) -> int:
        assert max_bytes == 2 * 2**20
        self.got.append((part, version, vision_changed))
        self.plans.append(readback)
        return {"adapter": 1, "base": 100, "whole": 200}[part]


def test_adapters_travel_alone_and_4_bits_written_out_go_before_the_first() -> None:
    how, engines, learner = made(plan(), QLORA), Engines(), Workers(1, [])
    first = how.send(learner, engines, version=3, is_first=True)  # type: ignore[arg-type]
    second = how.send(learner, engines, version=4, is_first=False)  # type: ignore[arg-type]
    # An update of the base takes the adapter away: it comes last.
    assert engines.got == [("base", 3, False), ("adapter", 3, False), ("adapter", 4, False)]
    read = {"sync/readback_layers": 24.0}
    assert first == {"sync/version": 3.0, "sync/bytes": 101.0, "sync/adapter_bytes": 1.0} | read
    assert second == {"sync/version": 4.0, "sync/bytes": 1.0, "sync/adapter_bytes": 1.0}


@pytest.mark.parametrize("base", ["original", "bitsandbytes"])
def test_a_base_that_the_engines_keep_is_not_sent(base: str) -> None:
    how = made(plan(), QLORA, base)
    assert (how.part, how.base_goes_first) == ("adapter", False)
    assert f"vllm.qlora_base {base}" in described(plan(), ds=QLORA, vllm=Vllm(qlora_base=base))


def test_without_4_bits_both_sides_have_the_same_base() -> None:
    how = made(plan(), Ds(lora=Lora(rank=8)))
    assert (how.part, how.base_goes_first) == ("adapter", False)


@pytest.mark.parametrize(
    ("adapter", "reason"),
    [
        (plan("language", "vision", "projector"), "vLLM does not apply adapters of the vision and projector exactly"),
        (plan(dora=True), "vLLM has no DoRA"),
    ],
)
def test_what_vllm_cannot_apply_goes_as_merged_weights_and_that_is_said(adapter: AdapterPlan, reason: str) -> None:
    how, engines, learner = made(adapter, QLORA), Engines(), Workers(1, [])
    metrics = how.send(learner, engines, version=1, is_first=True)  # type: ignore[arg-type]
    assert engines.got == [("whole", 1, False)]
    assert metrics == {"sync/version": 1.0, "sync/bytes": 200.0, "sync/readback_layers": 24.0}
    assert why_merged(adapter) == reason
    assert described(adapter, ds=QLORA, vllm=Vllm()).endswith(reason)


def test_a_base_of_the_engines_own_does_not_go_with_merged_weights() -> None:
    check_publication(plan("vision"), ds=QLORA, vllm=Vllm())
    check_publication(plan(), ds=QLORA, vllm=Vllm(qlora_base="original"))
    with pytest.raises(ConfigError, match=r"vllm.qlora_base original cannot be had with merged weights.*leave it at"):
        check_publication(plan("vision"), ds=QLORA, vllm=Vllm(qlora_base="original"))


def test_all_layers_are_read_back_after_the_first_publish_of_a_process_and_every_so_many_steps() -> None:
    how, engines, learner = made(None, Ds(), readback_steps=4), Engines(), Workers(1, [])
    for version in range(6, 14):  # resumed at step 6
        how.send(learner, engines, version=version, is_first=version == 6)  # type: ignore[arg-type]
    assert [plan["is_full"] for plan in engines.plans] == [True, False, True, False, False, False, True, False]
    assert [plan["seed"] for plan in engines.plans] == list(range(6, 14)), "other columns with each publish"


def test_an_adapter_alone_and_a_run_that_wants_none_are_not_read_back() -> None:
    for how in (made(plan(), Ds(lora=Lora(rank=8))), made(None, Ds(), readback_steps=-1)):
        engines = Engines()
        metrics = how.send(Workers(1, []), engines, version=1, is_first=True)  # type: ignore[arg-type]
        assert (engines.plans, "sync/readback_layers" in metrics) == ([None], False)


def test_buckets_are_small_where_several_are_under_way_and_large_where_they_go_one_by_one() -> None:
    assert Vllm().bucket_bytes == 64 * 2**20
    assert Vllm(sync_backend="nccl").bucket_bytes == Vllm(sync_backend="ipc").bucket_bytes == 512 * 2**20
    assert Vllm(bucket_mib=0.5, sync_backend="nccl").bucket_bytes == 2**19


def test_without_adapters_the_model_itself_is_sent() -> None:
    how = made(None, Ds())
    assert (how.part, how.base_goes_first, how.bucket_bytes) == ("whole", False, 2 * 2**20)


def sent(
    log: list[tuple[Any, ...]],
    *,
    part: str,
    held: list[str],
    way: Way | None = None,
    nodes: list[int] | None = None,
    num_buckets: int = 2,
) -> int:
    learner = Workers(2, log, num_buckets=num_buckets, share=["ticket", None], bucket="bytes", published=("abc", 640))
    engines = Workers(len(held), log, nodes=nodes, finish_update=held, relay="another")
    return send(
        engines,  # type: ignore[arg-type]
        learner,  # type: ignore[arg-type]
        version=5,
        max_bytes=99,
        vision_changed=True,
        part=part,  # type: ignore[arg-type]
        device_path=way,  # type: ignore[arg-type]
    )


def test_every_bucket_reaches_the_engines_between_the_two_ends_of_an_update() -> None:
    log: list[tuple[Any, ...]] = []
    assert sent(log, part="adapter", held=["abc", "abc"]) == 640
    # The first buckets are packed while the engines make ready.
    begin = [("num_buckets", 99, "adapter"), ("share", 0, 0), ("share", 1, 0), ("begin_update", 5, True, None)]
    buckets = [("load by 0", "ticket"), ("load by 1", "ticket")] * 2
    assert log == [*begin, *buckets, ("published",), ("finish_update", True)]


def test_three_buckets_are_under_way_and_memory_is_lent_again_once_all_engines_have_loaded_it() -> None:
    log: list[tuple[Any, ...]] = []
    sent(log, part="whole", held=["abc", "abc"], num_buckets=5)
    assert [step for step in log if step[0] == "share"] == [
        *[("share", 0, 0), ("share", 1, 0), ("share", 2, 0), ("share", 3, 1), ("share", 4, 2)]
    ]
    assert sum(step[0] == "load by 1" for step in log) == 5


def test_a_bucket_crosses_to_another_machine_once_however_many_engines_it_has() -> None:
    log: list[tuple[Any, ...]] = []
    sent(log, part="whole", held=["abc"] * 5, nodes=[1, 0, 1, 2, 1], num_buckets=1)
    first = [step[0] for step in log].index("begin_update") + 1
    assert log[first : log.index(("published",))] == [
        *[
            ("bucket by 0", "ticket"),
            ("relay by 0", "bytes", 0, 0),
            ("bucket by 0", "ticket"),
            ("relay by 3", "bytes", 0, 0),
        ],
        *[("load by 0", "another"), ("load by 1", "ticket"), ("load by 2", "another")],
        *[("load by 3", "another"), ("load by 4", "another")],
    ]


def test_on_one_machine_nothing_goes_through_the_object_store() -> None:
    log: list[tuple[Any, ...]] = []
    sent(log, part="whole", held=["abc"] * 3, num_buckets=7)
    assert not [step for step in log if step[0].startswith(("bucket", "relay"))]


def test_adapters_go_through_main_memory_even_where_weights_do_not() -> None:
    weights: list[tuple[Any, ...]] = []
    sent(weights, part="base", held=["abc", "abc"], way=Way(weights))
    assert [step for step in weights if step[0] in ("open", "by device", "share")] == [
        *[("open",), ("by device", 0), ("by device", 1)]
    ]
    adapter: list[tuple[Any, ...]] = []
    sent(adapter, part="adapter", held=["abc", "abc"], way=Way(adapter))
    assert [step for step in adapter if step[0] in ("open", "by device", "share")] == [("share", 0, 0), ("share", 1, 0)]


@pytest.mark.parametrize(("part", "what"), [("adapter", "another adapter"), ("base", "another base")])
def test_an_engine_that_holds_something_else_ends_the_run(part: str, what: str) -> None:
    with pytest.raises(SyncError, match=rf"engine 1 holds {what} than .* for version 5 \(fingerprint abd, sent abc"):
        sent([], part=part, held=["abc", "abd"])
