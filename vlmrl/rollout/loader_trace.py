"""Where vLLM's loaders put each received tensor, seen by watching them copy.

A loader fuses, shards and renames: which rows of which parameter a tensor of the checkpoint goes to is known to the
code of each layer and model family. Every loader ends in `copy_` from a view of the received tensor to a view of the
parameter, and the two views say it all. During vLLM's layerwise reload the parameters are on the meta device, so that
this first pass moves no data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class Piece(NamedTuple):
    """Whole rows of a parameter, and the part of a received tensor that goes there."""

    parameter: str
    """Its path in vLLM's model."""
    first_row: int
    offset: int
    """Elements from the start of the received tensor."""
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """That part of the received tensor as a matrix, [rows, columns]; a tensor of one axis has one column."""
        part = tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)
        return part.reshape(self.size[0], -1)


class LoaderTrace(TorchDispatchMode):
    """Within the context, notes which parts of one received tensor are copied to which parameters."""

    def __init__(self, parameters: dict[int, tuple[str, Tensor]], tensor: Tensor) -> None:
        """`parameters` are those of a model whose reload has begun (`parameters_by_storage`)."""
        super().__init__()
        self._parameters = parameters
        self._tensor = tensor
        # The views that meet us below are of this storage, whatever they are views of in between.
        self._storage = _storage(tensor)
        self.pieces: list[Piece] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        if func is torch.ops.aten.copy_.default:
            piece = self._piece(args[0], args[1])
            if piece is not None and piece not in self.pieces:  # a bias is copied once to count it and once to load it
                self.pieces.append(piece)
        return func(*args, **(kwargs or {}))

    def _piece(self, target: Tensor, source: Tensor) -> Piece | None:
        """None where something else is copied, or in a way that is not whole rows of one parameter."""
        if _storage(target) not in self._parameters or _storage(source) != self._storage:
            return None
        path, parameter = self._parameters[_storage(target)]
        first_row = _first_row(parameter, target)
        if first_row is None or source.shape != target.shape or source.dtype != self._tensor.dtype:
            return None
        offset = source.storage_offset() - self._tensor.storage_offset()
        return Piece(path, first_row, offset, tuple(source.shape), source.stride())


def parameters_by_storage(model: nn.Module) -> dict[int, tuple[str, Tensor]]:
    """Path and tensor of every parameter, by the storage that loaders will copy to."""
    return {
        _storage(parameter): (f"{path}.{name}" if path else name, parameter)
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
    }


def _first_row(parameter: Tensor, view: Tensor) -> int | None:
    """Where the view's rows start, or None when it is no run of whole rows."""
    if not parameter.dim() or view.shape[1:] != parameter.shape[1:] or view.stride() != parameter.stride():
        return None
    first, rest = divmod(view.storage_offset() - parameter.storage_offset(), max(parameter.stride(0), 1))
    return None if rest else first


def _storage(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number
