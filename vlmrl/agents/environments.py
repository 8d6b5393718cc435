"""Environments in processes of their own, which are killed when they hang, and replaced in milliseconds.

An environment with only synchronous methods has a process to itself, so that killing it affects no other. Asynchronous
ones share a few processes by the hundred; one that blocks the event loop, or ends its process, takes the others there
with it. A second attempt, `open(alone=True)`, has a process to itself.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from vlmrl.agents.environment import ToolError, ToolSpec
from vlmrl.agents.messages import Hello, Mode, Orders
from vlmrl.agents.open_environment import Observation, OpenEnvironment, Outcome
from vlmrl.agents.process import EnvironmentLost, EnvironmentRaised, Process
from vlmrl.agents.spawner import Spawner
from vlmrl.agents.worker import FLAG
from vlmrl.data.media import ImageLimits
from vlmrl.errors import ClusterError, ConfigError
from vlmrl.system.environment_variables import check_passed
from vlmrl.types import Retry

__all__ = [
    "EnvironmentLost",
    "EnvironmentRaised",
    "Environments",
    "Observation",
    "OpenEnvironment",
    "Outcome",
    "ToolError",
    "ToolSpec",
]

START_LIMIT_S = 120.0
"""Time limit for importing the user's file, including what it loads."""
MAX_STARTING = len(os.sched_getaffinity(0))
"""Processes that import the user's file at the same time: more would only slow each other down."""
NUM_ALONE = 64
"""Environments with a process to themselves, by default. Each is a fork, of some 10 MB."""
_NUM_SHARED = 4
"""Processes that asynchronous environments share, by default."""
_WAIT_LIMIT_S = 3600.0


