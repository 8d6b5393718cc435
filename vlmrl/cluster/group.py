"""A plain class becomes N actors. The one file that knows how; what would hang is an error."""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vlmrl import stops
from vlmrl.cluster.interfaces import NAMES, interface_variables
from vlmrl.cluster.placement import Place
from vlmrl.cluster.session import Session, worker_environment
from vlmrl.errors import ClusterError, VlmrlError
from vlmrl.startup import memory
from vlmrl.startup.driver import has_gpu

_END_S = 60.0


class _Worker:
    """The process around a role: it builds the role after its environment is set, and hands calls on."""

    def __init__(self) -> None:
        from vlmrl import startup

        startup.prepare()
        stops.ignored()
        self._role: Any = None

    def address(self) -> tuple[str, int]:
        """This node's address and a port that is free on it."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def build(
        self,
        path: str,
        variables: Mapping[str, str],
        settings: Mapping[str, Any],
        driver: Mapping[str, str] | None = None,
    ) -> int:
        """Build the role. `driver` is the driver's environment where the run has several machines, else None."""
        os.environ.update(variables)
        if driver is not None:
            os.environ.update(_network(driver))
        if not (has_gpu() and os.environ.get("CUDA_VISIBLE_DEVICES")):
            memory.keep_memory()
        module, name = path.rsplit(".", 1)
        self._role = getattr(import_module(module), name)(**settings)
        return os.getpid()

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._role, method)(*args, **kwargs)


class _AsyncWorker(_Worker):
    """The same for roles whose methods are coroutines, many of which are under way at once."""

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self._role, method)(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    async def address(self) -> tuple[str, int]:  # type: ignore[override]
        return super().address()

    async def build(  # type: ignore[override]
        self,
        path: str,
        variables: Mapping[str, str],
        settings: Mapping[str, Any],
        driver: Mapping[str, str] | None = None,
    ) -> int:
        # Model code may block for seconds while it starts: the event loop stays free for Ray's own messages.
        return await asyncio.to_thread(super().build, path, variables, settings, driver)


def _network(driver: Mapping[str, str]) -> dict[str, str]:
    """What tells gloo and NCCL in this process how other machines reach this one."""
    held = {name: [entry.address for entry in entries] for name, entries in psutil.net_if_addrs().items()}
    return interface_variables(ray.util.get_node_ip_address(), held, of_node=os.environ, of_driver=driver)


class WorkerGroup:
    """N actors of one class, one per place.

    Args:
        name: what the role is called in messages.
        path: `package.module.Class` of the role.
        settings: its keyword arguments, the same on every worker.
        places: where the workers run, from `placement.plan`.
        distributed: the workers form one torch.distributed world: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are set.
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
        try:
            self.pids = self._build(path, settings, distributed=distributed)
        except BaseException:
            self.shutdown()
            raise

    def _build(self, path: str, settings: Mapping[str, Any], *, distributed: bool) -> list[int]:
        """The roles in their workers; the processes' ids."""
        world: dict[str, str] = {}
        if distributed:
            address, port = self.address()
            world = {
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                "WORLD_SIZE": str(len(self._workers)),
                "LOCAL_RANK": "0",
            }
        pids: list[int] = self._get(
            [
                worker.build.remote(path, world | ({"RANK": str(rank)} if distributed else {}), settings, self._driver)
                for rank, worker in enumerate(self._alive())
            ]
        )
        return pids

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
        for worker in self._workers:
            ray.kill(worker)
        self._workers = []

    def _get(self, refs: Any, timeout_s: float | None = None) -> Any:
        limit = timeout_s or self._timeout_s
        try:
            with stops.waiting():
                return ray.get(refs, timeout=limit)
        except ray.exceptions.GetTimeoutError as error:
            raise ClusterError(
                f"{self.name} did not answer within {limit:.0f} s: raise --train.timeout_s if its work takes that long"
            ) from error
        except ray.exceptions.RayTaskError as error:
            # A user's mistake crosses the process as itself; a bug keeps its remote traceback.
            if isinstance(error.cause, VlmrlError):
                raise error.cause from None
            raise
        except ray.exceptions.RayActorError as error:
            reason = " ".join(str(error).split())
            raise ClusterError(
                f"a worker of {self.name} died ({reason[:300]}): most often the machine ran out of memory; "
                f"lower --train.max_tokens_per_gpu or look at `vlmrl doctor`"
            ) from error
