"""A plain class becomes N actors. The one file that knows how; what would hang is an error."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vlmrl.cluster.deaths import DOUBT_S, SURE_S, Member, advice_of
from vlmrl.cluster.interfaces import NAMES, interface_variables
from vlmrl.cluster.placement import Place
from vlmrl.cluster.session import Session, worker_environment
from vlmrl.errors import ClusterError, DiedError, VlmrlError
from vlmrl.startup.driver import has_gpu
from vlmrl.system import memory, stops
from vlmrl.system.exits import Pidfd
from vlmrl.system.scratch import MEETING_FILE, enter_from_environment

_END_S = 60.0
_PROCESS = re.compile(r"\(pid=(\d+), ip=([^,)\s]+)")


@dataclass(frozen=True, slots=True)
class _Role:
    """What a worker builds."""

    path: str
    """`package.module.Class`."""
    settings: Mapping[str, Any]
    """Its keyword arguments."""
    variables: Mapping[str, str]
    """Of the environment, set before the class is imported."""
    driver: Mapping[str, str] | None
    """The driver's environment where the run has several machines, else None."""


class _Process(NamedTuple):
    """The process of a worker."""

    pid: int
    log: str
    """What it writes to its error stream; empty where that is no file."""


class _Worker:
    """The process around a role: it builds the role after its environment is set, and hands calls on."""

    def __init__(self) -> None:
        from vlmrl import startup

        enter_from_environment()
        startup.prepare()
        stops.ignore_signals()
        self._role: Any = None

    def ping(self) -> None:
        """A sign of life."""

    def address(self) -> tuple[str, int]:
        """This node's address and a port that is free on it."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def meeting_file(self) -> str:
        """A file that is not there yet, in a folder of this node that this user alone may enter."""
        return str(Path(tempfile.mkdtemp(prefix="vlmrl-ranks-")) / "store")

    def build(self, role: _Role) -> None:
        os.environ.update(role.variables)
        os.environ.update(_loopback() if role.driver is None else _network(role.driver))
        if not (has_gpu() and os.environ.get("CUDA_VISIBLE_DEVICES")):
            memory.keep_memory()
        module, name = role.path.rsplit(".", 1)
        self._role = getattr(import_module(module), name)(**role.settings)

    def process(self) -> _Process:
        log = Path("/proc/self/fd/2").resolve()
        return _Process(os.getpid(), str(log) if log.is_file() else "")

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._role, method)(*args, **kwargs)


class _AsyncWorker(_Worker):
    """The same for roles whose methods are coroutines, many of which are under way at once."""

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self._role, method)(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    async def ping(self) -> None:  # type: ignore[override]
        """A sign of life."""

    async def process(self) -> _Process:  # type: ignore[override]
        return super().process()

    async def address(self) -> tuple[str, int]:  # type: ignore[override]
        return super().address()

    async def build(self, role: _Role) -> None:  # type: ignore[override]
        # Model code may block for seconds while it starts: the event loop stays free for Ray's own messages.
        await asyncio.to_thread(super().build, role)


def _network(driver: Mapping[str, str]) -> dict[str, str]:
    """What tells gloo and NCCL in this process how other machines reach this one."""
    held = {name: [entry.address for entry in entries] for name, entries in psutil.net_if_addrs().items()}
    return interface_variables(ray.util.get_node_ip_address(), held, of_node=os.environ, of_driver=driver)


def _loopback() -> dict[str, str]:
    """What has gloo in this process listen to this machine alone."""
    held = psutil.net_if_addrs().items()
    loopback = next((name for name, entries in held if any(e.address == "127.0.0.1" for e in entries)), None)
    return {} if loopback is None or os.environ.get(NAMES[0]) else {NAMES[0]: loopback}


class WorkerGroup:
    """N actors of one class, one per place.

    Args:
        name: what the role is called in messages.
        path: `package.module.Class` of the role.
        settings: its keyword arguments, the same on every worker.
        places: where the workers run, from `placement.plan`.
        distributed: the workers form one torch.distributed world: RANK and WORLD_SIZE are set, and where they meet.
        concurrent: the role's methods are coroutines.
        interruptible: `end` is heard while another call is under way, and ends that one too.
        at_end: is given `shutdown` before the roles are built, so that whoever ends everything ends a start, too.
        timeout_s: a call that takes longer is an error.
    """

    def __init__(
        self,
        name: str,
        path: str,
        settings: Mapping[str, Any],
        *,
        session: Session,
        places: Sequence[Place],
        timeout_s: float,
        distributed: bool = False,
        concurrent: bool = False,
        interruptible: bool = False,
        at_end: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        self.name = name
        self.nodes = [place.node for place in places]
        """Of each worker: the number of its machine."""
        self._timeout_s = timeout_s
        self._driver: dict[str, str] | None = None
        if len(session.nodes) > 1:
            self._driver = {name: os.environ[name] for name in NAMES if name in os.environ}
        self._end_group = "aside" if interruptible else None
        actor = ray.remote(_AsyncWorker if concurrent else _Worker)
        if interruptible:
            actor = ray.remote(concurrency_groups={"aside": 1})(_Worker)
        per_node = {place.node: sum(p.node == place.node for p in places) for place in places}
        self._workers = []
        for place in places:
            variables = worker_environment(
                session, num_workers=per_node[place.node], slots=place.slots, node=place.node
            )
            affinity = NodeAffinitySchedulingStrategy(node_id=session.nodes[place.node].id, soft=False)
            self._workers.append(
                actor.options(
                    num_cpus=0,
                    scheduling_strategy=affinity,
                    runtime_env={"env_vars": variables},
                    max_concurrency=4096 if concurrent else 1,
                ).remote()
            )
        if at_end is not None:
            at_end(self.shutdown)
        self._roster = session.roster
        self._addresses = [session.nodes[node].address for node in self.nodes]
        self.pids: list[int] = []
        """Of each worker: its process."""
        try:
            self._enlist()
            self._build(path, settings, distributed=distributed)
        except BaseException:
            self.shutdown()
            raise

    def _enlist(self) -> None:
        """Have the deaths of the workers noticed, from before they build their roles."""
        workers = self._alive()
        for number, (worker, node) in enumerate(zip(workers, self.nodes, strict=True)):
            about = (self.name, number, len(workers), self._addresses[number], worker.ping.remote)
            self._roster.add(worker, Member(*about, is_here=node == 0))
        processes = self._get([worker.process.remote() for worker in workers])
        self.pids = [process.pid for process in processes]
        for worker, process, node in zip(workers, processes, self.nodes, strict=True):
            member = self._roster.members.get(worker)  # a machine that dies ends them at any moment
            if node == 0 and member is not None:  # of this machine alone the kernel can be asked
                log = Path(process.log) if process.log else None
                self._roster.add(worker, replace(member, process=Pidfd(process.pid), log=log))

    def _build(self, path: str, settings: Mapping[str, Any], *, distributed: bool) -> None:
        """The roles in their workers."""
        world: dict[str, str] = {}
        if distributed:
            world = {"WORLD_SIZE": str(len(self._workers)), "LOCAL_RANK": "0"} | self._meeting()
        self._get(
            [
                worker.build.remote(
                    _Role(path, settings, world | ({"RANK": str(rank)} if distributed else {}), self._driver)
                )
                for rank, worker in enumerate(self._alive())
            ]
        )

    def _meeting(self) -> dict[str, str]:
        """Where the ranks meet: in a file when they are on one machine, else at a port of the first one's."""
        if len(set(self.nodes)) == 1:
            return {MEETING_FILE: self._get(self._alive()[0].meeting_file.remote())}
        address, port = self.address()
        return {"MASTER_ADDR": address, "MASTER_PORT": str(port)}

    def _alive(self) -> list[Any]:
        """The workers. A call on none would succeed and do nothing: a model would be told to be saved that is not."""
        if not self._workers:
            raise ClusterError(f"the workers of {self.name} have been ended")
        return self._workers

    def __len__(self) -> int:
        return len(self._workers)

    def address(self) -> tuple[str, int]:
        """The address of the first worker's node, and a port that is free on it."""
        address, port = self._get(self._alive()[0].address.remote())
        return address, port

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `method` with the same arguments on every worker; the answers in order."""
        results: list[Any] = self._get(self.submit(method, *args, **kwargs))
        return results

    def each(self, method: str, arguments: Sequence[Any], **kwargs: Any) -> list[Any]:
        """Call `method` on worker i with `arguments[i]`, and with `kwargs` on all; the answers in order."""
        workers = self._alive()
        if len(arguments) != len(workers):
            raise ValueError(f"{len(arguments)} arguments for {len(workers)} workers of {self.name}")
        calls = [worker.call.remote(method, item, **kwargs) for worker, item in zip(workers, arguments, strict=True)]
        results: list[Any] = self._get(calls)
        return results

    def submit(self, method: str, *args: Any, **kwargs: Any) -> list[ray.ObjectRef[Any]]:
        """Start `method` on every worker and return at once. An ObjectRef among `args` arrives as its value."""
        return [worker.call.remote(method, *args, **kwargs) for worker in self._alive()]

    def submit_to(self, worker: int, method: str, *args: Any, **kwargs: Any) -> ray.ObjectRef[Any]:
        """Start `method` on one worker and return at once."""
        ref: ray.ObjectRef[Any] = self._alive()[worker].call.remote(method, *args, **kwargs)
        return ref

    def wait(self, refs: Any, timeout_s: float | None = None) -> Any:
        """The values of what `submit` started."""
        return self._get(refs, timeout_s)

    def end(self, method: str) -> None:
        """Ask the workers to end by themselves. Who does not answer must not hide what ended the run."""
        with suppress(ClusterError):
            calls = [worker.call.options(concurrency_group=self._end_group).remote(method) for worker in self._alive()]
            self.wait(calls, timeout_s=_END_S)

    def shutdown(self) -> None:
        """End the actors, at once."""
        self._roster.remove(self._workers)
        for worker in self._workers:
            ray.kill(worker)
        self._workers = []

    def _get(self, refs: Any, timeout_s: float | None = None) -> Any:
        limit = timeout_s or self._timeout_s
        try:
            with stops.interruptible_wait():
                return ray.get(refs, timeout=limit)
        except ray.exceptions.GetTimeoutError as error:
            raise ClusterError(
                f"{self.name} did not answer within {limit:.0f} s: raise --train.timeout_s if its work takes that long"
            ) from error
        except ray.exceptions.RayTaskError as error:
            # A user's mistake crosses the process as itself; a bug keeps its remote traceback.
            if isinstance(error.cause, DiedError):
                raise ClusterError(f"{self._name_of(error)}: {error.cause}") from None
            if isinstance(error.cause, VlmrlError):
                raise error.cause from None
            # A collective breaks in one rank when another has died, and an image is lost with its owner.
            self._tell_of_death(SURE_S if isinstance(error.cause, ray.exceptions.RayError) else DOUBT_S)
            raise
        except ray.exceptions.RayError as error:
            self._tell_of_death(SURE_S)
            reason = " ".join(str(error).split())
            raise ClusterError(f"a worker of {self.name} died ({reason[:300]}): {advice_of(self.name)}") from error

    def _tell_of_death(self, patience_s: float) -> None:
        """Raise ClusterError when a worker of the run, of whichever role, has died."""
        line = self._roster.why(patience_s)
        if line is not None:
            raise ClusterError(line) from None

    def _name_of(self, error: ray.exceptions.RayTaskError) -> str:
        """The worker that raised it."""
        # Ray's error that is also of our class has no field of its own but its text.
        told = _PROCESS.search(str(error))
        for worker, pid, address in zip(self._workers, self.pids, self._addresses, strict=False):
            is_it = told is not None and (str(pid), address) == told.groups()
            if is_it and worker in self._roster.members:
                return str(self._roster.members[worker])
        return self.name