class Environments:
    """The environments of a run, made by the user's function `spec`, `path/to/file.py:make`. Belongs to one event loop.

    Args:
        num_workers: processes of synchronous environments, hence episodes at the same time (None: 64); of asynchronous
            ones, processes that they share (None: 4), and as many for those that are alone (None: 64).
        step_limit_s: time limit of `reset` (including the making of the environment), `step` and each tool.
        wait_limit_s: longest time for which an episode may keep a process to itself. A wait for a free one ends with an
            error if no episode gives its process back for that long.
        pass_env: environment variables with secrets that environments see.
        log: file for their output; None: the output of this process.
    """

    def __init__(
        self,
        spec: str,
        *,
        num_workers: int | None = None,
        step_limit_s: float,
        wait_limit_s: float = _WAIT_LIMIT_S,
        limits: ImageLimits,
        pass_env: tuple[str, ...] = (),
        log: Path | None = None,
    ) -> None:
        """Raises ConfigError if a variable of `pass_env` does not exist."""
        check_passed(pass_env, setting="agent.pass_env")
        file = None if log is None else str(log.absolute())
        self._orders = Orders(spec, limits.image_pixels, limits.total_pixels, file)
        self._num_shared = num_workers or _NUM_SHARED
        self._step_limit_s, self._pass_env = step_limit_s, pass_env
        self._spawner: Spawner | None = None
        self._is_closed = False
        self._has_loaded = False
        """The user's file could be loaded: if it cannot be later, that is the infrastructure's doing."""
        self._starting = asyncio.Semaphore(MAX_STARTING)
        self._tools: tuple[ToolSpec, ...] = ()
        self._is_async = self._is_agent = False
        self._episodes = itertools.count(1)
        self._num_alone, self._wait_limit_s = num_workers or NUM_ALONE, wait_limit_s
        self._slots = asyncio.Semaphore(self._num_alone)
        self._num_returned = 0
        """Processes that episodes have given back."""
        self._idle: list[Process] = []
        """Processes without an episode, for one at a time."""
        self._shared: list[Process] = []
        self._choosing = asyncio.Lock()

    async def start(self) -> tuple[ToolSpec, ...]:
        """Start a process, load the user's file there, and return the tools of its environments.

        Raises:
            ConfigError: it cannot be loaded, or makes no environments.
        """
        try:
            process, hello = await self._start_process("unknown")
        except EnvironmentLost as error:
            await self.close()
            raise ConfigError(f"{FLAG}: {self._orders.spec} cannot be loaded: {error}") from error
        except BaseException:
            await self.close()
            raise
        self._tools = tuple(ToolSpec(tool.name, tool.description, tool.parameters) for tool in hello.tools)
        self._is_async, self._is_agent = hello.is_async, hello.is_agent
        process.is_shared = self._is_async
        (self._shared if self._is_async else self._idle).append(process)
        return self._tools

    @property
    def is_agent(self) -> bool:
        """Whether the user's function is an agent, `async def run(task)`: episodes are `OpenEnvironment.run`. Known
        after `start`."""
        return self._is_agent

    @property
    def is_async(self) -> bool:
        """Whether environments have asynchronous methods. Known after `start`."""
        return self._is_async

    async def open(self, *, alone: bool = False, source: str = "an episode") -> OpenEnvironment:
        """Open an environment. Waits for a free process if it is synchronous or `alone`.

        Args:
            source: row of the episode, for messages.

        Raises:
            EnvironmentLost: a new process has ended, or could not load the user's file.
            ClusterError: no process has become free for `wait_limit_s`.
        """
        if not self._is_async or alone:
            return await self._open_alone(source)
        async with self._choosing:
            self._shared = [process for process in self._shared if process.is_usable]
            least = min(self._shared, key=lambda process: process.num_episodes, default=None)
            if least is None or (least.num_episodes and len(self._shared) < self._num_shared):
                least, _ = await self._start_process("async")
                least.is_shared = True
                self._shared.append(least)
            least.num_episodes += 1
        return self._environment(least, None)

    async def close(self) -> None:
        """End all processes, and those that they have started. Idempotent."""
        self._is_closed = True
        if self._spawner is not None:
            await self._spawner.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _open_alone(self, source: str) -> OpenEnvironment:
        await self._wait_for_slot(source)
        try:
            while self._idle:
                process = self._idle.pop()
                if process.is_usable:
                    break
            else:
                process, _ = await self._start_process("async" if self._is_async else "sync")
        except BaseException:
            self._slots.release()
            raise
        process.num_episodes += 1
        return self._environment(process, self._take_back)

    async def _wait_for_slot(self, source: str) -> None:
        """Wait until a process is free, which is as long as it takes while episodes end. Raises ClusterError."""
        while True:
            num_returned = self._num_returned
            with suppress(TimeoutError):
                async with asyncio.timeout(self._wait_limit_s):
                    await self._slots.acquire()
                    return
            if self._num_returned == num_returned:
                raise ClusterError(
                    f"{source} waits for an environment, and none of the {self._num_alone} episodes that play has "
                    f"ended within {self._wait_limit_s:.0f} s, which is all that an episode may take: raise "
                    "--vllm.generate_timeout_s if the engine is that slow, or --agent.num_workers if the machine has "
                    "room for more processes"
                )

    def _environment(self, process: Process, home: Callable[[Process], None] | None) -> OpenEnvironment:
        tools = tuple(tool.name for tool in self._tools)
        return OpenEnvironment(process, next(self._episodes), tools, self._step_limit_s, home)

    def _take_back(self, process: Process) -> None:
        """Take back a process that was lent to one environment alone."""
        if process.is_usable:
            self._idle.append(process)
        self._num_returned += 1
        self._slots.release()

    async def _start_process(self, mode: Mode) -> tuple[Process, Hello]:
        """Start a process and wait until it has loaded the user's file.

        Raises:
            EnvironmentLost: it ended, or it could not load the file and an earlier one could.
            ConfigError: it could not load the file, and was the first.
        """
        async with self._starting:
            process = Process(await self._running_spawner(), self._orders)
            try:
                async with asyncio.timeout(START_LIMIT_S):
                    hello = await process.start(mode)
            except TimeoutError:
                process.kill()
                problem = f"{FLAG}: {self._orders.spec} takes over {START_LIMIT_S:g} s to load"
                raise self._not_loaded(problem, "timeout") from None
            except BaseException:
                process.kill()
                raise
        if hello.problem:
            raise self._not_loaded(hello.problem, "death")
        self._has_loaded = True
        return process, hello

    def _not_loaded(self, problem: str, kind: Retry) -> ConfigError | EnvironmentLost:
        return EnvironmentLost(kind, problem) if self._has_loaded else ConfigError(problem)

    async def _running_spawner(self) -> Spawner:
        old = self._spawner
        if old is not None and not old.is_running:
            await old.close()
            if self._spawner is old:
                self._spawner = None
        if self._is_closed:
            raise EnvironmentLost("death", "the environments were closed")
        if self._spawner is None:
            self._spawner = Spawner(self._orders, pass_env=self._pass_env)
        return self._spawner
