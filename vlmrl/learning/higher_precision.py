"""Forward passes in a wider type than the weights', to measure how far rounding moves a model's outputs.

fp32 for weights in half precision, fp64 for weights in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from vlmrl.models.experts import plain_experts
from vlmrl.models.linear_attention import weights_read_by
from vlmrl.models.quantize import is_four_bit

_HALF = (torch.bfloat16, torch.float16)
_NARROWER = {torch.float32: _HALF, torch.float64: (*_HALF, torch.float32)}


@contextmanager
def higher_precision(net: nn.Module, to: torch.dtype = torch.float32) -> Iterator[None]:
    """Make passes without gradient compute in the type `to`, fp32 or fp64, within the context.

    Each layer's weights are converted only for its forward pass, so that one layer at a time takes more memory. Layers
    in 4 bits compute in that type too, with values that are not rounded to half precision. Under ZeRO-3 the gathered
    weights are converted.
    """
    handles = []
    for module in net.modules():
        if next(module.parameters(recurse=False), None) is not None:
            hooks = _LayerHooks(to)
            # ZeRO-3 gathers in a hook that was registered before, and releases in one that must run after these.
            handles.append(module.register_forward_pre_hook(hooks.before, with_kwargs=True))
            handles.append(module.register_forward_hook(hooks.after, prepend=True, always_call=True))
    try:
        with _reported_dtype(to), plain_experts(net) if to == torch.float64 else nullcontext():
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _reported_dtype(to: torch.dtype) -> Iterator[None]:
    """Let models report this type as theirs: SmolVLM converts the features of images to it before it places them."""
    before = PreTrainedModel.__dict__.get("dtype")
    PreTrainedModel.dtype = property(lambda net: to)
    try:
        yield
    finally:
        if before is None:
            del PreTrainedModel.dtype
        else:
            PreTrainedModel.dtype = before


class _LayerHooks:
    """Conversion of one layer's weights and inputs before its forward pass, and back after it."""

    def __init__(self, to: torch.dtype) -> None:
        self._to = to
        self._held: list[tuple[nn.Parameter, Tensor]] = []
        self._compute_dtype: torch.dtype | None = None

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for parameter in weights_read_by(module):
            if parameter.dtype in _NARROWER[self._to] and not is_four_bit(parameter):
                self._held.append((parameter, parameter.data))
                parameter.data = parameter.data.to(self._to)
        self._compute_dtype = getattr(module, "compute_dtype", None)
        if self._compute_dtype is not None:
            module.compute_dtype = self._to  # type: ignore[assignment]
        return tuple(map(self._widen, args)), {name: self._widen(value) for name, value in kwargs.items()}

    def after(self, module: nn.Module, *_: Any) -> None:
        for parameter, data in self._held:
            parameter.data = data
        self._held = []
        if self._compute_dtype is not None:
            module.compute_dtype = self._compute_dtype  # type: ignore[assignment]

    def _widen(self, value: Any) -> Any:
        return value.to(self._to) if isinstance(value, Tensor) and value.dtype in _NARROWER[self._to] else value
