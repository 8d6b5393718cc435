"""The head of a cluster that the user started: whether it answers, and the wait for it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from vlmrl.errors import ClusterError, MachineError

_ANSWER_S = 10.0
_INTERVAL_S = 2.0


def wait_for_head(
    address: str, *, limit_s: float = 0.0, say: Callable[[str], None] = print, interval_s: float = _INTERVAL_S
) -> None:
    """Return once a process answers at this address: Ray would try for minutes without a word.

    Args:
        address: the value of RAY_ADDRESS. `auto`, and names that Ray explains itself, are not tried.
        limit_s: maximum wait in seconds; 0: one try.
        say: prints a line, once.

    Raises:
        ClusterError: nobody answers.
        MachineError: nobody has answered at the end of the wait.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        return
    end, told = time.monotonic() + limit_s, False
    while (reason := _why_silent(host.strip("[]"), int(port))) is not None:
        left = end - time.monotonic()
        if left <= 0:
            remedy = "start it with ray start --head, or unset RAY_ADDRESS to run on this machine alone"
            if not limit_s:
                raise ClusterError(f"RAY_ADDRESS {address}: no Ray answers there ({reason}): {remedy}")
            raise MachineError(
                f"RAY_ADDRESS {address}: no Ray has answered there within train.wait_nodes_s {limit_s:g} ({reason}): "
                f"{remedy}"
            )
        if not told:
            say(f"waiting up to {left:.0f} s for the head of the cluster at {address}: {reason}")
            told = True
        time.sleep(min(interval_s, left))


def _why_silent(host: str, port: int) -> str | None:
    """Return why no process answers there; None if one does."""
    try:
        socket.create_connection((host, port), timeout=_ANSWER_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None
