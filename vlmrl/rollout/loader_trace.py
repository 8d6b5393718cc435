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
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = parameters
        self._tensor = tensor
        # The views that meet us below are of this storage, whatever they are views of in between.
        self._storage = _storage(tensor)
        self._copied: list[Piece] = []
        self._changed: set[str] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        if func is torch.ops.aten.copy_.default and _storage(args[0]) in self._parameters:
            self._note(args[0], args[1])
        return func(*args, **(kwargs or {}))

    @property
    def pieces(self) -> list[Piece]:
        """Without those of parameters that the loaders computed from what came: they hold something else."""
        return [piece for piece in self._copied if piece.parameter not in self._changed]

    def _note(self, target: Tensor, source: Tensor) -> None:
        path, parameter = self._parameters[_storage(target)]
        if _storage(source) == _storage(target):
            return
        first_row = _first_row(parameter, target)
        is_part = _storage(source) == self._storage and source.dtype == self._tensor.dtype
        if not is_part or first_row is None or source.shape != target.shape:
            if parameter.is_meta:  # vLLM leaves biases where they are, and copies those again that came earlier
                self._changed.add(path)
            return
        offset = int(source.storage_offset()) - int(self._tensor.storage_offset())
        piece = Piece(path, first_row, offset, tuple(source.shape), source.stride())
        if piece not in self._copied:  # a bias is copied once to count it and once to load it
            self._copied.append(piece)


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
    first, rest = divmod(int(view.storage_offset()) - int(parameter.storage_offset()), max(parameter.stride(0), 1))
    return None if rest else first


def _storage(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number
