"""One Ray session: a cluster of our own for the length of the run, or the cluster that the user started."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from vlmrl import startup
from vlmrl.cluster import OF_OUR_OWN
from vlmrl.cluster.deaths import Roster
from vlmrl.cluster.devices import gpu_names, visible_gpus
from vlmrl.errors import ClusterError
from vlmrl.startup.driver import gpu_fault_and_fix, hides_gpus, installed_driver
from vlmrl.system import machine, stops
from vlmrl.system.scratch import VARIABLE, remove_here, scratch
from vlmrl.system.stops import Stopped

_CLEAR_S = 10.0


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of the session."""

    id: str
    """Ray's own id of it."""
    num_cpus: int
    num_gpus: int
    address: str = ""
    """By which the others reach it."""
    port: int = 0
    """Of Ray's own process on it."""
    gpus: tuple[str, ...] = ()
    """What CUDA_VISIBLE_DEVICES calls each of its GPUs there; their numbers when empty."""

    def gpu(self, slot: int) -> str:
        """What CUDA_VISIBLE_DEVICES calls the GPU of this slot."""
        return self.gpus[slot] if self.gpus else str(slot)


@dataclass(frozen=True, slots=True)
class Session:
    """The machines of a run."""

    nodes: tuple[Node, ...]
    roster: Roster = field(default_factory=Roster, compare=False, repr=False)
    """The workers that have started, and which of them has died."""

    @property
    def has_gpus(self) -> bool:
        return any(node.num_gpus for node in self.nodes)

    @property
    def slots(self) -> list[int]:
        """Slots per node: GPUs where there are any, else CPU cores."""
        return [node.num_gpus if self.has_gpus else node.num_cpus for node in self.nodes]

    @property
    def unit(self) -> str:
        return "GPU" if self.has_gpus else "CPU core"


def local_session() -> Session:
    """This machine as a session would see it, without starting anything: what a dry run plans with.

    Raises:
        ClusterError: it has a GPU that torch cannot use.
    """
    import torch

    count = torch.cuda.device_count()
    if count and not torch.cuda.is_available():  # torch counts devices that it cannot use, too
        raise ClusterError(": ".join(gpu_fault_and_fix(torch.version.cuda, installed_driver())))
    gpus = gpu_names(os.environ.get("CUDA_VISIBLE_DEVICES"), count, where="this machine")
    return Session((Node(id="", num_cpus=os.cpu_count() or 1, num_gpus=count, gpus=gpus),))


def joins_cluster() -> bool:
    """Whether a run joins the cluster that RAY_ADDRESS names.

    Raises:
        ClusterError: the address is for Ray's client, with which this machine would be no part of the cluster.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if "://" in address:
        raise ClusterError(
            f"RAY_ADDRESS {address} is for Ray's client, and roles would write to another machine's disk than this "
            "one: give the command on a machine of the cluster, with RAY_ADDRESS=auto"
        )
    return address not in OF_OUR_OWN


@contextmanager
def session(*, num_cpus: int | None = None) -> Iterator[Session]:
    """Join the cluster that RAY_ADDRESS names, or start one on this machine; leave, or stop it, at the end.

    A session that this process has begun already is used and left running.
    A cluster of our own lets in only who holds this run's token, and dies with this process, however this process dies.

    Args:
        num_cpus: pretend that this machine has so many cores; for tests.

    Raises:
        ClusterError: no shared memory, or Ray does not start.
    """
    joins = joins_cluster()
    if not joins:
        machine.require([machine.shared_memory()])
    import ray

    ray._private.worker.print_to_stdstream = _log_lines
    if ray.is_initialized():
        yield Session(_alive_nodes())
        return
    temporary = ExitStack()
    folder = temporary.enter_context(scratch())
    before = set(psutil.Process().children())
    family: list[psutil.Process] | None = None
    try:
        with stops.signals_blocked():
            if joins:
                ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
            else:
                ray.init(
                    # Else it would join whatever `ray start` has left on this machine.
                    address="local",
                    num_cpus=num_cpus or os.cpu_count(),
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    # Ray opens this folder and what it makes in it to every user of the machine, sockets included.
                    _temp_dir=str(folder / "r"),
                )
            stops.install_handlers()
            family = _new_children(before)
    except SystemExit:  # Ray's own handler, in the moment between its start and our taking over
        raise Stopped(signal.SIGTERM) from None
    except Exception as error:  # Ray raises many kinds here: sockets, time-outs, its own; all mean the same to a user
        raise ClusterError(
            f"Ray did not start ({type(error).__name__}: {' '.join(str(error).split())[:300]}): "
            f"check free ports and shared memory with `vlmrl doctor`, or start it yourself and set RAY_ADDRESS"
        ) from error
    else:
        yield Session(_alive_nodes())
    finally:  # also of a start in which a stop was asked for, which is heeded when Ray has started
        with temporary:
            if joins and ray.is_initialized():
                _clear(folder)
            _end_ray(_new_children(before) if family is None else family)


def _new_children(before: set[psutil.Process]) -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child not in before]


def _clear(folder: Path) -> None:
    """Remove the run's folder from the other machines. What is left of a machine that has gone must not hide why."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    with suppress(Exception):  # the head may have gone, too, and then Ray raises what it likes
        remove = ray.remote(remove_here)
        here = ray.get_runtime_context().get_node_id()
        others = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
        asked = [
            remove.options(
                num_cpus=0,
                max_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
                runtime_env={"env_vars": startup.portable_environment()},
            ).remote(folder)
            for node in others
        ]
        if asked:
            ray.wait(asked, num_returns=len(asked), timeout=_CLEAR_S)


