"""The Ray session of a run: a new cluster, or the cluster that the user started."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from vlmrl import startup
from vlmrl.cluster.devices import gpu_names, visible_gpus
from vlmrl.cluster.head import wait_for_head
from vlmrl.cluster.placement import Place
from vlmrl.cluster.worker_deaths import Roster
from vlmrl.errors import ClusterError
from vlmrl.startup.driver import gpu_fault_and_fix, hides_gpus, installed_driver
from vlmrl.system import fork_server, machine, scratch, stops
from vlmrl.system.stops import Stopped

_REMOVE_S = 10.0
_NICENESS = "RAY_worker_niceness"
"""Variable that each of Ray's workers reads when it starts. By default it adds 15 to its niceness."""


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of the session."""

    id: str
    """Ray's id of the node."""
    num_cpus: int
    num_gpus: int
    address: str = ""
    """Address at which other nodes reach it."""
    port: int = 0
    """Port of Ray's process on it."""
    gpus: tuple[str, ...] = ()
    """Names of its GPUs in CUDA_VISIBLE_DEVICES; if empty, their numbers are used."""

    def gpu(self, slot: int) -> str:
        """Return the name in CUDA_VISIBLE_DEVICES of the GPU of this slot."""
        return self.gpus[slot] if self.gpus else str(slot)


