"""What travels to the engines at a publish: which part of the model, by which way, and the proof that it arrived."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from vlmrl.cluster.device_path import DevicePath
from vlmrl.cluster.worker_group import WorkerGroup
from vlmrl.config.ds import Ds
from vlmrl.config.vllm import Vllm
from vlmrl.errors import ConfigError, SyncError
from vlmrl.models.adapter_plan import AdapterPlan
from vlmrl.models.transfer import NUM_UNDER_WAY
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
        bucket_bytes=vllm.bucket_bytes,
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

    With a `device_path` weights go from GPU to GPU. Adapters are small and always go through main memory. With
    `readback` the engines' layers are read back, too.

    Raises:
        SyncError: an engine holds something else than what was sent.
    """
    path = None if part == "adapter" else device_path
    if path is not None:
        path.open(learner)
    num_buckets = learner.call("num_buckets", max_bytes, part)[0]
    begin = partial(engines.call, "begin_update", version, adapter=part == "adapter", readback=readback)
    if path is None:
        through_memory(engines, learner, num_buckets, begin)
    else:
        begin()
        for number in range(num_buckets):
            path.send(number)
    wanted, num_bytes = learner.call("published")[0]
    held = engines.call("finish_update", vision_changed=vision_changed)
    for engine, fingerprint in enumerate(held):
        if fingerprint != wanted:
            raise SyncError(
                f"engine {engine} holds {_HELD[part]} than the trainer sent for version {version} "
                f"(fingerprint {fingerprint[:12]}, sent {wanted[:12]}): a tensor was lost or changed on the way"
            )
    return int(num_bytes)


def through_memory(engines: WorkerGroup, learner: WorkerGroup, num_buckets: int, begin: Callable[[], object]) -> None:
    """Bring all buckets to all engines: through memory that the processes of a machine share, and to other machines
    through Ray's object store, to each of them once.

    `begin` makes the engines ready, in which vLLM sleeps 20 ms of 26: the first buckets are packed meanwhile. Later on
    `NUM_UNDER_WAY` of them are on their way: one is packed while another is loaded and a third waits.
    """
    ahead = min(NUM_UNDER_WAY, num_buckets)
    shared = [learner.submit("share", number, 0) for number in range(ahead)]
    begin()
    loading = [_load(engines, learner, tickets, number, 0) for number, tickets in enumerate(shared)]
    for number in range(num_buckets):
        learner.wait(shared[number])
        engines.wait(loading[number])
        if (later := number + ahead) < num_buckets:
            shared.append(learner.submit("share", later, number + 1))
            loading.append(_load(engines, learner, shared[later], later, number + 1))


def _load(engines: WorkerGroup, learner: WorkerGroup, tickets: list[Any], number: int, num_loaded: int) -> list[Any]:
    """Let every engine load bucket `number`, which the learner's rank 0 shares."""
    ticket_on = {learner.nodes[0]: tickets[0]}
    for engine, node in enumerate(engines.nodes):
        if node not in ticket_on:
            # The first engine of a machine receives for all of them.
            bucket = learner.submit_to(0, "bucket", tickets[0])
            ticket_on[node] = engines.submit_to(engine, "relay", bucket, number, num_loaded)
    return [engines.submit_to(engine, "load", ticket_on[node]) for engine, node in enumerate(engines.nodes)]


_HELD: dict[Part, str] = {"whole": "other weights", "base": "another base", "adapter": "another adapter"}
