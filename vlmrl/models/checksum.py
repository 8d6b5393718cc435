"""The digest of a tensor where it lies: on a GPU only eight bytes of it come to the host."""

from __future__ import annotations

from functools import cache

import torch
import xxhash
from torch import Tensor

_CHUNK = 1 << 22
"""Elements that are looked at together: 32 MiB as int64."""
_STEP = -0x61C8864680B583EB
"""2^64 divided by the golden ratio, as a signed number: odd, so that no chunk's sum is lost by multiplying with it."""
_MIX = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
"""The multipliers of splitmix64 (Steele, Lea, Flood 2014), as signed numbers."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the integers that its bits are read as."""


def device_digest(name: str, tensor: Tensor) -> str:
    """Hexadecimal digest of a tensor's name, dtype, shape and bits; the same on every kind of device.

    It is not that of `models.weights.digest`. It guards against accidents, not against an adversary.
    """
    told = f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|{checksum(tensor)}"
    return xxhash.xxh3_128(told.encode()).hexdigest()


@torch.no_grad()
def checksum(tensor: Tensor) -> int:
    """Sum of the elements' bits, each weighted by where it stands, modulo 2^64: order counts, and so does each bit.

    Integers wrap around alike on CPU and GPU, and their sum is the same in whatever order it is taken.
    """
    bits = tensor.detach().contiguous().reshape(-1).view(_INTEGERS[tensor.element_size()])
    weights = _weights(bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for chunk in bits.split(_CHUNK):
        total = total * _STEP + (chunk.to(torch.int64) * weights[: chunk.numel()]).sum()
    return int(total)


@cache
def _weights(device: torch.device) -> Tensor:
    """[_CHUNK] odd numbers without a pattern: splitmix64 of their places."""
    numbers = torch.arange(1, _CHUNK + 1, dtype=torch.int64, device=device) * _STEP
    for shift, factor in zip((30, 27), _MIX, strict=True):
        numbers = (numbers ^ _shifted(numbers, shift)) * factor
    return (numbers ^ _shifted(numbers, 31)) | 1


def _shifted(numbers: Tensor, by: int) -> Tensor:
    """To the right with zeros coming in: int64 itself would repeat its sign."""
    return (numbers >> by) & ((1 << (64 - by)) - 1)
