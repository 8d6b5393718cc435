"""Notices that a machine of the run has died, ends what waits for it, and says so in one line.

Ray notices by itself, after 15 seconds where connections break and after more than a minute where nothing answers any
more. Meanwhile a collective waits for ever, or breaks with an error that names a socket.
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
from vlmrl.errors import ClusterError

Sign = Literal["there", "gone", "silent"]
"""A machine takes a connection, refuses it, or does not answer."""

_INTERVAL_S = 2.0
_ANSWER_S = 2.0
_PATIENCE_S = 30.0
"""So long a machine may be silent: one that is short of memory is, for seconds."""
_DOUBT_S = 6.0
"""The same when something has just gone wrong; and how long the search for the cause takes then at most."""
_OUR_OWN = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
"""Errors of this machine, which is short of files, memory or ports: they say nothing of the other one."""


class Watch:
    """The machines beside this one, asked again and again in a thread of its own.

    Args:
        nodes: those that are asked, each with what it does, in words.
        ask: how; takes seconds at most.
    """

    def __init__(
        self,
        nodes: Mapping[Node, str],
        *,
        ask: Callable[[Node], Sign] | None = None,
        interval_s: float = _INTERVAL_S,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self._nodes = nodes
        self._ask = ask or sign_of
        self._interval_s, self._patience_s = interval_s, patience_s
        self._silent_since: dict[Node, float] = {}
        self._refused = dict.fromkeys(nodes, 0)
        self._ends: list[Callable[[], None]] = []
        self._lost: Node | None = None
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vlmrl-watch", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()

    def at_loss(self, end: Callable[[], None]) -> None:
        """Have `end` called when a machine has died, or has died already: it ends the workers of a role, and with them
        every wait."""
        # In this order, so that one of the two threads calls it.
        self._ends.append(end)
        if self._lost is not None:
            end()

    @property
    def lost(self) -> str | None:
        """The line that says which machine has died, and what was on it."""
        if self._lost is None:
            return None
        return (
            f"machine {self._lost.address} died in the middle of the run, and with it {self._nodes[self._lost]}: "
            "everything is ended; go on from the last checkpoint with --ckpt.load_enable when the machine is back, or "
            "on the others where as many ranks fit there"
        )

    def why(self, limit_s: float = _DOUBT_S) -> str | None:
        """Something has gone wrong: `lost`, when a machine has died just now. Looks for a few seconds at most."""
        end = time.monotonic() + limit_s
        while self._lost is None and time.monotonic() < end:
            self._look(patience_s=limit_s / 2)
            # What broke may have been the first of a dying machine's processes: one look is not enough.
            self._is_over.wait(min(0.5, self._interval_s))
        return self.lost

    def _run(self) -> None:
        while self._lost is None and not self._is_over.wait(self._interval_s):
            self._look(patience_s=self._patience_s)

    def _look(self, *, patience_s: float) -> None:
        """Ask every machine once, all at the same time: where many are silent, each would wait for those before it."""
        with self._lock, ThreadPoolExecutor(len(self._nodes)) as pool:
            asked = time.monotonic()
            signs = list(pool.map(self._ask, self._nodes))
            now = time.monotonic()
            for node, sign in zip(self._nodes, signs, strict=True):
                # Counted from the first question without an answer, not from the last answer: this process may have
                # been stopped or busy in between.
                since = self._silent_since.setdefault(node, asked)
                if sign != "silent":
                    del self._silent_since[node]
                self._refused[node] = self._refused[node] + 1 if sign == "gone" else 0
                is_dead = self._refused[node] > 1 or (sign == "silent" and now - since > patience_s)
                if is_dead and self._lost is None and not self._is_over.is_set():
                    self._lost = node
                    for end in self._ends:
                        # Workers that cannot be ended must not keep the others.
                        with suppress(Exception):
                            end()


def sign_of(node: Node) -> Sign:
    """Whether Ray's own process on a machine takes a connection: the machine's workers end with it."""
    try:
        socket.create_connection((node.address, node.port), timeout=_ANSWER_S).close()
    except ConnectionRefusedError:
        return "gone"
    except OSError as error:  # a time-out, no route, an interface that is down
        return "there" if error.errno in _OUR_OWN else "silent"
    return "there"


@contextmanager
def watched(machines: Session, places: Mapping[str, Sequence[Place]]) -> Iterator[Watch | None]:
    """Watch the machines of a run within the context; None where there is nobody to watch.

    Raises:
        ClusterError: a machine has died. It is raised in place of whatever went wrong because of that.
    """
    others = {machines.nodes[number]: roles for number, roles in roles_by_node(places).items() if number > 0}
    if not others:
        yield None
        return
    watch = Watch(others)
    watch.begin()
    try:
        yield watch
    except Exception:
        # A machine that dies breaks many things, each with an error of its own: sockets, actors, objects.
        lost = watch.why()
        if lost is None:
            raise
        raise ClusterError(lost) from None
    finally:
        watch.close()


def roles_by_node(places: Mapping[str, Sequence[Place]]) -> dict[int, str]:
    """Node -> its roles: `actor 1 and vllm 2, 3`, where workers count from 0 within their role."""
    numbers: dict[int, dict[str, list[int]]] = {}
    for role, placed in places.items():
        for number, place in enumerate(placed):
            numbers.setdefault(place.node, {}).setdefault(role, []).append(number)
    return {
        node: " and ".join(f"{role} {', '.join(map(str, held))}" for role, held in roles.items())
        for node, roles in numbers.items()
    }
