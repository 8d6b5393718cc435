"""Run a plain class as N Ray actors. Calls that would hang raise errors instead."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import shlex
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, overload

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vlmrl.cluster.interfaces import NAMES, loopback_variables, network_variables
from vlmrl.cluster.placement import Place
from vlmrl.cluster.remote_call import Call, record_call
from vlmrl.cluster.session import Session, worker_environment
from vlmrl.cluster.worker_deaths import REPORTED_S, SUSPECTED_S, Member, memory_advice
from vlmrl.errors import ClusterError, DiedError, VlmrlError
from vlmrl.startup.driver import has_gpu
from vlmrl.system import malloc, stops
from vlmrl.system.exits import Pidfd
from vlmrl.system.scratch import MEETING_FILE, enter_from_environment

Role_co = TypeVar("Role_co", covariant=True)
_Result = TypeVar("_Result")
_Item = TypeVar("_Item")

_END_S = 60.0
_ASK_AGAIN_S = 0.1
_CONCURRENT_CALLS = 2**16
"""Calls that a concurrent role executes at once. The prompts that run ahead of an asynchronous run's trainer must leave
room for the calls of a weight sync."""
_PROCESS = re.compile(r"\(pid=(\d+), ip=([^,)\s]+)")


class _Process(NamedTuple):
    """Process of a worker."""

    pid: int
    log: str
    """File of its error stream; empty if that is not a file."""


def search_working_directory_last() -> None:
    """Import libraries, not modules of the same name in the working directory (`datasets`), which Ray puts first."""
    folder = str(Path.cwd())
    if folder in sys.path:
        sys.path.remove(folder)
        sys.path.append(folder)


class _Worker:
    """Ray actor that sets its environment, builds the role, and forwards calls to it."""

    def __init__(self) -> None:
        from vlmrl import startup

        search_working_directory_last()
        enter_from_environment()
        startup.prepare()
        stops.ignore_signals()
        self._role: Any = None

    def ping(self) -> None:
        """Respond, as a sign of life."""

    def address(self) -> tuple[str, int]:
        """Address of this node, and a free port on it."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def rendezvous_file(self) -> str:
        """Path of a new file on this node, in a private folder."""
        return str(Path(tempfile.mkdtemp(prefix="vlmrl-ranks-")) / "store")

    def set_environment(self, variables: Mapping[str, str], driver: Mapping[str, str] | None) -> None:
        """Set environment variables. Call before `build`, whose argument imports modules when it is unpickled.

        Args:
            driver: the driver's environment if the run has several machines, else None.
        """
        os.environ.update(variables)
        here = ray.util.get_node_ip_address()
        os.environ.update(loopback_variables() if driver is None else network_variables(driver, address=here))
        if not (has_gpu() and os.environ.get("CUDA_VISIBLE_DEVICES")):
            malloc.keep_memory()

    def build(self, build: Callable[[], Any]) -> None:
        self._role = build()

    def process(self) -> _Process:
        log = Path("/proc/self/fd/2").resolve()
        return _Process(os.getpid(), str(log) if log.is_file() else "")

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._role, method)(*args, **kwargs)


