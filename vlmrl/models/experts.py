"""Mixtures of experts: which modules choose the experts of a token, and the kernel that applies them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder


def routers(net: nn.Module) -> list[nn.Module]:
    """Return the modules that choose experts, in the order of the layers: those whose logits Transformers records."""
    kinds: set[type] = set()
    for module in net.modules():
        if isinstance(module, PreTrainedModel):
            recorder: Any = (module._can_record_outputs or {}).get("router_logits")
            if isinstance(recorder, OutputRecorder):
                kinds.add(recorder.target_class)
    return [module for module in net.modules() if type(module) in kinds]


@contextmanager
def plain_experts(net: nn.Module) -> Iterator[None]:
    """Context in which experts are applied one after the other by matrix products of any type.

    Transformers' default, `torch.nn.functional.grouped_mm`, has no kernel for fp64.
    """
    models = [module for module in net.modules() if isinstance(module, PreTrainedModel)]
    before = [(model.config, model.config._experts_implementation) for model in models] if routers(net) else []
    for config, _ in before:
        config._experts_implementation_internal = "eager"
    try:
        yield
    finally:
        for config, implementation in before:
            config._experts_implementation_internal = implementation
