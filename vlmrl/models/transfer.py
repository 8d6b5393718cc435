"""Buckets of weights in memory that the other processes of a machine can open: how they reach vLLM's workers.

The memory is anonymous (`memfd_create`): a reader opens it as a file of the process that made it. It has no name, so
nothing can be left behind in /dev/shm however a process ends, /dev/shm's size (64 MiB in many containers) does not
bound it, and only processes of the same user can open it. It serves engines on CPU and on GPU; only the CPU was
measured. Weights stay on the GPUs all the way with `rollout.transfer`.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vlmrl.errors import ClusterError
from vlmrl.models.weights import Bucket, digest, layout

Ticket = dict[str, Any]
"""What a reader needs to open a shared bucket: plain strings, numbers and lists, so that any RPC carries it."""

NUM_UNDER_WAY = 3
"""Buckets that have memory of their own at a time: one is packed, one waits, one is loaded."""
_MOST_KEPT = 256 * 2**20
"""Bytes. Larger blocks are of single tensors: their owner gives them back when a weight sync is over."""


class Outbox:
    """Buckets that other processes of this machine can read, each until it is released.

    Later buckets take the memory of released ones: pages that are new cost several times what copying into them does
    (300 MB on two cores: 0.23 to 1.3 s instead of 0.09).
    """

    def __init__(self) -> None:
        self._free: list[_Block] = []
        self._held: dict[int, _Block] = {}
        """By the number of the bucket since `begin`."""
        self._num_put = 0

    def put(self, tensors: Sequence[tuple[str, Tensor]]) -> tuple[Ticket, dict[str, str]]:
        """Copy the named tensors, once, from whatever device they are on; how to open them, and a digest of each.

        The digest is of the tensor itself where it lies in CPU memory, else of what arrived.

        Raises ClusterError when the machine has no memory for them.
        """
        offsets, size = layout([tensor for _, tensor in tensors])
        block = self._block(self._num_put, size)
        self._num_put += 1
        digests: dict[str, str] = {}
        for (name, tensor), offset in zip(tensors, offsets, strict=True):
            source = tensor.detach()
            landing = block.view(offset, source)
            landing.copy_(source)
            lies_here = source.device.type == "cpu" and source.is_contiguous()
            digests[name] = digest(name, source if lies_here else landing)
        described = {
            "names": [name for name, _ in tensors],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            "shapes": [list(tensor.shape) for _, tensor in tensors],
            "offsets": offsets,
        }
        return block.ticket(size) | described, digests

    def put_bucket(self, bucket: Bucket, number: int) -> Ticket:
        """Copy bucket `number`, which came from another machine: they may come in any order.

        Raises ClusterError as `put` does.
        """
        block = self._block(number, bucket.num_bytes)
        np.copyto(block.bytes[: bucket.num_bytes], bucket.data)
        return block.ticket(bucket.num_bytes) | {
            "names": list(bucket.names),
            "dtypes": list(bucket.dtypes),
            "shapes": [list(shape) for shape in bucket.shapes],
            "offsets": list(bucket.offsets),
        }

    def release(self, count: int) -> None:
        """Say that nobody reads the first `count` buckets since `begin` any more."""
        self._free += [self._held.pop(number) for number in sorted(self._held) if number < count]

    def begin(self, *, keep_bytes: int = 0) -> None:
        """Release all buckets, and give back the memory of those that are larger than `keep_bytes`."""
        blocks, self._held, self._num_put = [*self._free, *self._held.values()], {}, 0
        self._free = [block for block in blocks if block.num_bytes <= keep_bytes]
        for block in blocks:
            if block.num_bytes > keep_bytes:
                block.close()

    def _block(self, number: int, num_bytes: int) -> _Block:
        """For bucket `number` a free block, as small as will do; without one, a new one in the place of the largest."""
        self._free.sort(key=lambda block: block.num_bytes)
        fitting = [n for n, block in enumerate(self._free) if block.num_bytes >= num_bytes]
        if fitting:
            block = self._free.pop(fitting[0])
        else:
            if self._free:
                self._free.pop().close()
            block = _Block(num_bytes)
        self._held[number] = block
        return block


class _Block:
    """Memory without a name. It lives as long as this process holds it open, or another has it mapped."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        try:
            self._descriptor = os.memfd_create("vlmrl-bucket", os.MFD_CLOEXEC)
        except OSError as error:
            raise ClusterError(
                f"cannot share weights with the rollout engines: {error}; raise the limit on open files"
            ) from error
        try:
            os.fchmod(self._descriptor, 0o600)
            self.bytes = np.zeros(0, dtype=np.uint8)
            if num_bytes:
                # All of it now: a lack of memory is an error here, and a SIGBUS where pages come one by one.
                os.posix_fallocate(self._descriptor, 0, num_bytes)
                mapped = mmap.mmap(self._descriptor, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
                self.bytes = np.frombuffer(mapped, dtype=np.uint8)
        except OSError as error:
            os.close(self._descriptor)
            raise ClusterError(
                f"cannot share {num_bytes} bytes of weights with the rollout engines: {error}; "
                "free memory on this machine"
            ) from error

    def view(self, offset: int, like: Tensor) -> Tensor:
        """The bytes from `offset` on as a tensor of the same dtype and shape."""
        end = offset + like.numel() * like.element_size()
        return torch.from_numpy(self.bytes[offset:end]).view(like.dtype).reshape(like.shape)

    def ticket(self, num_bytes: int) -> Ticket:
        return {"process": os.getpid(), "descriptor": self._descriptor, "num_bytes": num_bytes}

    def close(self) -> None:
        """The mapping goes with its last view."""
        self.bytes = np.zeros(0, dtype=np.uint8)
        os.close(self._descriptor)


class Reader:
    """Opens shared buckets.

    It keeps the memory mapped that it has seen last: mapping it anew costs more than reading it (300 MB: 38 ms instead
    of 14, and as much again to undo it).
    """

    def __init__(self) -> None:
        self._mapped: dict[tuple[int, int], NDArray[np.uint8]] = {}
        """Device and inode, which no other memory has for as long as it is mapped -> the memory. The last is newest."""

    def open(self, ticket: Ticket) -> Bucket:
        """The bucket behind a ticket, as a view of the shared memory.

        Once the bucket is released others are written over it: copy what must last longer.
        """
        data = np.zeros(0, dtype=np.uint8)
        if ticket["num_bytes"]:
            data = self._memory(Path(f"/proc/{ticket['process']}/fd/{ticket['descriptor']}"))[: ticket["num_bytes"]]
        return Bucket(
            names=tuple(ticket["names"]),
            dtypes=tuple(ticket["dtypes"]),
            shapes=tuple(tuple(shape) for shape in ticket["shapes"]),
            offsets=tuple(ticket["offsets"]),
            data=data,
        )

    def _memory(self, path: Path) -> NDArray[np.uint8]:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            key = (about.st_dev, about.st_ino)
            found = self._mapped.pop(key, None)
            if found is None:
                # Copy-on-write, and nobody writes: torch wants its memory writable and this costs nothing.
                found = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=np.uint8)
        if about.st_size <= _MOST_KEPT:
            self._mapped[key] = found
            for oldest in list(self._mapped)[:-NUM_UNDER_WAY]:
                del self._mapped[oldest]
        return found


def opened(ticket: Ticket) -> Bucket:
    """The bucket behind a ticket, for who opens no other: see `Reader.open`."""
    return Reader().open(ticket)
