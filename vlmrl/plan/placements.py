"""Placements of a run: the settings that a plan chooses, and the search for those that fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import Any, Literal

Mode = Literal["colocated", "apart", "asynchronous"]
Settings = Mapping[str, Any]
"""Full name -> value."""

_TOKENS = (8192, 16384, 32768)
SEQUENCE_SIZES = (1, 2, 4, 8)
_DIVISION = ("actor.num_nodes", "actor.num_gpus_per_node", "vllm.num_engines", "vllm.tensor_parallel_size")
_UTILIZATION = {"colocated": (0.8, 0.6, 0.4), "apart": (0.9,), "asynchronous": (0.9,)}


@dataclass(frozen=True, slots=True)
class Cluster:
    """The GPUs."""

    gpus: int
    gpus_per_node: int

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    def ranks(self, gpus: int) -> tuple[int, int] | None:
        """Return machines and GPUs of each for a role; None if it would not fill whole machines."""
        if gpus <= self.gpus_per_node:
            return 1, gpus
        return None if gpus % self.gpus_per_node else (gpus // self.gpus_per_node, self.gpus_per_node)


def divisions(
    cluster: Cluster,
    *,
    heads: int,
    reference: bool,
    fixed: Settings = MappingProxyType({}),
    stages: int = 1,
    apart: int = 0,
) -> Iterator[tuple[Mode, Settings]]:
    """Yield the ways to divide the GPUs among trainer and engines, with the engines' size.

    Tensor parallel ranks divide the heads, and an engine is on one machine. With a reference, it shares the trainer's
    GPUs.

    Args:
        fixed: settings that are given, which replace those that would be chosen.
        stages: `vllm.pipeline_parallel_size`.
        apart: GPUs of further roles that share none.
    """
    sizes = [n for n in (1, 2, 4, 8) if n * stages <= min(cluster.gpus_per_node, cluster.gpus) and not heads % n]
    for size in (fixed["vllm.tensor_parallel_size"],) if "vllm.tensor_parallel_size" in fixed else sizes:
        for ranks in _rank_counts(cluster, (1,), fixed):
            for utilization in _UTILIZATION["colocated"]:
                for engines in _engines(cluster.gpus, size, stages, fixed):
                    more = {"train.colocate_all": True, "vllm.enable_sleep": True, "vllm.sync_backend": "ipc"}
                    more |= {"vllm.gpu_memory_utilization": utilization}
                    yield "colocated", _with_given({**_actor(*ranks), **engines, **more}, fixed)
        for ranks in _rank_counts(cluster, (1 / 4, 1 / 2, 3 / 4), fixed):
            for engines in _engines(cluster.gpus - apart - math.prod(ranks), size, stages, fixed):
                separate: dict[str, Any] = _actor(*ranks) | {
                    **engines,
                    "vllm.sync_backend": "nccl",
                    "vllm.gpu_memory_utilization": _UTILIZATION["apart"][0],
                }
                if reference:
                    separate |= {"train.colocate_actor_ref": True}
                yield "apart", _with_given(separate, fixed)
                ahead = {"train.async_enable": True, "algo.advantage.is_correction_enable": True}
                yield "asynchronous", _with_given({**separate, **ahead}, fixed)


def _rank_counts(cluster: Cluster, shares: Sequence[float], fixed: Settings) -> list[tuple[int, int]]:
    """Return machines of the trainer and GPUs of each: those that are given, or these shares of the cluster."""
    nodes, per_node = (fixed.get(f"actor.{name}") for name in ("num_nodes", "num_gpus_per_node"))
    if nodes is not None and per_node is not None:
        return [(nodes, per_node)]
    counts = (cluster.ranks(int(cluster.gpus * share)) for share in shares)
    found = ((nodes or ranks[0], per_node or ranks[1]) for ranks in counts if ranks is not None and ranks[1])
    return list(dict.fromkeys(found))


def _engines(gpus: int, size: int, stages: int, fixed: Settings) -> Iterator[dict[str, Any]]:
    """Yield number and size of the engines on these GPUs: as many as are given, or as fill the GPUs."""
    number = fixed.get("vllm.num_engines", 0 if gpus % (size * stages) else gpus // (size * stages))
    if number > 0 and number * size * stages <= gpus:
        yield {"vllm.num_engines": number, "vllm.tensor_parallel_size": size}


def trainers(mode: Mode, *, ranks: int, sequence_sizes: Sequence[int] = (1,)) -> Iterator[dict[str, Any]]:
    """Yield the settings of the trainer that decide its memory."""
    optimizers: list[dict[str, Any]] = [
        {"ds.zero_stage": stage, "ds.adam_offload": offload} for stage, offload in product((2, 3), (False, True))
    ]
    if mode == "colocated":
        optimizers.append({"ds.zero_stage": 2, "ds.enable_sleep": True})
    sizes = [n for n in sequence_sizes if ranks % n == 0]
    for optimizer, size, budget, checkpoints in product(optimizers, sizes, _TOKENS, (False, True)):
        yield optimizer | {
            "ds.sequence_parallel_size": size,
            "train.max_tokens_per_gpu": budget,
            "actor.gradient_checkpointing_enable": checkpoints,
        }


def _actor(nodes: int, per_node: int) -> dict[str, Any]:
    return {"actor.num_nodes": nodes, "actor.num_gpus_per_node": per_node}


@dataclass(frozen=True, slots=True)
class Found:
    """A placement that fits."""

    mode: Mode
    settings: Settings
    seconds: float


def search(
    cluster: Cluster,
    *,
    heads: int,
    reference: bool,
    fixed: Settings,
    seconds: Callable[[Settings], float],
    fits: Callable[[Settings], bool],
    agrees: Callable[[Settings], bool],
    stages: int = 1,
    sequence_sizes: Sequence[int] = (1,),
    apart: int = 0,
) -> list[Found]:
    """Return the fastest placement that fits of each division of the GPUs, the fastest first.

    Args:
        fixed: settings that are given. They replace those that would be chosen.
        seconds: estimates a step.
        fits: whether a placement fits into memory.
        agrees: whether its settings agree with each other; a slower check.
        stages: `vllm.pipeline_parallel_size`.
        sequence_sizes: values of `ds.sequence_parallel_size` that the model allows.
        apart: GPUs of further roles that share none.
    """
    found = []
    offered = divisions(cluster, heads=heads, reference=reference, fixed=fixed, stages=stages, apart=apart)
    modes = [(mode, division) for mode, division in offered if _is_mode(mode, fixed)]
    for mode, division in _different(modes):
        ranks = division["actor.num_nodes"] * division["actor.num_gpus_per_node"]
        offers = (_with_given(trainer, fixed) for trainer in trainers(mode, ranks=ranks, sequence_sizes=sequence_sizes))
        options = [{**division, **trainer} for _, trainer in _different((mode, trainer) for trainer in offers)]
        timed = sorted((seconds(settings), number) for number, settings in enumerate(options) if fits(settings))
        for time, number in timed:
            if agrees(options[number]):
                found.append(Found(mode, options[number], time))
                break
    best: dict[tuple[Any, ...], Found] = {}
    for place in sorted(found, key=lambda placement: placement.seconds):
        best.setdefault((place.mode, *(place.settings[name] for name in _DIVISION)), place)
    return list(best.values())


def _with_given(settings: dict[str, Any], fixed: Settings) -> dict[str, Any]:
    """Return the settings with the values that are given for them."""
    return {name: fixed.get(name, value) for name, value in settings.items()}


def _different(offers: Iterable[tuple[Mode, Settings]]) -> list[tuple[Mode, Settings]]:
    """Leave out repeated settings: given values make some the same."""
    return list({(mode, *settings.items()): (mode, settings) for mode, settings in offers}.values())


def _is_mode(mode: Mode, fixed: Settings) -> bool:
    modes = {"train.colocate_all": mode == "colocated", "train.async_enable": mode == "asynchronous"}
    return all(fixed.get(name, value) == value for name, value in modes.items())
