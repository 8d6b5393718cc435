"""The plan of weight syncs: the part of the model that is sent, the transport, and checks that the run allows both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vlmrl.cluster.placement import Place
from vlmrl.cluster.session import Session
from vlmrl.config.ds import Ds
from vlmrl.config.vllm import Vllm
from vlmrl.errors import ClusterError, ConfigError
from vlmrl.models.adapter_plan import AdapterPlan
from vlmrl.rollout.reports import ReadbackPlan
from vlmrl.types import Part


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """The parts of a policy that the engines get."""

    part: Part
    """Sent with every sync."""
    base_goes_first: bool
    """The first sync also sends the trainer's base, because the engines started with another."""
    vision_changes: bool
    """Vision weights train, so image embeddings that engines cache are stale after a sync."""
    vllm: Vllm
    """Settings of bucket size, transport and read-back."""

    def parts(self, *, is_first: bool) -> list[Part]:
        """Return the parts of one sync in order: an update of the base removes the adapter, so the adapter is last."""
        return ["base", self.part] if is_first and self.base_goes_first else [self.part]

    def readback(self, version: int, *, is_first: bool) -> ReadbackPlan | None:
        """Return the layers that the engines read back after the sync of `version`.

        All after the first sync of a process and after every `vllm.readback_steps`-th version, otherwise a sample; with
        -1 none (None).
        """
        steps = self.vllm.readback_steps
        if steps == -1:
            return None
        return {"seed": version, "is_full": is_first or version % steps == 0}


def plan_sync(adapter: AdapterPlan | None, *, ds: Ds, vllm: Vllm, vision_trains: bool) -> SyncPlan:
    """Plan the syncs of a run: only adapters if vLLM applies them exactly, otherwise whole models."""
    is_sent_alone = adapter is not None and adapter.fits_engine
    return SyncPlan(
        part="adapter" if is_sent_alone else "whole",
        base_goes_first=is_sent_alone and ds.load_in_4bit and vllm.qlora_base == "dequantized",
        vision_changes=vision_trains,
        vllm=vllm,
    )


def check_engine_base(adapter: AdapterPlan | None, *, ds: Ds, vllm: Vllm) -> None:
    """Raise ConfigError if syncs would replace the base that `vllm.qlora_base` sets, or if the engines are of a kind
    that has no adapters."""
    if adapter is not None and adapter.fits_engine and vllm.pipeline_parallel_size > 1:
        raise ConfigError(
            f"vllm.pipeline_parallel_size {vllm.pipeline_parallel_size} is for engines without adapters, whose layers "
            "vlmrl reads back from every worker: use vllm.tensor_parallel_size, or train without ds.lora.rank"
        )
    if adapter is None or adapter.fits_engine or not ds.load_in_4bit or vllm.qlora_base == "dequantized":
        return
    raise ConfigError(
        f"vllm.qlora_base {vllm.qlora_base} is not possible with merged weights, which replace the engines' base with "
        f"every weight sync ({why_merged(adapter)}): leave it at dequantized, or change --ds.lora.target_modules"
    )


def check_devices(vllm: Vllm, machines: Session, places: Mapping[str, Sequence[Place]]) -> None:
    """Check that `vllm.sync_backend` can work on these machines.

    Raises:
        ConfigError: there is no GPU.
        ClusterError: trainer and engines do not share all GPUs for ipc, or share some for nccl.
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
            f"vllm.sync_backend ipc needs trainer and engines on the same GPUs, but they have {len(trainer)} and "
            f"{len(engines)} with {len(trainer & engines)} in common: make actor.num_nodes x actor.num_gpus_per_node "
            "equal vllm.num_engines x vllm.tensor_parallel_size x vllm.pipeline_parallel_size"
        )
    if vllm.sync_backend == "nccl" and trainer & engines:
        raise ClusterError(
            "vllm.sync_backend nccl needs separate GPUs for trainer and engines: use ipc with train.colocate_all"
        )


def format_sync(adapter: AdapterPlan, *, ds: Ds, vllm: Vllm) -> str:
    """Return one line for users: what the engines get, and why."""
    if not adapter.fits_engine:
        return f"sync: the whole model with its adapters merged in, because {why_merged(adapter)}"
    base = "the model's own"
    if ds.load_in_4bit:
        base = {
            "dequantized": "the trainer's 4-bit values dequantized, sent once",
            "original": "the model's own, which are not the trainer's 4 bits (vllm.qlora_base original)",
            "bitsandbytes": "of 4 bits too (vllm.qlora_base bitsandbytes)",
        }[vllm.qlora_base]
    return (
        f"sync: adapters of {len(adapter.targets)} layers at rank {adapter.rank} and nothing else; "
        f"the engines' base weights are {base}"
    )


def why_merged(adapter: AdapterPlan) -> str:
    """Return the reason why vLLM cannot apply the adapter itself."""
    if adapter.has_magnitude:
        return "vLLM has no DoRA"
    if adapter.has_experts:
        return "vLLM has no kernel for CPUs of a mixture of experts with an adapter, and none has been tried on a GPU"
    names = {"vision": "vision tower", "projector": "projector"}
    parts = " and ".join(name for group, name in names.items() if group in adapter.groups)
    if not parts:
        return "vLLM takes adapters of in_proj_z only with those of in_proj_qkv"
    return f"vLLM does not apply adapters of the {parts} exactly"