class _AsyncWorker(_Worker):
    """The same for roles whose methods are coroutines, of which many run at once."""

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self._role, method)(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    async def ping(self) -> None:  # type: ignore[override]
        """Respond, as a sign of life."""

    async def process(self) -> _Process:  # type: ignore[override]
        return super().process()

    async def address(self) -> tuple[str, int]:  # type: ignore[override]
        return super().address()

    async def set_environment(  # type: ignore[override]
        self, variables: Mapping[str, str], driver: Mapping[str, str] | None
    ) -> None:
        super().set_environment(variables, driver)

    async def build(self, build: Callable[[], Any]) -> None:  # type: ignore[override]
        # Model code may block for seconds at the start; in a thread it does not block Ray's messages.
        await asyncio.to_thread(super().build, build)


def _start(worker: Any, call: Call) -> ray.ObjectRef[Any]:
    ref: ray.ObjectRef[Any] = worker.call.remote(call.method, *call.args, **call.kwargs)
    return ref


class WorkerGroup(Generic[Role_co]):
    """N actors of one role, one per place.

    Calls are lambdas that call one method of the role; see `remote_call`.

    Args:
        name: the role, for messages.
        build: makes the role in each worker, and imports there what the role needs.
        places: nodes and slots of the workers, from `placement.plan`.
        timeout_s: a call that takes longer is an error.
        distributed: the workers form one torch.distributed world: RANK, WORLD_SIZE and the rendezvous are set.
        concurrent: the role's methods are coroutines.
        register_shutdown: gets `shutdown` before the roles are built, so that an unfinished start can be stopped too.
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
        register_shutdown: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        self.name = name
        self.nodes = [place.node for place in places]
        """Number of the machine of each worker."""
        self._timeout_s = timeout_s
        self._driver: dict[str, str] | None = None
        if len(session.nodes) > 1:
            self._driver = {name: os.environ[name] for name in NAMES if name in os.environ}
        self._session, self._places, self._concurrent = session, places, concurrent
        self._build_role = build
        self._starting = threading.Lock()  # calls of two threads reach all workers in one order: some are collectives
        self._roster = session.roster
        self._workers = [self._start_worker(place) for place in places]
        if register_shutdown is not None:
            register_shutdown(self.shutdown)
        self._addresses = [session.nodes[node].address for node in self.nodes]
        self.pids = [0] * len(places)
        """Process id of each worker."""
        try:
            self._register(range(len(places)))
            self._build(range(len(places)), distributed=distributed)
        except BaseException:
            self.shutdown()
            raise

    def _start_worker(self, place: Place) -> Any:
        session, node = self._session, place.node
        variables = worker_environment(
            session, num_workers=sum(p.node == node for p in self._places), slots=place.slots, node=node
        )
        executable = {"py_executable": shlex.quote(session.python)} if session.python else {}
        return (
            ray.remote(_AsyncWorker if self._concurrent else _Worker)
            .options(
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=session.nodes[node].id, soft=False),
                runtime_env={"env_vars": variables} | executable,
                max_concurrency=_CONCURRENT_CALLS if self._concurrent else 1,
            )
            .remote()
        )

    def _register(self, numbers: Sequence[int]) -> None:
        """Add these workers to the session's roster, so that deaths during `build` are noticed too."""
        workers = self._alive()
        for number in numbers:
            fields = (self.name, number, len(workers), self._addresses[number], workers[number].ping.remote)
            self._roster.add(workers[number], Member(*fields, is_here=self.nodes[number] == 0))
        processes = self._get([workers[number].process.remote() for number in numbers])
        for number, process in zip(numbers, processes, strict=True):
            self.pids[number] = process.pid
            member = self._roster.members.get(workers[number])  # removed if the machine has died meanwhile
            if self.nodes[number] == 0 and member is not None:  # the kernel reports only processes of this machine
                log = Path(process.log) if process.log else None
                self._roster.add(workers[number], replace(member, process=Pidfd(process.pid), log=log))

    def _build(self, numbers: Sequence[int], *, distributed: bool) -> None:
        """Build the role in these workers."""
        world: dict[str, str] = {}
        if distributed:
            world = {"WORLD_SIZE": str(len(self._workers)), "LOCAL_RANK": "0"} | self._rendezvous()
        workers = {number: self._alive()[number] for number in numbers}
        rank_of = {number: {"RANK": str(number)} if distributed else {} for number in numbers}
        self._get([w.set_environment.remote(world | rank_of[n], self._driver) for n, w in workers.items()])
        self._get([worker.build.remote(self._build_role) for worker in workers.values()])

    def find_dead(self, check: Callable[[Role_co], Any]) -> dict[int, str]:
        """Return the workers that have died, by number, each with a line about its death. Busy ones are alive.

        `check` raises DiedError if a process that the worker started has died.
        """
        call, workers, end = record_call(check), self._alive(), time.monotonic() + REPORTED_S
        dead: dict[int, str] = {}
        unknown = list(range(len(workers)))
        while unknown and (left_s := end - time.monotonic()) > 0:
            started = {_start(workers[number], call): number for number in unknown}
            done, _ = ray.wait(list(started), num_returns=len(started), timeout=left_s)
            unknown = []
            for ref in done:
                number = started[ref]
                member = self._roster.members.get(workers[number])
                try:
                    ray.get(ref)
                except ray.exceptions.ActorUnavailableError:
                    unknown.append(number)  # Ray does not know yet whether it has died
                except ray.exceptions.RayActorError as error:
                    dead[number] = self.name if member is None else self._roster.format_death(member, error)
                except ray.exceptions.RayTaskError as error:
                    if isinstance(error.cause, DiedError):
                        dead[number] = f"{member or self.name}: {error.cause}"
            time.sleep(_ASK_AGAIN_S if unknown else 0.0)
        return dict(sorted(dead.items()))

    def replace(self, numbers: Sequence[int], end: Callable[[Role_co], Any]) -> None:
        """Start new workers in place of these, on the same devices. `end` is called on those that still live."""
        workers, call = self._alive(), record_call(end)
        old = [workers[number] for number in numbers]
        self._roster.forget(old)
        self.finish([_start(worker, call) for worker in old])
        for number, worker in zip(numbers, old, strict=True):
            ray.kill(worker)
            workers[number] = self._start_worker(self._places[number])
        self._register(numbers)
        self._build(numbers, distributed=False)

    def _rendezvous(self) -> dict[str, str]:
        """Return the rendezvous of the ranks: a file if they are on one machine, else a port on the first rank's
        machine."""
        if len(set(self.nodes)) == 1:
            return {MEETING_FILE: self._get(self._alive()[0].rendezvous_file.remote())}
        address, port = self.address()
        return {"MASTER_ADDR": address, "MASTER_PORT": str(port)}

    def _alive(self) -> list[Any]:
        """Return the workers. Raises if there are none: a call would succeed without effect, for example save no
        model."""
        if not self._workers:
            raise ClusterError(f"the workers of {self.name} have been stopped")
        return self._workers

    def __len__(self) -> int:
        return len(self._workers)

    def address(self) -> tuple[str, int]:
        """Address of the first worker's node, and a free port on it."""
        address, port = self._get(self._alive()[0].address.remote())
        return address, port

    @overload
    def call(self, function: Callable[[Role_co], Awaitable[_Result]]) -> list[_Result]: ...
    @overload
    def call(self, function: Callable[[Role_co], _Result]) -> list[_Result]: ...
    def call(self, function: Callable[[Role_co], Any]) -> list[Any]:
        """Make the same call on all workers; returns the results in order."""
        results: list[Any] = self._get(self.submit(function))
        return results

    def each(self, function: Callable[[Role_co, _Item], _Result], items: Sequence[_Item]) -> list[_Result]:
        """Make the call with `items[i]` on worker i; returns the results in order."""
        results: list[_Result] = self._get(self.submit_each(function, items))
        return results

    def submit(self, function: Callable[[Role_co], Any]) -> list[ray.ObjectRef[Any]]:
        """Start the call on all workers and return at once. Workers get the value of an ObjectRef argument."""
        call, workers = record_call(function), self._alive()
        with self._starting:
            return [_start(worker, call) for worker in workers]

    def submit_each(
        self, function: Callable[[Role_co, _Item], Any], items: Sequence[_Item]
    ) -> list[ray.ObjectRef[Any]]:
        """Start the call with `items[i]` on worker i and return at once."""
        workers = self._alive()
        if len(items) != len(workers):
            raise ValueError(f"{len(items)} items for {len(workers)} workers of {self.name}")
        calls = [record_call(function, item) for item in items]
        with self._starting:
            return [_start(worker, call) for worker, call in zip(workers, calls, strict=True)]

    def submit_to(self, worker: int, function: Callable[[Role_co], Any]) -> ray.ObjectRef[Any]:
        """Start the call on one worker and return at once."""
        return _start(self._alive()[worker], record_call(function))

    def wait(self, refs: Any, timeout_s: float | None = None, *, flag: str = "--train.timeout_s") -> Any:
        """Return the results of calls that `submit` or `submit_to` started. `flag` sets the limit `timeout_s`."""
        return self._get(refs, timeout_s, flag=flag)

    def finish(self, refs: Sequence[ray.ObjectRef[Any]]) -> None:
        """Wait until these calls have ended, however they end."""
        ray.wait(list(refs), num_returns=len(refs), timeout=_END_S)

    def end(self, function: Callable[[Role_co], Any]) -> None:
        """Let the workers clean up by this call. Errors of workers are ignored: they would hide what ended the run."""
        call = record_call(function)
        with suppress(ClusterError):
            started = [_start(worker, call) for worker in self._alive()]
            self.wait(started, timeout_s=_END_S)

    def shutdown(self) -> None:
        """Kill the actors."""
        self._roster.remove(self._workers)
        for worker in self._workers:
            ray.kill(worker)
        self._workers = []

    def _get(self, refs: Any, timeout_s: float | None = None, *, flag: str = "--train.timeout_s") -> Any:
        limit = timeout_s or self._timeout_s
        try:
            with stops.interruptible_wait():
                return ray.get(refs, timeout=limit)
        except ray.exceptions.GetTimeoutError as error:
            raise ClusterError(
                f"{self.name} did not respond within {limit:.0f} s: raise {flag} if its work takes that long"
            ) from error
        except ray.exceptions.RayTaskError as error:
            # Errors for users are raised as they are; a bug keeps its remote traceback.
            if isinstance(error.cause, DiedError):
                raise ClusterError(f"{self._name_of(error)}: {error.cause}") from None
            if isinstance(error.cause, VlmrlError):
                raise error.cause from None
            # A collective fails when another rank has died, and an image is lost with its owner.
            self._raise_death(REPORTED_S if isinstance(error.cause, ray.exceptions.RayError) else SUSPECTED_S)
            raise
        except ray.exceptions.RayError as error:
            self._raise_death(REPORTED_S)
            reason = " ".join(str(error).split())
            raise ClusterError(f"a worker of {self.name} died ({reason[:300]}): {memory_advice(self.name)}") from error

    def _raise_death(self, patience_s: float) -> None:
        """Raise ClusterError if a worker of any role has died."""
        line = self._roster.find_death(patience_s)
        if line is not None:
            raise ClusterError(line) from None

    def _name_of(self, error: ray.exceptions.RayTaskError) -> str:
        """Return the name of the worker that raised the error, or of the role if it is not known."""
        # Only the text of Ray's error names the process.
        process = _PROCESS.search(str(error))
        for worker, pid, address in zip(self._workers, self.pids, self._addresses, strict=False):
            is_it = process is not None and (str(pid), address) == process.groups()
            if is_it and worker in self._roster.members:
                return str(self._roster.members[worker])
        return self.name
