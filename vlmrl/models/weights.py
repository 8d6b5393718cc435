"""Weights on the move: tensors laid end to end in buckets, and a fingerprint that both ends compute for themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 64
"""Bytes. A tensor that starts on a cache line can be viewed as any dtype."""


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Several named tensors in one block of bytes: one message instead of one per tensor."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """`float32`, `bfloat16`, ...: attributes of torch."""
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    """Where each tensor starts in `data`, in bytes."""
    data: NDArray[np.uint8]

    @property
    def num_bytes(self) -> int:
        return int(self.data.nbytes)


def tensor_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """The raw bytes of a tensor, [n]; a view where the tensor is contiguous and on the CPU."""
    flat: NDArray[np.uint8] = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat


def layout(tensors: Iterable[Tensor]) -> tuple[list[int], int]:
    """Where each tensor starts when they are laid end to end, and how much they take together, in bytes."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def pack_bucket(tensors: Iterable[tuple[str, Tensor]]) -> Bucket:
    """Lay the named tensors end to end. Copies each once."""
    named = [(name, tensor.detach()) for name, tensor in tensors]
    offsets, end = layout(tensor for _, tensor in named)
    data = np.zeros(end, dtype=np.uint8)
    for (_, tensor), offset in zip(named, offsets, strict=True):
        raw = tensor_bytes(tensor)
        data[offset : offset + raw.size] = raw
    return Bucket(
        names=tuple(name for name, _ in named),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in named),
        shapes=tuple(tuple(tensor.shape) for _, tensor in named),
        offsets=tuple(offsets),
        data=data,
    )


def unpack_bucket(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """The named tensors of a bucket, as views of its bytes: clone what must outlive them."""
    for name, dtype, shape, offset in zip(bucket.names, bucket.dtypes, bucket.shapes, bucket.offsets, strict=True):
        kind: torch.dtype = getattr(torch, dtype)
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        yield name, torch.from_numpy(bucket.data[offset : offset + size]).view(kind).reshape(shape)


def digest(name: str, tensor: Tensor) -> str:
    """Hexadecimal digest of a tensor's name, dtype, shape and bytes."""
    state = xxhash.xxh3_128(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
    state.update(tensor_bytes(tensor).data)
    return state.hexdigest()


def fingerprint(digests: Mapping[str, str]) -> str:
    """One digest of many tensors, whatever the order in which they came. A missing or changed tensor changes it.

    Args:
        digests: name -> `digest(name, tensor)`.
    """
    state = xxhash.xxh3_128()
    for name in sorted(digests):
        state.update(f"{name}:{digests[name]}\n".encode())
    return state.hexdigest()
