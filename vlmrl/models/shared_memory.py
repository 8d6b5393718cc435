"""Buckets of weights in shared memory, from the trainer to vLLM's workers on the same machine.

The memory is anonymous (`memfd_create`): a reader opens it as a file descriptor of the process that made it. It has no
name, so nothing is left behind in /dev/shm however a process ends, the size of /dev/shm (64 MiB in many containers) is
no limit, and only processes of the same user can open it. It serves engines on CPU and on GPU; only CPU was measured.
`rollout.gpu_transfer` sends weights from GPU to GPU instead.
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
from vlmrl.models.weight_buckets import Bucket, digest, layout

Ticket = dict[str, Any]
"""Everything that a reader needs to open a shared bucket, as strings, numbers and lists, which any RPC can carry."""

NUM_IN_FLIGHT = 3
"""Buckets that exist at the same time: one is packed, one waits, one is loaded."""
_MAX_KEPT = 256 * 2**20
"""Bytes. Larger blocks hold single tensors; their owner frees them at the end of a weight sync."""


class Outbox:
    """Buckets that other processes of this machine can read until they are released.

    New buckets reuse the memory of released ones: allocating pages takes several times longer than copying into them
    (300 MB on two cores: 0.23 to 1.3 s instead of 0.09).
    """

    def __init__(self) -> None:
        self._free: list[_Block] = []
        self._in_use: dict[int, _Block] = {}
        """By number of the bucket since `begin`."""
        self._num_put = 0

    def put(self, tensors: Sequence[tuple[str, Tensor]]) -> tuple[Ticket, dict[str, str]]:
        """Copy the named tensors, once, from any device; returns the ticket that opens them, and their digests.

        A digest is of the tensor itself if that is in CPU memory, else of the copy.

        Raises ClusterError when the machine lacks the memory.
        """
        offsets, size = layout([tensor for _, tensor in tensors])
        block = self._block(self._num_put, size)
        self._num_put += 1
        digests: dict[str, str] = {}
        for (name, tensor), offset in zip(tensors, offsets, strict=True):
            source = tensor.detach()
            copy = block.view(offset, source)
            copy.copy_(source)
            is_in_memory = source.device.type == "cpu" and source.is_contiguous()
            digests[name] = digest(name, source if is_in_memory else copy)
        description = {
            "names": [name for name, _ in tensors],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            "shapes": [list(tensor.shape) for _, tensor in tensors],
            "offsets": offsets,
        }
        return block.ticket(size) | description, digests

    def put_bucket(self, bucket: Bucket, number: int) -> Ticket:
        """Copy bucket `number`, received from another machine. Buckets may arrive in any order.

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
        """Release the first `count` buckets since `begin`: no reader may use them any more."""
        self._free += [self._in_use.pop(number) for number in sorted(self._in_use) if number < count]

    def begin(self, *, keep_bytes: int = 0) -> None:
        """Release all buckets, and free the memory of those larger than `keep_bytes`."""
        blocks, self._in_use, self._num_put = [*self._free, *self._in_use.values()], {}, 0
        self._free = [block for block in blocks if block.num_bytes <= keep_bytes]
        for block in blocks:
            if block.num_bytes > keep_bytes:
                block.close()

    def _block(self, number: int, num_bytes: int) -> _Block:
        """Take the smallest free block that fits bucket `number`; if none does, replace the largest by a new one."""
        self._free.sort(key=lambda block: block.num_bytes)
        fitting = [n for n, block in enumerate(self._free) if block.num_bytes >= num_bytes]
        if fitting:
            block = self._free.pop(fitting[0])
        else:
            if self._free:
                self._free.pop().close()
            block = _Block(num_bytes)
        self._in_use[number] = block
        return block


class _Block:
    """Anonymous memory. It exists as long as this process keeps it open or another has it mapped."""

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
                # Allocate all of it now: a lack of memory is an error here, but a SIGBUS when a page is first used.
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
        """View the bytes from `offset` on as a tensor with the dtype and shape of `like`."""
        end = offset + like.numel() * like.element_size()
        return torch.from_numpy(self.bytes[offset:end]).view(like.dtype).reshape(like.shape)

    def ticket(self, num_bytes: int) -> Ticket:
        return {"process": os.getpid(), "descriptor": self._descriptor, "num_bytes": num_bytes}

    def close(self) -> None:
        """Close the descriptor. The memory is unmapped with its last view."""
        self.bytes = np.zeros(0, dtype=np.uint8)
        os.close(self._descriptor)


class Reader:
    """Reader of shared buckets.

    It keeps the latest blocks mapped: mapping a block again takes longer than reading it (300 MB: 38 ms instead of 14,
    and as much again to unmap it).
    """

    def __init__(self) -> None:
        self._mapped: dict[tuple[int, int], NDArray[np.uint8]] = {}
        """(device, inode), which is unique while the memory is mapped -> the memory. The last is newest."""

    def open(self, ticket: Ticket) -> Bucket:
        """Open the bucket of a ticket as a view of the shared memory.

        Once the bucket is released, others overwrite it: copy what must last longer.
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
            status = os.fstat(file.fileno())
            key = (status.st_dev, status.st_ino)
            memory = self._mapped.pop(key, None)
            if memory is None:
                # Copy-on-write, but never written to: torch requires writable memory, and this costs nothing.
                memory = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=np.uint8)
        if status.st_size <= _MAX_KEPT:
            self._mapped[key] = memory
            for oldest in list(self._mapped)[:-NUM_IN_FLIGHT]:
                del self._mapped[oldest]
        return memory


def open_ticket(ticket: Ticket) -> Bucket:
    """Open a single bucket: see `Reader.open`."""
    return Reader().open(ticket)
