"""Parts of a weight sync, and runs in which it cannot work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vlmrl.cluster.placement import Place
from vlmrl.cluster.session import Node, Session
from vlmrl.cluster.sync_plan import SyncPlan, check_devices, check_engine_base, format_sync, plan_sync, why_merged
from vlmrl.config.ds import Ds
from vlmrl.config.lora import Lora
from vlmrl.config.vllm import Vllm
from vlmrl.errors import ClusterError, ConfigError
from vlmrl.models.adapter_plan import AdapterPlan

LAYER = "model.layers.0.self_attn.q_proj"
QLORA = Ds(load_in_4bit=True, lora=Lora(rank=8))
GPUS = Session((Node(id="n", num_cpus=8, num_gpus=4),))
CORES = Session((Node(id="n", num_cpus=8, num_gpus=0),))


def adapter(*groups: str, rank: int = 8, dora: bool = False) -> AdapterPlan:
    return AdapterPlan(
        rank=rank,
        alpha=16.0,
        dropout=0.0,
        is_rank_stabilized=False,
        has_magnitude=dora,
        targets=(LAYER,),
        groups=frozenset(groups or ("language",)),  # type: ignore[arg-type]
    )


def planned(adapter: AdapterPlan | None, ds: Ds, **vllm: Any) -> SyncPlan:
    return plan_sync(adapter, ds=ds, vllm=Vllm(**vllm), vision_trains=False)


def test_adapters_that_are_sent_alone_are_refused_for_engines_of_stages() -> None:
    stages = Vllm(pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match=r"^vllm\.pipeline_parallel_size 2 is for engines without adapters"):
        check_engine_base(adapter(), ds=Ds(lora=Lora(rank=8)), vllm=stages)
    check_engine_base(adapter("vision"), ds=Ds(lora=Lora(rank=8)), vllm=stages)
    check_engine_base(None, ds=Ds(), vllm=stages)


def test_adapters_are_sent_alone_after_a_dequantized_base() -> None:
    plan = planned(adapter(), QLORA)
    # An update of the base removes the adapter, so the adapter is last.
    assert plan.parts(is_first=True) == ["base", "adapter"]
    assert plan.parts(is_first=False) == ["adapter"]


@pytest.mark.parametrize("base", ["original", "bitsandbytes"])
def test_a_base_that_the_engines_keep_is_not_sent(base: str) -> None:
    assert planned(adapter(), QLORA, qlora_base=base).parts(is_first=True) == ["adapter"]
    assert f"vllm.qlora_base {base}" in format_sync(adapter(), ds=QLORA, vllm=Vllm(qlora_base=base))


def test_without_4_bits_both_sides_have_the_same_base() -> None:
    assert planned(adapter(), Ds(lora=Lora(rank=8))).parts(is_first=True) == ["adapter"]


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (
            adapter("language", "vision", "projector"),
            "vLLM does not apply adapters of the vision tower and projector exactly",
        ),
        (adapter(dora=True), "vLLM has no DoRA"),
        (
            replace(adapter(), targets=("layers.0.linear_attn.in_proj_z",)),
            "vLLM takes adapters of in_proj_z only with those of in_proj_qkv",
        ),
    ],
)
def test_adapters_that_vllm_cannot_apply_are_sent_merged_and_reported(plan: AdapterPlan, reason: str) -> None:
    assert planned(plan, QLORA).parts(is_first=True) == ["whole"]
    assert why_merged(plan) == reason
    assert format_sync(plan, ds=QLORA, vllm=Vllm()).endswith(reason)


def test_without_adapters_the_model_itself_is_sent() -> None:
    assert planned(None, Ds()).parts(is_first=True) == planned(None, Ds()).parts(is_first=False) == ["whole"]


def test_a_base_of_the_engines_own_is_refused_with_merged_weights() -> None:
    check_engine_base(adapter("vision"), ds=QLORA, vllm=Vllm())
    check_engine_base(adapter(), ds=QLORA, vllm=Vllm(qlora_base="original"))
    with pytest.raises(ConfigError, match=r"vllm.qlora_base original is not possible with merged weights.*leave it at"):
        check_engine_base(adapter("vision"), ds=QLORA, vllm=Vllm(qlora_base="original"))


def test_all_layers_are_read_back_after_the_first_sync_and_every_so_many_steps() -> None:
    plan = planned(None, Ds(), readback_steps=4)
    # Resumed at step 6.
    plans = [plan.readback(version, is_first=version == 6) or {} for version in range(6, 14)]
    assert [plan["is_full"] for plan in plans] == [True, False, True, False, False, False, True, False]
    assert [plan["seed"] for plan in plans] == list(range(6, 14)), "new columns with each sync"
    assert planned(None, Ds(), readback_steps=-1).readback(1, is_first=True) is None


def test_buckets_are_small_if_several_are_in_flight_and_large_otherwise() -> None:
    assert Vllm().bucket_bytes == 64 * 2**20
    assert Vllm(sync_backend="nccl").bucket_bytes == Vllm(sync_backend="ipc").bucket_bytes == 512 * 2**20
    assert Vllm(bucket_mib=0.5, sync_backend="nccl").bucket_bytes == 2**19


def vllm(backend: str) -> Vllm:
    return Vllm.model_validate({"sync_backend": backend, "tensor_parallel_size": 2})


def places(engines: list[int]) -> dict[str, list[Place]]:
    return {"actor": [Place(0, (0,)), Place(0, (1,))], "vllm": [Place(0, tuple(engines))]}


@pytest.mark.parametrize(("backend", "engines"), [("shm", [0]), ("nccl", [2, 3]), ("ipc", [0, 1])])
def test_suitable_places_pass(backend: str, engines: list[int]) -> None:
    check_devices(vllm(backend), GPUS, places(engines))


def test_shared_memory_needs_no_gpu() -> None:
    check_devices(Vllm(), CORES, {})


@pytest.mark.parametrize("backend", ["nccl", "ipc"])
def test_transfers_between_gpus_require_gpus(backend: str) -> None:
    with pytest.raises(ConfigError, match=f"vllm.sync_backend {backend} moves weights between GPUs.* use shm"):
        check_devices(vllm(backend), CORES, places([0, 1]))


@pytest.mark.parametrize("engines", [[0], [1, 2], [0, 1, 2]])
def test_ipc_requires_trainer_and_engines_on_the_same_gpus(engines: list[int]) -> None:
    with pytest.raises(ClusterError, match="needs trainer and engines on the same GPUs"):
        check_devices(vllm("ipc"), GPUS, places(engines))


def test_nccl_requires_separate_gpus() -> None:
    with pytest.raises(ClusterError, match="separate GPUs"):
        check_devices(vllm("nccl"), GPUS, places([1, 2]))
