"""Rendezvous of the training ranks: a private file on one machine, a port of one address on several.

PyTorch's default store listens on every interface of the machine, without authentication.
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
"""PyTorch's `init_method` for this rendezvous, which is configured by environment variables."""


def address() -> str:
    """File or address of the rendezvous, for messages."""
    return os.environ.get(MEETING_FILE) or f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def open_store(timeout: timedelta) -> Store:
    """Open the store of this rank, RANK of WORLD_SIZE.

    Raises OSError when the port is taken, DistError or RuntimeError when other ranks do not join in time.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size == 1:
        return HashStore()
    if file := os.environ.get(MEETING_FILE):
        return FileStore(file, world_size)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    options: dict[str, Any] = {}
    if rank == 0:
        options["master_listen_fd"] = listen(host, port).detach()
    return TCPStore(host, port, world_size, is_master=rank == 0, timeout=timeout, **options)


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket at this address only. Raises OSError when the port is taken."""
    family, kind, protocol, _, socket_address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(socket_address)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            listener.close()
            raise
        # Behind NAT, other machines reach this one at an address that none of its interfaces has.
        listener.bind(("", port))
    listener.listen(socket.SOMAXCONN)
    return listener


def _rendezvous(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[Store, int, int]]:
    yield open_store(timeout), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    raise RuntimeError("ranks meet once")


register_rendezvous_handler(URL.removesuffix("://"), _rendezvous)
