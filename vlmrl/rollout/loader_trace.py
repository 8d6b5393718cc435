"""Trace which rows of vLLM's parameters each received tensor is loaded to.

Loaders fuse, shard and rename, each in the code of its layer and model family. But every loader ends in `copy_` from a
view of the received tensor to a view of the parameter, and the two views give the rows. During vLLM's layerwise reload
the parameters are on the meta device, so this first pass moves no data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class Piece(NamedTuple):
    """Complete rows of a parameter, and the part of a received tensor that is copied to them."""

    parameter: str
    """Path of the parameter in vLLM's model."""
    first_row: int
    offset: int
    """Offset from the start of the received tensor, in elements."""
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """Return the part of the tensor as a matrix, [rows, columns]; a vector has one column."""
        part = tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)
        return part.reshape(self.size[0], -1)


class LoaderTrace(TorchDispatchMode):
    """Context that records which parts of one received tensor are copied to which parameters."""

    def __init__(self, parameters: dict[int, tuple[str, Tensor]], tensor: Tensor) -> None:
        """`parameters`: those of a model whose reload has begun, from `parameters_by_storage`."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = parameters
        self._tensor = tensor
        # All views of the tensor share this storage, also views of views.
        self._storage = _storage(tensor)
        self._copied: list[Piece] = []
        self._changed: set[str] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        if func is torch.ops.aten.copy_.default and _storage(args[0]) in self._parameters:
            self._record(args[0], args[1])
        return func(*args, **(kwargs or {}))

    @property
    def pieces(self) -> list[Piece]:
        """The recorded pieces, without parameters that a loader computes: these do not hold the tensor itself."""
        return [piece for piece in self._copied if piece.parameter not in self._changed]

    def _record(self, target: Tensor, source: Tensor) -> None:
        path, parameter = self._parameters[_storage(target)]
        if _storage(source) == _storage(target):
            return
        first_row = _first_row(parameter, target)
        is_part = _storage(source) == self._storage and source.dtype == self._tensor.dtype
        if not is_part or first_row is None or source.shape != target.shape:
            if parameter.is_meta:  # vLLM does not move biases to meta, and copies earlier ones again
                self._changed.add(path)
            return
        offset = int(source.storage_offset()) - int(self._tensor.storage_offset())
        piece = Piece(path, first_row, offset, tuple(source.shape), source.stride())
        if piece not in self._copied:  # a bias is copied once to count it and once to load it
            self._copied.append(piece)


def parameters_by_storage(model: nn.Module) -> dict[int, tuple[str, Tensor]]:
    """Storage -> path and tensor of each parameter."""
    return {
        _storage(parameter): (f"{path}.{name}" if path else name, parameter)
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
    }


def _first_row(parameter: Tensor, view: Tensor) -> int | None:
    """Return the first row of the view in the parameter; None when it is not a range of complete rows.

    The rows of fused experts, [E, rows, columns], are those of all experts one after the other.
    """
    if parameter.dim() == 3 and view.dim() == 2:
        parameter = parameter.flatten(0, 1)
    if not parameter.dim() or view.shape[1:] != parameter.shape[1:] or view.stride() != parameter.stride():
        return None
    first, rest = divmod(int(view.storage_offset()) - int(parameter.storage_offset()), max(parameter.stride(0), 1))
    return None if rest else first


def _storage(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number
