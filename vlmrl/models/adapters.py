"""Adapters in a model: added, disabled, and as a change of a weight. Folders: `models.adapter_files`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vlmrl.errors import ConfigError
from vlmrl.models.adapter_plan import PREFIX, AdapterPlan
from vlmrl.models.quantize import dequantized, is_four_bit

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer
    from transformers import PreTrainedModel

_NAME = "default"
"""PEFT's name of a model's single adapter."""
HALVES = ("lora_A", "lora_B")
MAGNITUDE = "lora_magnitude_vector"


def inject_adapter(net: PreTrainedModel, plan: AdapterPlan) -> None:
    """Add a new adapter, which changes nothing yet, to the planned layers, and freeze everything else.

    The model keeps its class; the adapter has the dtype that the model computes in. Raises ConfigError when the model
    lacks one of the layers, or one of them is frozen.
    """
    from peft import inject_adapter_in_model

    modules = dict(net.named_modules())
    for target in plan.targets:
        if target not in modules:
            raise ConfigError(f"the adapter is for a layer {target}, which {type(net).__name__} does not have")
        weight: Any = modules[target].weight
        if not (weight.requires_grad or is_four_bit(weight)):
            raise ConfigError(f"{target} is frozen, and an adapter would change it: leave it out of its targets")
    inject_adapter_in_model(lora_config(plan), net)
    adapted = _adapted(net)
    assert adapted.keys() == set(plan.targets), f"PEFT adapted {sorted(adapted.keys() ^ set(plan.targets))[:3]}"
    net.requires_grad_(False)
    dtype = net.get_input_embeddings().weight.dtype
    for _, parameter in adapter_tensors(net):
        parameter.data = parameter.data.to(dtype)
        parameter.requires_grad_(True)


@contextmanager
def adapters_off(net: nn.Module) -> Iterator[None]:
    """Disable the adapters within the context, so that the model is its base.

    PEFT's own switch also turns off the adapters' gradients, which would confuse DeepSpeed.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in net.modules() if isinstance(module, BaseTunerLayer)]
    assert layers, "the model has no adapter to disable"
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def adapter_tensors(net: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of the adapters under their names in PEFT's files, in the order of the model's layers."""
    tensors: list[tuple[str, nn.Parameter]] = []
    for name, layer in _adapted(net).items():
        tensors += [(f"{PREFIX}{name}.{half}.weight", getattr(layer, half)[_NAME].weight) for half in HALVES]
        if _NAME in layer.lora_magnitude_vector:
            tensors.append((f"{PREFIX}{name}.{MAGNITUDE}", layer.lora_magnitude_vector[_NAME].weight))
    return tensors


@torch.no_grad()
def delta(layer: nn.Module) -> Tensor:
    """Compute the adapter's change of a layer's weight, [out, in] in fp32. The layer's parameters must be gathered."""
    lora: Any = layer
    has_magnitude = _NAME in lora.lora_magnitude_vector
    return low_rank_delta(
        lora.lora_A[_NAME].weight,
        lora.lora_B[_NAME].weight,
        scaling=lora.scaling[_NAME],
        weight=dequantized(lora.get_base_layer().weight) if has_magnitude else None,
        magnitude=lora.lora_magnitude_vector[_NAME].weight if has_magnitude else None,
    )


def low_rank_delta(
    a: Tensor, b: Tensor, *, scaling: float, weight: Tensor | None = None, magnitude: Tensor | None = None
) -> Tensor:
    """Compute scaling * B @ A, or DoRA's change of `weight` (arXiv:2402.09353, equation 5); [out, in] in fp32.

    Args:
        a: [rank, in]
        b: [out, rank]
        weight: [out, in] of the base, for DoRA.
        magnitude: [out] of DoRA; None for LoRA.
    """
    added = scaling * (b.float() @ a.float())
    if magnitude is None:
        return added
    assert weight is not None
    moved = weight.float() + added
    scale = magnitude.float() / torch.linalg.vector_norm(moved, dim=1)
    return scale[:, None] * moved - weight.float()


def lora_config(plan: AdapterPlan) -> LoraConfig:
    """Make PEFT's configuration of the adapter."""
    from peft import LoraConfig

    return LoraConfig(
        r=plan.rank,
        lora_alpha=plan.alpha,
        lora_dropout=plan.dropout,
        use_rslora=plan.is_rank_stabilized,
        use_dora=plan.has_magnitude,
        # PEFT shortens a list of more than twenty names to suffixes, which tower and language model share.
        target_modules=exact_pattern(plan.targets),
    )


def exact_pattern(names: Iterable[str]) -> str:
    """Make a short regular expression that matches exactly these names.

    `a.0.q a.0.k a.1.q a.1.k` becomes `a\\.(?:0|1)(?:\\.q|\\.k)`.
    """
    numbers: dict[tuple[str, str], list[str]] = {}
    for name in dict.fromkeys(names):
        match = re.fullmatch(r"(.*?\.)(\d+)(\..*)", name)
        before, number, after = match.groups() if match else (name, "", "")
        numbers.setdefault((before, after), []).append(number)
    suffixes: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (before, after), indices in numbers.items():
        suffixes.setdefault((before, tuple(indices)), []).append(after)
    return "|".join(
        re.escape(before) + _any_of(indices) + _any_of(after) for (before, indices), after in suffixes.items()
    )


def _any_of(parts: Iterable[str]) -> str:
    escaped = [re.escape(part) for part in parts]
    return escaped[0] if len(escaped) == 1 else f"(?:{'|'.join(escaped)})"


def _adapted(net: nn.Module) -> dict[str, LoraLayer]:
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in net.named_modules() if isinstance(module, LoraLayer)}
