"""Placements of a run: the settings that a plan chooses, and the search for those that fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

Mode = Literal["colocated", "apart", "asynchronous"]
Settings = Mapping[str, Any]
"""Full name -> value."""

_TOKENS = (8192, 16384, 32768)
_SEQUENCE_SIZES = (1, 2, 4, 8)
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


def divisions(cluster: Cluster, *, heads: int, reference: bool) -> Iterator[tuple[Mode, Settings]]:
    """Yield the ways to divide the GPUs among trainer and engines, with the engines' size.

    Tensor parallel ranks divide the heads, and are on one machine. With a reference, it shares the trainer's GPUs.
    """
    sizes = [n for n in (1, 2, 4, 8) if n <= min(cluster.gpus_per_node, cluster.gpus) and not heads % n]
    for size in sizes:
        if cluster.gpus % size == 0 and (ranks := cluster.ranks(cluster.gpus)):
            engines: dict[str, Any] = {"vllm.num_engines": cluster.gpus // size, "vllm.tensor_parallel_size": size}
            for utilization in _UTILIZATION["colocated"]:
                more = {"train.colocate_all": True, "vllm.enable_sleep": True, "vllm.sync_backend": "ipc"}
                more |= {"vllm.gpu_memory_utilization": utilization}
                yield "colocated", {**_actor(*ranks), **engines, **more}
        for share in (1 / 4, 1 / 2, 3 / 4):
            trainers = int(cluster.gpus * share)
            ranks = cluster.ranks(trainers) if trainers else None
            if ranks is None or (cluster.gpus - trainers) % size or trainers == cluster.gpus:
                continue
            apart: dict[str, Any] = _actor(*ranks) | {
                "vllm.num_engines": (cluster.gpus - trainers) // size,
                "vllm.tensor_parallel_size": size,
                "vllm.sync_backend": "nccl",
                "vllm.gpu_memory_utilization": _UTILIZATION["apart"][0],
            }
            if reference:
                apart |= {"train.colocate_actor_ref": True}
            yield "apart", apart
            ahead = {"train.async_enable": True, "algo.advantage.is_correction_enable": True}
            yield "asynchronous", {**apart, **ahead}


def trainers(mode: Mode, *, ranks: int, heads: int, tokens: Sequence[int] = _TOKENS) -> Iterator[Settings]:
    """Yield the settings of the trainer that decide its memory."""
    optimizers: list[dict[str, Any]] = [
        {"ds.zero_stage": stage, "ds.adam_offload": offload} for stage, offload in product((2, 3), (False, True))
    ]
    if mode == "colocated":
        optimizers.append({"ds.zero_stage": 2, "ds.enable_sleep": True})
    sizes = [n for n in _SEQUENCE_SIZES if ranks % n == 0 and heads % n == 0]
    for optimizer, size, budget, checkpoints in product(optimizers, sizes, tokens, (False, True)):
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
) -> list[Found]:
    """Return the fastest placement that fits of each division of the GPUs, the fastest first.

    Args:
        fixed: settings that are given; placements with other values are left out.
        seconds: estimates a step.
        fits: whether a placement fits into memory.
        agrees: whether its settings agree with each other; a slower check.
    """
    found = []
    for mode, division in divisions(cluster, heads=heads, reference=reference):
        if not _agrees(division, fixed, mode):
            continue
        ranks = division["actor.num_nodes"] * division["actor.num_gpus_per_node"]
        budget = fixed.get("train.max_tokens_per_gpu")
        options = [
            {**division, **trainer}
            for trainer in trainers(mode, ranks=ranks, heads=heads, tokens=_TOKENS if budget is None else (budget,))
            if _agrees(trainer, fixed, mode)
        ]
        timed = sorted((seconds(settings), number) for number, settings in enumerate(options) if fits(settings))
        for time, number in timed:
            if agrees(options[number]):
                found.append(Found(mode, options[number], time))
                break
    best: dict[tuple[Any, ...], Found] = {}
    for place in sorted(found, key=lambda placement: placement.seconds):
        best.setdefault((place.mode, *(place.settings[name] for name in _DIVISION)), place)
    return list(best.values())


def _agrees(settings: Settings, fixed: Settings, mode: Mode) -> bool:
    modes = {"train.colocate_all": mode == "colocated", "train.async_enable": mode == "asynchronous"}
    if any(name in fixed and fixed[name] != value for name, value in modes.items()):
        return False
    return all(fixed.get(name, value) == value for name, value in settings.items() if name not in modes)
