"""What travels to the engines at a publish: which part of the model, by which way, and the proof that it arrived."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from vlmrl.cluster.device_path import DevicePath
from vlmrl.cluster.group import WorkerGroup
from vlmrl.config.ds import Ds
from vlmrl.config.vllm import Vllm
from vlmrl.errors import ConfigError, SyncError
from vlmrl.models.adapter_plan import AdapterPlan
from vlmrl.rollout.reports import ReadbackPlan
from vlmrl.types import Metrics, Part


class Receivers(Protocol):
    """The engines, as a publish sees them."""

    def load(
        self,
        learner: WorkerGroup,
        *,
        version: int,
        max_bytes: int,
        vision_changed: bool,
        part: Part,
        readback: ReadbackPlan | None,
    ) -> int:
        """Bring a part of the learner's model to all of them; the bytes that were sent."""

    def readback(self) -> Metrics:
        """What was read back from their layers after the last update of the model."""


@dataclass(frozen=True, slots=True)
class Publication:
    """What the engines get of a policy."""

    part: Part
    """With every publish."""
    base_goes_first: bool
    """Before the first publish the engines get the trainer's base: they started with another."""
    bucket_bytes: int
    vision_changes: bool
    """What engines keep of images does not outlive a publish."""
    readback_steps: int
    """All layers of the engines are read back with every so many versions, a sample of them with the others; -1: none
    ever."""

    def send(self, learner: WorkerGroup, engines: Receivers, *, version: int, is_first: bool) -> Metrics:
        """One publish; `is_first` of this process, whose engines have just started."""
        # An update of the base takes the adapter away, so the adapter comes last.
        parts: list[Part] = ["base", self.part] if is_first and self.base_goes_first else [self.part]
        readback = readback_plan(self.readback_steps, version=version, is_first=is_first)
        sent = {
            part: engines.load(
                learner,
                version=version,
                max_bytes=self.bucket_bytes,
                vision_changed=self.vision_changes,
                part=part,
                readback=None if part == "adapter" else readback,
            )
            for part in parts
        }
        metrics = {"sync/version": float(version), "sync/bytes": float(sum(sent.values()))}
        if readback is not None and parts != ["adapter"]:
            metrics |= engines.readback()
        return metrics | ({"sync/adapter_bytes": float(sent["adapter"])} if "adapter" in sent else {})


def publication(plan: AdapterPlan | None, *, ds: Ds, vllm: Vllm, vision_trains: bool) -> Publication:
    """What this run's engines get: adapters alone where vLLM applies them exactly, whole models otherwise."""
    travels_alone = plan is not None and plan.fits_engine
    return Publication(
        part="adapter" if travels_alone else "whole",
        base_goes_first=travels_alone and ds.load_in_4bit and vllm.qlora_base == "dequantized",
        bucket_bytes=int(vllm.bucket_mib * 2**20),
        vision_changes=vision_trains,
        readback_steps=vllm.readback_steps,
    )


def readback_plan(steps: int, *, version: int, is_first: bool) -> ReadbackPlan | None:
    """Which layers are read back after the publish of `version`: all with the first of a process, whose engines have
    just started, and with every `steps`-th; -1: none ever.
    """
    if steps == -1:
        return None
    return {"seed": version, "is_full": is_first or version % steps == 0}


def check_publication(plan: AdapterPlan | None, *, ds: Ds, vllm: Vllm) -> None:
    """Raise ConfigError when `vllm.qlora_base` asks for a base that the engines would not keep."""
    if plan is None or plan.fits_engine or not ds.load_in_4bit or vllm.qlora_base == "dequantized":
        return
    raise ConfigError(
        f"vllm.qlora_base {vllm.qlora_base} cannot be had with merged weights, which replace the engines' base with "
        f"every publish ({why_merged(plan)}): leave it at dequantized, or change --ds.lora.target_modules"
    )


def described(plan: AdapterPlan, *, ds: Ds, vllm: Vllm) -> str:
    """One line for people: what the engines get, and why."""
    if not plan.fits_engine:
        return f"publish: the whole model with its adapters merged in, for {why_merged(plan)}"
    base = "the model's own"
    if ds.load_in_4bit:
        base = {
            "dequantized": "the trainer's 4-bit values written out, sent once",
            "original": "the model's own, which are not the trainer's 4 bits (vllm.qlora_base original)",
            "bitsandbytes": "of 4 bits too (vllm.qlora_base bitsandbytes)",
        }[vllm.qlora_base]
    return (
        f"publish: adapters of {len(plan.targets)} layers at rank {plan.rank} and nothing else; "
        f"the engines' base weights are {base}"
    )


def why_merged(plan: AdapterPlan) -> str:
    """What keeps vLLM from applying the adapter itself."""
    if plan.has_magnitude:
        return "vLLM has no DoRA"
    parts = " and ".join(sorted(plan.groups - {"language"}, reverse=True))
    return f"vLLM does not apply adapters of the {parts} exactly"


def send(
    engines: WorkerGroup,
    learner: WorkerGroup,
    *,
    version: int,
    max_bytes: int,
    vision_changed: bool,
    part: Part,
    device_path: DevicePath | None,
    readback: ReadbackPlan | None = None,
) -> int:
    """Publish a part of the learner's model to every engine and prove that it arrived; returns the bytes sent.

    With a `device_path` weights go from GPU to GPU. Adapters are small and always go through the object store. With
    `readback` the engines' layers are read back, too.

    Raises:
        SyncError: an engine holds something else than what was sent.
    """
    path = None if part == "adapter" else device_path
    if path is not None:
        path.open(learner)
    num_buckets = learner.call("num_buckets", max_bytes, part)[0]
    # The first bucket is packed while the engines make ready, in which vLLM sleeps 20 ms of 26 (a bucket of 52 MB: 30).
    coming = learner.submit("bucket", 0) if path is None and num_buckets else []
    engines.call("begin_update", version, adapter=part == "adapter", readback=readback)
    for number in range(num_buckets):
        if path is not None:
            path.send(number)
            continue
        # The bucket goes from the learner's node to the engines' through the object store, not through the driver.
        bucket, coming = coming or learner.submit("bucket", number), []
        engines.wait(engines.submit("load_bucket", bucket[0]))
        learner.wait(bucket[1:])
    wanted, num_bytes = learner.call("published")[0]
    held = engines.call("finish_update", vision_changed=vision_changed)
    for engine, fingerprint in enumerate(held):
        if fingerprint != wanted:
            raise SyncError(
                f"engine {engine} holds {_HELD[part]} than the trainer sent for version {version} "
                f"(fingerprint {fingerprint[:12]}, sent {wanted[:12]}): a tensor was lost or changed on the way"
            )
    return int(num_bytes)


_HELD: dict[Part, str] = {"whole": "other weights", "base": "another base", "adapter": "another adapter"}
