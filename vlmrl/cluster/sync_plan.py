"""What a weight sync brings to the engines: which part of the model, by which way, and whether this run allows it."""

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
    """What the engines get of a policy."""

    part: Part
    """With every sync."""
    base_goes_first: bool
    """Before the first sync the engines get the trainer's base: they started with another."""
    vision_changes: bool
    """What engines keep of images does not outlive a sync."""
    vllm: Vllm
    """How large buckets are, which way they take, and how often layers are read back."""

    def parts(self, *, is_first: bool) -> list[Part]:
        """What one sync sends, in this order: an update of the base takes the adapter away, so the adapter is last."""
        return ["base", self.part] if is_first and self.base_goes_first else [self.part]

    def readback(self, version: int, *, is_first: bool) -> ReadbackPlan | None:
        """Which layers the engines read back after the sync of `version`: all after the first of a process, whose
        engines have just started, and after every `vllm.readback_steps`-th version, else a sample; -1: none ever.
        """
        steps = self.vllm.readback_steps
        if steps == -1:
            return None
        return {"seed": version, "is_full": is_first or version % steps == 0}


def plan_sync(adapter: AdapterPlan | None, *, ds: Ds, vllm: Vllm, vision_trains: bool) -> SyncPlan:
    """What this run's engines get: adapters alone where vLLM applies them exactly, whole models otherwise."""
    travels_alone = adapter is not None and adapter.fits_engine
    return SyncPlan(
        part="adapter" if travels_alone else "whole",
        base_goes_first=travels_alone and ds.load_in_4bit and vllm.qlora_base == "dequantized",
        vision_changes=vision_trains,
        vllm=vllm,
    )


def check_engine_base(adapter: AdapterPlan | None, *, ds: Ds, vllm: Vllm) -> None:
    """Raise ConfigError when `vllm.qlora_base` asks for a base that the engines would not keep."""
    if adapter is None or adapter.fits_engine or not ds.load_in_4bit or vllm.qlora_base == "dequantized":
        return
    raise ConfigError(
        f"vllm.qlora_base {vllm.qlora_base} cannot be had with merged weights, which replace the engines' base with "
        f"every weight sync ({why_merged(adapter)}): leave it at dequantized, or change --ds.lora.target_modules"
    )


def check_devices(vllm: Vllm, machines: Session, places: Mapping[str, Sequence[Place]]) -> None:
    """Check that `vllm.sync_backend` can work on these machines.

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


def format_sync(adapter: AdapterPlan, *, ds: Ds, vllm: Vllm) -> str:
    """One line for people: what the engines get, and why."""
    if not adapter.fits_engine:
        return f"sync: the whole model with its adapters merged in, for {why_merged(adapter)}"
    base = "the model's own"
    if ds.load_in_4bit:
        base = {
            "dequantized": "the trainer's 4-bit values written out, sent once",
            "original": "the model's own, which are not the trainer's 4 bits (vllm.qlora_base original)",
            "bitsandbytes": "of 4 bits too (vllm.qlora_base bitsandbytes)",
        }[vllm.qlora_base]
    return (
        f"sync: adapters of {len(adapter.targets)} layers at rank {adapter.rank} and nothing else; "
        f"the engines' base weights are {base}"
    )


def why_merged(adapter: AdapterPlan) -> str:
    """The reason why vLLM cannot apply the adapter itself."""
    if adapter.has_magnitude:
        return "vLLM has no DoRA"
    parts = " and ".join(sorted(adapter.groups - {"language"}, reverse=True))
    return f"vLLM does not apply adapters of the {parts} exactly"