def _log_lines(data: Mapping[str, Any], **_: Any) -> None:
    """Ray would print to people what its own processes say: that a worker has died, say. It has no setting for that."""
    logging.getLogger("ray").error("(%s) %s", data["pid"], "\n".join(data["lines"]))


def _end_ray(roots: Sequence[psutil.Process]) -> None:
    """Leave Ray, and end what it has started on this machine: some of its agents would look for it for a minute."""
    import ray

    family = list(roots)
    for root in roots:
        with suppress(psutil.Error):  # it has ended by itself
            family += root.children(recursive=True)
    ray.shutdown()
    stops.kill_processes(family)


def _alive_nodes() -> tuple[Node, ...]:
    """This machine first, which is where data and reward functions run; the others by address."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    num_gpus = {node["NodeID"]: int(node["Resources"].get("GPU", 0)) for node in alive}
    visible = visible_gpus({node["NodeID"]: node["NodeManagerAddress"] for node in alive if num_gpus[node["NodeID"]]})
    for node, names in visible.items():
        if hides_gpus(names):  # Ray counts "-1" as one GPU
            num_gpus[node] = 0
    here = ray.get_runtime_context().get_node_id()
    nodes = [
        Node(
            id=node["NodeID"],
            num_cpus=int(node["Resources"].get("CPU", 0)),
            num_gpus=num_gpus[node["NodeID"]],
            gpus=gpu_names(
                visible.get(node["NodeID"]), num_gpus[node["NodeID"]], where=f"node {node['NodeManagerAddress']}"
            ),
            address=node["NodeManagerAddress"],
            port=node["NodeManagerPort"],
        )
        for node in alive
    ]
    return tuple(sorted(nodes, key=lambda node: (node.id != here, node.address, node.id)))


def worker_environment(session: Session, *, num_workers: int, slots: Sequence[int], node: int) -> dict[str, str]:
    """Environment of a role's worker: the start-up hook, its devices, and its share of the node's cores.

    Roles take turns in a step, so a role's workers divide all of a node's cores among themselves.
    """
    cores = max(1, session.nodes[node].num_cpus // max(1, num_workers))
    variables = startup.portable_environment() | {
        "OMP_NUM_THREADS": str(cores),
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        # A dying worker's children end by themselves, and Python's resource tracker among them removes what lies in
        # shared memory: Ray would kill it before it can.
        "RAY_kill_child_processes_on_worker_exit": "0",
    }
    if VARIABLE in os.environ:
        variables[VARIABLE] = os.environ[VARIABLE]
    if session.has_gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(session.nodes[node].gpu(slot) for slot in slots)
    else:
        # Pages of 2 MiB, where Linux leaves the choice to programs: a first optimizer step of a 13M model made 45 page
        # faults instead of 35,823, and rollouts and updates of a run took 2 to 3 % less time (two cores).
        variables["GLIBC_TUNABLES"] = os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    return variables
