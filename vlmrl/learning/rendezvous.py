"""Where training ranks meet: in a private file on one machine, at a port of one address on several.

PyTorch's own store listens on every interface of the machine, and believes whoever connects.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import FileStore, HashStore, Store, TCPStore
from torch.distributed.rendezvous import register_rendezvous_handler

from vlmrl.system.scratch import MEETING_FILE

URL = "vlmrl://"
"""The `init_method` of PyTorch that meets as the environment says."""


def place() -> str:
    """Where the environment says that the ranks meet, for messages."""
    return os.environ.get(MEETING_FILE) or f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def store(timeout: timedelta) -> Store:
    """The store of this rank, RANK of WORLD_SIZE.

    Raises OSError when the port is taken, DistError or RuntimeError when the other ranks do not come in time.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size == 1:
        return HashStore()
    if file := os.environ.get(MEETING_FILE):
        return FileStore(file, world_size)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    how: dict[str, Any] = {}
    if rank == 0:
        how["master_listen_fd"] = listener(host, port).detach()
    return TCPStore(host, port, world_size, is_master=rank == 0, timeout=timeout, **how)


def listener(host: str, port: int) -> socket.socket:
    """A listening socket at this address and no other. Raises OSError when the port is taken."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    found = socket.socket(family, kind, protocol)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            found.close()
            raise
        # Other machines know this one by an address that none of its interfaces has, as behind a translation.
        found.bind(("", port))
    found.listen(socket.SOMAXCONN)
    return found


def _meet(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[Store, int, int]]:
    yield store(timeout), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    raise RuntimeError("ranks meet once")


register_rendezvous_handler(URL.removesuffix("://"), _meet)
