"""Wait for machines that have not joined the cluster yet: schedulers start those of a job one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from vlmrl.cluster.session import Node, Session, alive_nodes
from vlmrl.errors import ClusterError, MachineError

_INTERVAL_S = 2.0


def wait_for_machines(
    machines: Session,
    place: Callable[[Session], object],
    *,
    num_nodes: int,
    limit_s: float,
    say: Callable[[str], None],
    joined: Callable[[], Sequence[Node]] = alive_nodes,
    interval_s: float = _INTERVAL_S,
) -> Session:
    """Return the session with all machines that have joined, as soon as the run fits on them.

    Args:
        machines: the session as Ray started it.
        place: plans the placement; raises ClusterError if the run does not fit.
        num_nodes: number of machines that a role requires. A machine without a GPU that is there first is no reason to
            plan the run without GPUs.
        limit_s: maximum wait in seconds; 0: the session is returned as it is.
        say: prints a line, once for each change.
        joined: returns the machines that have joined until now.

    Raises:
        MachineError: the run does not fit at the end of the wait.
    """
    end, told = time.monotonic() + limit_s, None
    while limit_s > 0 and (missing := _find_missing(machines, place, num_nodes)) is not None:
        left = end - time.monotonic()
        if left <= 0:
            raise MachineError(
                f"the machines of the run have not joined within train.wait_nodes_s {limit_s:g}: {missing}"
            )
        if told != machines.nodes:
            say(f"waiting up to {left:.0f} s for more machines: {missing}")
            told = machines.nodes
        time.sleep(min(interval_s, left))
        machines = replace(machines, nodes=tuple(joined()))
    return machines


def _find_missing(machines: Session, place: Callable[[Session], object], num_nodes: int) -> str | None:
    """Return what the run lacks on these machines, and which they are; None if it fits."""
    there = ", ".join(f"{node.address} ({_format_slots(node)})" for node in machines.nodes)
    if len(machines.nodes) < num_nodes:
        return f"a role requires {num_nodes} nodes, and {len(machines.nodes)} have joined: {there}"
    try:
        place(machines)
    except ClusterError as error:
        return f"{error}; there: {there}"
    return None


def _format_slots(node: Node) -> str:
    count, unit = (node.num_gpus, "GPU") if node.num_gpus else (node.num_cpus, "CPU core")
    return f"{count} {unit}{'' if count == 1 else 's'}"
