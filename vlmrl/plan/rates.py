"""Seconds per unit of work, of GPUs by their data sheets and of this project's CPU machine by measurement.

Work is counted in units: floating-point operations, bytes over some path, and calls. A phase takes the sum over its
units, as if nothing overlapped, so that rates can be fitted to measured runs (`fit.py`). Nothing has been measured on
GPUs: all figures for them are estimates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from vlmrl.errors import ConfigError

Kind = Literal["prefill", "decode", "score", "train", "optimizer", "sync", "sleep", "step"]
"""Kind of work. Each has rates of its own."""
Unit = Literal["flops", "bytes", "link", "network", "host", "calls", "layers", "rows", "constant"]
"""`bytes` of device memory, `link` between the GPUs of a machine, `network` between machines, `host` between GPU and
main memory; `calls` of an engine or of a training pass, each with `layers`; `rows` are responses in a call."""
Work = Mapping[Unit, float]
Rates = Mapping[tuple[Kind, Unit], float]
"""Seconds per unit; a unit without a rate takes no time."""

REASONS: Mapping[Unit, str] = {
    "flops": "compute",
    "bytes": "memory bandwidth",
    "link": "communication",
    "network": "communication",
    "host": "communication",
    "calls": "overhead",
    "layers": "overhead",
    "rows": "overhead",
    "constant": "overhead",
}
"""What binds where a unit takes the most time."""

_TRAIN_EFFICIENCY = 0.4
_PREFILL_EFFICIENCY = 0.5
_BANDWIDTH_EFFICIENCY = 0.6
_LINK_EFFICIENCY = 0.7
_ENGINE_CALL_S = 2e-3
_ENGINE_LAYER_S = 12e-6
"""Launches of a layer in a CUDA graph."""
_PASS_LAYER_S = 4e-4
"""Launches of a layer's forward and backward pass."""
_STEP_S = 2.0
"""Data, rewards, advantages and files of a step."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A data sheet."""

    flops: float
    """Dense bf16 operations per second."""
    memory_gib: float
    """Usable memory."""
    bandwidth: float
    """Bytes per second of its memory."""
    link: float
    """Bytes per second to the other GPUs of the machine, in one direction."""
    network: float
    """Bytes per second to other machines, for each GPU."""
    host: float
    """Bytes per second to main memory."""


GPUS: Mapping[str, Gpu] = {
    "A100-40": Gpu(312e12, 39.4, 1.555e12, 300e9, 25e9, 25e9),
    "A100-80": Gpu(312e12, 79.1, 2.039e12, 300e9, 25e9, 25e9),
    "H100": Gpu(989e12, 79.1, 3.35e12, 450e9, 50e9, 50e9),
    "H200": Gpu(989e12, 139.8, 4.8e12, 450e9, 50e9, 50e9),
    "B200": Gpu(2250e12, 178.0, 8e12, 900e9, 50e9, 50e9),
    "L40S": Gpu(362e12, 44.4, 0.864e12, 25e9, 12.5e9, 25e9),
    "RTX4090": Gpu(165e12, 23.5, 1.008e12, 12.5e9, 3e9, 25e9),
}
"""Networks are assumed: a 400 Gb/s adapter for each H100, 200 for each A100."""
_ALIASES = {"a100": "A100-80", "4090": "RTX4090"}


def gpu_of(name: str) -> Gpu:
    """Return the data sheet of a GPU. Raises ConfigError with the known names."""
    by_name = {known.lower(): gpu for known, gpu in GPUS.items()}
    wanted = name.lower()
    gpu = by_name.get(_ALIASES.get(wanted, wanted).lower())
    if gpu is None:
        raise ConfigError(f"plan.gpu: no GPU {name}; there are {', '.join(GPUS)}, and cpu")
    return gpu


def rates_of(gpu: Gpu) -> Rates:
    """Return estimated rates of a GPU: its data sheet, times the efficiency that such programs usually reach."""
    train = 1 / (gpu.flops * _TRAIN_EFFICIENCY)
    memory = 1 / (gpu.bandwidth * _BANDWIDTH_EFFICIENCY)
    paths: dict[Unit, float] = {
        "link": 1 / (gpu.link * _LINK_EFFICIENCY),
        "network": 1 / (gpu.network * _LINK_EFFICIENCY),
        "host": 1 / (gpu.host * _LINK_EFFICIENCY),
        "bytes": memory,
    }
    kinds: tuple[Kind, ...] = ("score", "train", "optimizer", "sync", "sleep", "decode")
    rates: dict[tuple[Kind, Unit], float] = {(kind, unit): rate for kind in kinds for unit, rate in paths.items()}
    prefill = 1 / (gpu.flops * _PREFILL_EFFICIENCY)
    return rates | {
        ("prefill", "flops"): prefill,
        ("prefill", "link"): paths["link"],
        ("prefill", "network"): paths["network"],
        ("decode", "flops"): prefill,
        ("decode", "calls"): _ENGINE_CALL_S,
        ("decode", "layers"): _ENGINE_LAYER_S,
        ("decode", "rows"): 1e-6,
        ("score", "flops"): train,
        ("score", "layers"): _PASS_LAYER_S / 3,
        ("train", "flops"): train,
        ("train", "layers"): _PASS_LAYER_S,
        ("sync", "layers"): 2e-3,
        ("sync", "constant"): 0.5,
        ("step", "constant"): _STEP_S,
        ("step", "rows"): 1e-3,
        ("step", "flops"): 3 * train,
    }


CPU: Rates = {
    ("prefill", "flops"): 1 / 80e9,
    ("prefill", "calls"): 2e-3,
    ("decode", "flops"): 1 / 80e9,
    ("decode", "bytes"): 1 / 20e9,
    ("decode", "calls"): 1e-3,
    ("decode", "layers"): 1.8e-3,
    ("decode", "rows"): 1e-4,
    ("score", "flops"): 1 / 160e9,
    ("score", "bytes"): 1 / 10e9,
    ("score", "layers"): 1e-3,
    ("score", "constant"): 0.01,
    ("train", "flops"): 1 / 160e9,
    ("train", "bytes"): 1 / 10e9,
    ("train", "layers"): 2e-3,
    ("optimizer", "bytes"): 1 / 10e9,
    ("optimizer", "constant"): 0.01,
    ("sync", "bytes"): 1 / 0.6e9,
    ("sync", "layers"): 5e-3,
    ("sync", "constant"): 0.05,
    ("step", "constant"): 0.1,
    ("step", "rows"): 1e-3,
    ("step", "flops"): 5 / 60e9,
}
"""Two x86-64 cores in fp32, of one role at a time; a start for `fit.py`."""
