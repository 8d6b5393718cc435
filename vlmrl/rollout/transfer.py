"""How a bucket of weights gets from the engine's process into vLLM's workers on the same machine.

The bytes go through anonymous shared memory (`memfd_create`), which a worker opens as a file of the engine's process.
It has no name, so nothing can be left behind in /dev/shm however either process dies, and /dev/shm's size (64 MiB in
many containers) does not bound it. It serves engines on CPU and on GPU; only the CPU was measured. What keeps weights
on the GPUs all the way is `device_transfer`.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from vlmrl.errors import ClusterError
from vlmrl.models.weights import Bucket

Ticket = dict[str, Any]
"""What a worker needs to open a shared bucket: plain strings, numbers and lists, so that any RPC carries it."""


@contextmanager
def shared(bucket: Bucket) -> Iterator[Ticket]:
    """Share `bucket` with other processes of this machine for as long as the context lasts. Copies the bytes once.

    Raises ClusterError when the machine has no memory for it.
    """
    try:
        descriptor = os.memfd_create("vlmrl-bucket", os.MFD_CLOEXEC)
    except OSError as error:
        raise ClusterError(
            f"cannot share weights with the rollout engine: {error}; raise the limit on open files"
        ) from error
    try:
        try:
            # Through the file, not through a mapping of it: no page is cleared first, none faults (52 MB: 16 ms instead
            # of 31), and a lack of memory is an error and no SIGBUS.
            with open(descriptor, "wb", buffering=0, closefd=False) as file:
                rest = bucket.data.data
                while rest:
                    rest = rest[file.write(rest) :]
        except OSError as error:
            raise ClusterError(
                f"cannot share {bucket.num_bytes} bytes of weights with the rollout engine: {error}; "
                "free memory on this machine"
            ) from error
        yield {
            "process": os.getpid(),
            "descriptor": descriptor,
            "num_bytes": bucket.num_bytes,
            "names": list(bucket.names),
            "dtypes": list(bucket.dtypes),
            "shapes": [list(shape) for shape in bucket.shapes],
            "offsets": list(bucket.offsets),
        }
    finally:
        os.close(descriptor)


def opened(ticket: Ticket) -> Bucket:
    """The bucket behind a ticket, as a view of the shared memory: it stays valid after the sharing ends."""
    data = np.zeros(0, dtype=np.uint8)
    if ticket["num_bytes"]:
        with Path(f"/proc/{ticket['process']}/fd/{ticket['descriptor']}").open("rb") as file:
            # Copy-on-write, and nobody writes: torch wants its memory writable and this costs nothing.
            data = np.frombuffer(mmap.mmap(file.fileno(), ticket["num_bytes"], access=mmap.ACCESS_COPY), dtype=np.uint8)
    return Bucket(
        names=tuple(ticket["names"]),
        dtypes=tuple(ticket["dtypes"]),
        shapes=tuple(tuple(shape) for shape in ticket["shapes"]),
        offsets=tuple(ticket["offsets"]),
        data=data,
    )
