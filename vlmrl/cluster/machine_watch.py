"""Detect the death of a machine of the run, stop all that waits for it, and report it in one line.

Ray itself needs 15 seconds if connections break, and more than a minute if the machine is silent. Meanwhile collectives
hang, or fail with an error that names a socket.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Literal

from vlmrl.cluster.placement import Place
from vlmrl.cluster.session import Node, Session
from vlmrl.errors import MachineError

Status = Literal["alive", "refused", "silent"]
"""A machine accepts a connection, refuses it, or does not respond."""

_INTERVAL_S = 2.0
_CONNECT_S = 2.0
_PATIENCE_S = 30.0
"""Maximum silence of a machine: one that is short of memory is silent for seconds."""
_SUSPECTED_S = 6.0
"""Maximum time of the search for a dead machine after an error."""
_LOCAL_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
"""Errors of this machine, which is out of files, memory or ports. They do not concern the other machine."""


class Watch:
    """A thread that probes the other machines of a run.

    Args:
        nodes: node -> its roles, in words.
        probe: returns the status of a node within seconds.
    """

    def __init__(
        self,
        nodes: Mapping[Node, str],
        *,
        probe: Callable[[Node], Status] | None = None,
        interval_s: float = _INTERVAL_S,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self._nodes = nodes
        self._probe = probe or probe_node
        self._interval_s, self._patience_s = interval_s, patience_s
        self._silent_since: dict[Node, float] = {}
        self._refused = dict.fromkeys(nodes, 0)
        self._stops: list[Callable[[], None]] = []
        self._lost: Node | None = None
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vlmrl-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()

    def on_loss(self, stop: Callable[[], None]) -> None:
        """Call `stop` when a machine dies, or now if one has died. It stops the workers of a role, which ends all waits
        for them."""
        # In this order, so that at least one of the two threads calls it.
        self._stops.append(stop)
        if self._lost is not None:
            stop()

    @property
    def lost(self) -> str | None:
        """The line about the dead machine and its roles; None if none has died."""
        if self._lost is None:
            return None
        return (
            f"machine {self._lost.address} died during the run, and with it {self._nodes[self._lost]}: "
            "the run is stopped; go on when the machine is back, or on the other machines if as many ranks fit there"
        )

    def find_loss(self, limit_s: float = _SUSPECTED_S) -> str | None:
        """Search for a dead machine after an error, for `limit_s` at most; returns `lost`."""
        end = time.monotonic() + limit_s
        while self._lost is None and time.monotonic() < end:
            self._probe_all(patience_s=limit_s / 2)
            # The error may come from the first process that ends on a dying machine: probe more than once.
            self._is_over.wait(min(0.5, self._interval_s))
        return self.lost

    def _run(self) -> None:
        while self._lost is None and not self._is_over.wait(self._interval_s):
            self._probe_all(patience_s=self._patience_s)

    def _probe_all(self, *, patience_s: float) -> None:
        """Probe all machines in parallel, so that silent ones do not delay the others."""
        with self._lock, ThreadPoolExecutor(len(self._nodes)) as pool:
            started = time.monotonic()
            statuses = list(pool.map(self._probe, self._nodes))
            now = time.monotonic()
            for node, status in zip(self._nodes, statuses, strict=True):
                # Counted from the first unanswered probe, not from the last response: this process may have been
                # suspended in between.
                since = self._silent_since.setdefault(node, started)
                if status != "silent":
                    del self._silent_since[node]
                self._refused[node] = self._refused[node] + 1 if status == "refused" else 0
                is_dead = self._refused[node] > 1 or (status == "silent" and now - since > patience_s)
                if is_dead and self._lost is None and not self._is_over.is_set():
                    self._lost = node
                    for stop in self._stops:
                        # An error with some workers must not keep the others running.
                        with suppress(Exception):
                            stop()


def probe_node(node: Node) -> Status:
    """Connect to Ray's process on a machine, with which its workers end."""
    try:
        socket.create_connection((node.address, node.port), timeout=_CONNECT_S).close()
    except ConnectionRefusedError:
        return "refused"
    except OSError as error:  # a timeout, no route, or an interface that is down
        return "alive" if error.errno in _LOCAL_ERRORS else "silent"
    return "alive"


@contextmanager
def watch_machines(machines: Session, places: Mapping[str, Sequence[Place]]) -> Iterator[Watch | None]:
    """Watch the other machines of a run within the context; None if there are none.

    Raises:
        MachineError: a machine has died. It replaces errors that follow from the death.
    """
    others = {machines.nodes[number]: roles for number, roles in roles_by_node(places).items() if number > 0}
    if not others:
        yield None
        return
    watch = Watch(others)
    watch.start()
    try:
        yield watch
    except Exception:
        # The death of a machine causes many kinds of errors: of sockets, actors, objects.
        lost = watch.find_loss()
        if lost is None:
            raise
        raise MachineError(lost) from None
    finally:
        watch.close()


def roles_by_node(places: Mapping[str, Sequence[Place]]) -> dict[int, str]:
    """Node -> its roles, such as `actor 1 and vllm 2, 3`, with the indices of workers within their role."""
    numbers: dict[int, dict[str, list[int]]] = {}
    for role, placed in places.items():
        for number, place in enumerate(placed):
            numbers.setdefault(place.node, {}).setdefault(role, []).append(number)
    return {
        node: " and ".join(f"{role} {', '.join(map(str, indices))}" for role, indices in roles.items())
        for node, roles in numbers.items()
    }
