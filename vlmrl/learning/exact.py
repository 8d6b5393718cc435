"""A pass in fp32 through a model whose weights are in half precision: how far its rounding moves what it says.

Of weights in fp32 a pass in fp64 tells the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vlmrl.models.quantize import is_four_bit

_HALF = (torch.bfloat16, torch.float16)
_NARROWER = {torch.float32: _HALF, torch.float64: (*_HALF, torch.float32)}


@contextmanager
def widened(net: nn.Module, to: torch.dtype = torch.float32) -> Iterator[None]:
    """Within the context, passes without gradient compute in the type `to`, fp32 or fp64: each layer's weights are
    widened when its turn comes and narrowed after it, so that one layer at a time takes more memory.

    Layers in 4 bits multiply in that type too, by values that are no longer rounded to half precision. Under ZeRO-3
    what is widened is what was gathered.
    """
    handles = []
    for module in net.modules():
        if next(module.parameters(recurse=False), None) is not None:
            wide = _Wide(to)
            # ZeRO-3 gathers in a hook of its own, which came first, and releases in one that must come last.
            handles.append(module.register_forward_pre_hook(wide.begin, with_kwargs=True))
            handles.append(module.register_forward_hook(wide.end, prepend=True, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Wide:
    """One layer, widened and narrowed."""

    def __init__(self, to: torch.dtype) -> None:
        self._to = to
        self._held: list[tuple[nn.Parameter, Tensor]] = []
        self._compute_dtype: torch.dtype | None = None

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for parameter in module.parameters(recurse=False):
            if parameter.dtype in _NARROWER[self._to] and not is_four_bit(parameter):
                self._held.append((parameter, parameter.data))
                parameter.data = parameter.data.to(self._to)
        self._compute_dtype = getattr(module, "compute_dtype", None)
        if self._compute_dtype is not None:
            module.compute_dtype = self._to  # type: ignore[assignment]
        return tuple(map(self._wide, args)), {name: self._wide(value) for name, value in kwargs.items()}

    def end(self, module: nn.Module, *_: Any) -> None:
        for parameter, data in self._held:
            parameter.data = data
        self._held = []
        if self._compute_dtype is not None:
            module.compute_dtype = self._compute_dtype  # type: ignore[assignment]

    def _wide(self, value: Any) -> Any:
        return value.to(self._to) if isinstance(value, Tensor) and value.dtype in _NARROWER[self._to] else value