@dataclass(frozen=True, slots=True)
class Session:
    """The machines of a run."""

    nodes: tuple[Node, ...]
    roster: Roster = field(default_factory=Roster, compare=False, repr=False)
    """The running workers, and the first that died."""
    python: str = field(default="", compare=False)
    """The fork server's command, which takes the place of Python for workers; empty where there is none."""

    @property
    def has_gpus(self) -> bool:
        return any(node.num_gpus for node in self.nodes)

    @property
    def slots(self) -> list[int]:
        """Slots per node: GPUs if any node has one, otherwise CPU cores."""
        return [node.num_gpus if self.has_gpus else node.num_cpus for node in self.nodes]

    @property
    def unit(self) -> str:
        return "GPU" if self.has_gpus else "CPU core"

    def divided(self, places: Mapping[str, Sequence[Place]]) -> Session:
        """The session for engines that sample while the trainer learns: on a machine without a GPU that has both, each
        side computes with half of the cores.

        With threads for all cores on both sides an update took 4 s instead of 0.2, because threads that wait for each
        other occupy cores (a 0.7M model, two cores).
        """
        engines = {place.node for place in places.get("vllm", ())}
        both = {place.node for role, workers in places.items() if role != "vllm" for place in workers} & engines
        if self.has_gpus:
            return self
        nodes = [
            replace(node, num_cpus=max(1, node.num_cpus // 2)) if number in both else node
            for number, node in enumerate(self.nodes)
        ]
        return replace(self, nodes=tuple(nodes))


def local_session() -> Session:
    """This machine as a session, without starting Ray. Dry runs plan with it.

    Raises:
        ClusterError: the machine has a GPU that torch cannot use.
    """
    import torch

    count = torch.cuda.device_count()
    if count and not torch.cuda.is_available():  # torch also counts devices that it cannot use
        raise ClusterError(": ".join(gpu_fault_and_fix(torch.version.cuda, installed_driver())))
    gpus = gpu_names(os.environ.get("CUDA_VISIBLE_DEVICES"), count, where="this machine")
    return Session((Node(id="", num_cpus=os.cpu_count() or 1, num_gpus=count, gpus=gpus),))


def joins_cluster() -> bool:
    """Whether a run joins the cluster that RAY_ADDRESS names.

    Raises:
        ClusterError: the address is for Ray's client, with which this machine would not be part of the cluster.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if "://" in address:
        raise ClusterError(
            f"RAY_ADDRESS {address} is for Ray's client, with which roles would write to another machine's disk: "
            "run the command on a machine of the cluster, with RAY_ADDRESS=auto"
        )
    return address not in startup.LOCAL_ADDRESSES


@contextmanager
def session(
    *, num_cpus: int | None = None, head_limit_s: float = 0.0, say: Callable[[str], None] = print
) -> Iterator[Session]:
    """Join the cluster that RAY_ADDRESS names, or start one on this machine; at the end leave or stop it.

    A session that is already running in this process is used and not stopped. A cluster of our own admits only holders
    of this run's token, and dies with this process, however it dies.

    Args:
        num_cpus: number of cores to assume; for tests.
        head_limit_s: maximum wait in seconds for the head of the cluster to join.
        say: prints a line when the head is waited for.

    Raises:
        ClusterError: there is no shared memory, no head answers, or Ray does not start.
    """
    joins = joins_cluster()
    if not joins:
        machine.require([machine.shared_memory()])
    import ray

    ray._private.worker.print_to_stdstream = _log_ray_output
    if ray.is_initialized():
        yield _running_session(joins=joins)
        return
    temporary = ExitStack()
    if joins:
        wait_for_head(os.environ["RAY_ADDRESS"], limit_s=head_limit_s, say=say)
    else:
        temporary.enter_context(_workers_of_equal_priority())
    folder = temporary.enter_context(scratch.scratch())
    temporary.enter_context(fork_server.fork_server(folder))
    before = set(psutil.Process().children())
    processes: list[psutil.Process] | None = None
    try:
        with stops.signals_blocked():
            if joins:
                ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
            else:
                with _without_dashboard():
                    ray.init(
                        # Otherwise Ray joins any cluster that `ray start` has left on this machine.
                        address="local",
                        num_cpus=num_cpus or os.cpu_count(),
                        include_dashboard=False,
                        log_to_driver=False,
                        logging_level=logging.ERROR,
                        # Ray makes this folder and all in it accessible to every user of the machine, even sockets.
                        _temp_dir=str(folder / "r"),
                        # Otherwise the agent serves Ray's metrics on all addresses.
                        _system_config={"enable_metrics_collection": False},
                    )
            stops.install_handlers()
            processes = _new_children(before)
    except SystemExit:  # from Ray's signal handler, before ours are installed
        raise Stopped(signal.SIGTERM) from None
    except Exception as error:  # Ray raises many kinds here, which all mean the same to users
        raise ClusterError(
            f"Ray did not start ({type(error).__name__}: {' '.join(str(error).split())[:300]}): "
            f"check free ports and shared memory with `vlmrl doctor`, or start Ray yourself and set RAY_ADDRESS"
        ) from error
    else:
        yield _running_session(joins=joins)
    finally:  # also after a stop signal during the start, which takes effect once Ray has started
        with temporary:
            if joins and ray.is_initialized():
                _remove_from_others(folder)
            _stop_ray(_new_children(before) if processes is None else processes)


@contextmanager
def _workers_of_equal_priority() -> Iterator[None]:
    """Let Ray's workers run at the priority of this process: they do its work, and would get few of the cores beside
    other processes of the machine. A value that the user has set is kept."""
    if _NICENESS in os.environ:
        yield
        return
    os.environ[_NICENESS] = "0"
    try:
        yield
    finally:
        os.environ.pop(_NICENESS, None)


@contextmanager
def _without_dashboard() -> Iterator[None]:
    """Let Ray start as if the packages of its dashboard, which `ray job submit` needs on a cluster, were not installed:
    its agent would serve jobs and logs, and nobody asks it. Ray has no setting for it."""
    import ray

    error = ImportError("a run's own Ray has no dashboard")
    before = ray._private.utils.get_dashboard_dependency_error
    ray._private.utils.get_dashboard_dependency_error = lambda: error
    try:
        yield
    finally:
        ray._private.utils.get_dashboard_dependency_error = before


def _new_children(before: set[psutil.Process]) -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child not in before]


def _remove_from_others(folder: Path) -> None:
    """Remove the run's folder from the other machines. Errors are ignored: they would hide what ended the run."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    with suppress(Exception):  # if the head has died too, Ray raises any kind
        remove = ray.remote(scratch.remove_here)
        here = ray.get_runtime_context().get_node_id()
        others = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
        refs = [
            remove.options(
                num_cpus=0,
                max_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
                runtime_env={"env_vars": startup.portable_environment()},
            ).remote(folder)
            for node in others
        ]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=_REMOVE_S)


def _log_ray_output(data: Mapping[str, Any], **_: Any) -> None:
    """Log the output of Ray's processes instead of printing it, for which Ray has no setting."""
    logging.getLogger("ray").error("(%s) %s", data["pid"], "\n".join(data["lines"]))


def _stop_ray(roots: Sequence[psutil.Process]) -> None:
    """Leave Ray, and kill its processes on this machine: some of its agents would search for it for a minute."""
    import ray

    processes = list(roots)
    for root in roots:
        with suppress(psutil.Error):  # it has ended already
            processes += root.children(recursive=True)
    node = ray._private.worker._global_node
    if roots and node is not None:
        # Ray would give each of its processes a second to end by itself, one after the other.
        node.kill_all_processes = _leave_to_us
    # If another thread, such as the one that draws the plot, deletes a handle while Ray ends, Ray ends this process,
    # with exit code 1. So garbage goes first.
    gc.collect()
    gc.disable()
    try:
        ray.shutdown()
    finally:
        gc.enable()
    stops.kill_processes(processes)


def _leave_to_us(**_: Any) -> None:
    """Kill no process."""


def _running_session(*, joins: bool) -> Session:
    """The session that Ray has started. Workers on the user's cluster are no forks: these belong to this machine."""
    return Session(alive_nodes(), python="" if joins else os.environ.get(fork_server.VARIABLE, ""))


def alive_nodes() -> tuple[Node, ...]:
    """Return the nodes: first this machine, which runs data and reward functions, then the others by address."""
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

    Roles take turns in a step, so the workers of one role share all cores of a node; for engines that sample meanwhile
    see `Session.divided`.
    """
    cores = max(1, session.nodes[node].num_cpus // max(1, num_workers))
    variables = startup.portable_environment() | {
        "OMP_NUM_THREADS": str(cores),
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        # The children of a dying worker end by themselves. Among them is Python's resource tracker, which removes
        # shared memory, but not if Ray kills it first.
        "RAY_kill_child_processes_on_worker_exit": "0",
    }
    if scratch.VARIABLE in os.environ:
        variables[scratch.VARIABLE] = os.environ[scratch.VARIABLE]
    variables[fork_server.VARIABLE] = session.python
    if session.has_gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(session.nodes[node].gpu(slot) for slot in slots)
    else:
        # Pages of 2 MiB, if Linux leaves the choice to programs: the first optimizer step of a 13M model had 45 page
        # faults instead of 35,823, and rollouts and updates took 2 to 3 % less time (two cores). glibc reads it when a
        # program starts, so that forks of the fork server do without.
        variables["GLIBC_TUNABLES"] = os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    return variables
