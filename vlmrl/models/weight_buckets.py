"""Buckets of tensors for weight sync, and the digests and fingerprints by which both ends verify it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 64
"""Bytes. A tensor that starts on a cache line can be viewed as any dtype."""
_CHUNK = 1 << 22
"""Elements of a partial sum: 32 MiB as int64."""
_STEP = -0x61C8864680B583EB
"""2^64 divided by the golden ratio, as a signed number: odd, so that multiplying a sum by it loses no bit."""
_MIX = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
"""The multipliers of splitmix64 (Steele, Lea, Flood 2014), as signed numbers."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> integer type that its bits are read as."""


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Several named tensors in one block of bytes: one message instead of one per tensor."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """`float32`, `bfloat16`, ...: attributes of torch."""
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    """Start of each tensor in `data`, in bytes."""
    data: NDArray[np.uint8]

    @property
    def num_bytes(self) -> int:
        return int(self.data.nbytes)


def tensor_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the raw bytes of a tensor, [n]; a view where the tensor is contiguous and on the CPU."""
    flat: NDArray[np.uint8] = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat


def layout(tensors: Iterable[Tensor]) -> tuple[list[int], int]:
    """Offsets of the tensors in one block, and the size of the block, in bytes."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def pack_bucket(tensors: Iterable[tuple[str, Tensor]]) -> Bucket:
    """Copy the named tensors into one block. Copies each once."""
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
    """Yield the named tensors of a bucket as views of its bytes: clone what must outlive them."""
    for name, dtype, shape, offset in zip(bucket.names, bucket.dtypes, bucket.shapes, bucket.offsets, strict=True):
        kind: torch.dtype = getattr(torch, dtype)
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        yield name, torch.from_numpy(bucket.data[offset : offset + size]).view(kind).reshape(shape)


def digest(name: str, tensor: Tensor) -> str:
    """Hash a tensor's name, dtype, shape and bytes; returns hexadecimal digits."""
    state = xxhash.xxh3_128(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
    state.update(tensor_bytes(tensor).data)
    return state.hexdigest()


def fingerprint(digests: Mapping[str, str]) -> str:
    """Combine digests, in any order, into one that a missing or changed tensor changes.

    Args:
        digests: name -> `digest(name, tensor)`.
    """
    state = xxhash.xxh3_128()
    for name in sorted(digests):
        state.update(f"{name}:{digests[name]}\n".encode())
    return state.hexdigest()


def device_digest(name: str, tensor: Tensor) -> str:
    """Hash a tensor's name, dtype, shape and bits where it is: from a GPU only eight bytes are copied to the host.

    The same on every device, but different from `digest`. It guards against accidents, not against an adversary.
    """
    content = f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|{checksum(tensor)}"
    return xxhash.xxh3_128(content.encode()).hexdigest()


@torch.no_grad()
def checksum(tensor: Tensor) -> int:
    """Sum the elements' bits, each weighted by its position, modulo 2^64, so that order and every bit count.

    Integers overflow identically on CPU and GPU, and their sum does not depend on the order of summation.
    """
    bits = tensor.detach().contiguous().reshape(-1).view(_INTEGERS[tensor.element_size()])
    weights = _weights(bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for chunk in bits.split(_CHUNK):
        total = total * _STEP + (chunk.to(torch.int64) * weights[: chunk.numel()]).sum()
    return int(total)


@cache
def _weights(device: torch.device) -> Tensor:
    """[_CHUNK] odd pseudo-random numbers: splitmix64 of the positions."""
    numbers = torch.arange(1, _CHUNK + 1, dtype=torch.int64, device=device) * _STEP
    for shift, factor in zip((30, 27), _MIX, strict=True):
        numbers = (numbers ^ _shift_right(numbers, shift)) * factor
    return (numbers ^ _shift_right(numbers, 31)) | 1


def _shift_right(numbers: Tensor, by: int) -> Tensor:
    """Logical shift, with zeros from the left; int64's own shift repeats the sign."""
    return (numbers >> by) & ((1 << (64 - by)) - 1)
