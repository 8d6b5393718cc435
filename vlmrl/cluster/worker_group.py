"""A plain class becomes N actors. The one file that knows how; what would hang is an error."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import socket
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, overload

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vlmrl.cluster.deaths import DOUBT_S, SURE_S, Member, advice_of
from vlmrl.cluster.interfaces import NAMES, interface_variables
from vlmrl.cluster.placement import Place
from vlmrl.cluster.remote_call import Call, recorded
from vlmrl.cluster.session import Session, worker_environment
from vlmrl.errors import ClusterError, DiedError, VlmrlError
from vlmrl.startup.driver import has_gpu
from vlmrl.system import memory, stops
from vlmrl.system.exits import Pidfd
from vlmrl.system.scratch import MEETING_FILE, enter_from_environment

Role_co = TypeVar("Role_co", covariant=True)
_Result = TypeVar("_Result")
_Item = TypeVar("_Item")

_END_S = 60.0
_PROCESS = re.compile(r"\(pid=(\d+), ip=([^,)\s]+)")


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

    def set_environment(self, variables: Mapping[str, str], driver: Mapping[str, str] | None) -> None:
        """Comes before `build`, whose argument imports modules as it arrives. `driver` is the driver's environment
        where the run has several machines, else None."""
        os.environ.update(variables)
        os.environ.update(_loopback() if driver is None else _network(driver))
        if not (has_gpu() and os.environ.get("CUDA_VISIBLE_DEVICES")):
            memory.keep_memory()

    def build(self, build: Callable[[], Any]) -> None:
        self._role = build()

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

    async def set_environment(  # type: ignore[override]
        self, variables: Mapping[str, str], driver: Mapping[str, str] | None
    ) -> None:
        super().set_environment(variables, driver)

    async def build(self, build: Callable[[], Any]) -> None:  # type: ignore[override]
        # Model code may block for seconds while it starts: the event loop stays free for Ray's own messages.
        await asyncio.to_thread(super().build, build)


def _network(driver: Mapping[str, str]) -> dict[str, str]:
    """What tells gloo and NCCL in this process how other machines reach this one."""
    held = {name: [entry.address for entry in entries] for name, entries in psutil.net_if_addrs().items()}
    return interface_variables(ray.util.get_node_ip_address(), held, of_node=os.environ, of_driver=driver)


def _loopback() -> dict[str, str]:
    """What has gloo in this process listen to this machine alone."""
    held = psutil.net_if_addrs().items()
    loopback = next((name for name, entries in held if any(e.address == "127.0.0.1" for e in entries)), None)
    return {} if loopback is None or os.environ.get(NAMES[0]) else {NAMES[0]: loopback}


def _start(worker: Any, call: Call, **options: Any) -> ray.ObjectRef[Any]:
    ref: ray.ObjectRef[Any] = worker.call.options(**options).remote(call.method, *call.args, **call.kwargs)
    return ref


class WorkerGroup(Generic[Role_co]):
    """N actors of one role, one per place.

    A call is a function of the role that calls one method of it: see `remote_call`.

    Args:
        name: the role's, for messages.
        build: makes the role; it runs in each worker, and imports there what the role needs.
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
        build: Callable[[], Role_co],
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
            self._build(build, distributed=distributed)
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

    def _build(self, build: Callable[[], Role_co], *, distributed: bool) -> None:
        """Build the role in each worker."""
        world: dict[str, str] = {}
        if distributed:
            world = {"WORLD_SIZE": str(len(self._workers)), "LOCAL_RANK": "0"} | self._meeting()
        prepared = []
        for rank, worker in enumerate(self._alive()):
            variables = world | ({"RANK": str(rank)} if distributed else {})
            prepared.append(worker.set_environment.remote(variables, self._driver))
        self._get(prepared)
        self._get([worker.build.remote(build) for worker in self._alive()])

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

    @overload
    def call(self, ask: Callable[[Role_co], Awaitable[_Result]]) -> list[_Result]: ...
    @overload
    def call(self, ask: Callable[[Role_co], _Result]) -> list[_Result]: ...
    def call(self, ask: Callable[[Role_co], Any]) -> list[Any]:
        """Make the same call on every worker; the results in order."""
        results: list[Any] = self._get(self.submit(ask))
        return results

    def each(self, ask: Callable[[Role_co, _Item], _Result], items: Sequence[_Item]) -> list[_Result]:
        """Make the call with `items[i]` on worker i; the results in order."""
        results: list[_Result] = self._get(self.submit_each(ask, items))
        return results

    def submit(self, ask: Callable[[Role_co], Any]) -> list[ray.ObjectRef[Any]]:
        """Start the call on every worker and return at once. An ObjectRef among its arguments arrives as its value."""
        call = recorded(ask)
        return [_start(worker, call) for worker in self._alive()]

    def submit_each(self, ask: Callable[[Role_co, _Item], Any], items: Sequence[_Item]) -> list[ray.ObjectRef[Any]]:
        """Start the call with `items[i]` on worker i and return at once."""
        workers = self._alive()
        if len(items) != len(workers):
            raise ValueError(f"{len(items)} items for {len(workers)} workers of {self.name}")
        return [_start(worker, recorded(ask, item)) for worker, item in zip(workers, items, strict=True)]

    def submit_to(self, worker: int, ask: Callable[[Role_co], Any]) -> ray.ObjectRef[Any]:
        """Start the call on one worker and return at once."""
        return _start(self._alive()[worker], recorded(ask))

    def wait(self, refs: Any, timeout_s: float | None = None) -> Any:
        """The results of calls that `submit` or `submit_to` started."""
        return self._get(refs, timeout_s)

    def end(self, ask: Callable[[Role_co], Any]) -> None:
        """Ask the workers to end by themselves. Who does not answer must not hide what ended the run."""
        call = recorded(ask)
        with suppress(ClusterError):
            started = [_start(worker, call, concurrency_group=self._end_group) for worker in self._alive()]
            self.wait(started, timeout_s=_END_S)

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
