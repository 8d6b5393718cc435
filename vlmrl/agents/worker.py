"""The code of a process that holds environments: load the user's file, then answer calls until the run closes it.

Environments with only synchronous methods have the process to themselves, one after the other, in its main thread and
without an event loop: libraries with a synchronous interface of their own, browsers among them, refuse to run inside
one. Asynchronous ones share a process and its loop.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import traceback
from collections.abc import Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from vlmrl.agents import observations
from vlmrl.agents.environment import Environment, Task, ToolError, call_tool, tools_of
from vlmrl.agents.messages import (
    MAX_PROBLEM_CHARS,
    Answer,
    Framing,
    Hello,
    Mode,
    Orders,
    Picture,
    Request,
    Tool,
    decode_request,
    encode,
)
from vlmrl.agents.observations import UnusableError
from vlmrl.data.media import ImageLimits
from vlmrl.errors import ConfigError
from vlmrl.rewards.failures import failure_of
from vlmrl.system.plain_text import one_line
from vlmrl.system.user_function import declared, load_function, message_of, name_of, parameters_of, reason

FLAG = "train.agent_func_path"
CLOSE_LIMIT_S = 5.0
"""Time limit for `close` of an environment."""
_MAX_THREADS = 1024
"""Threads of `asyncio.to_thread`, which start when they are needed. With Python's default, a few for each core, no more
episodes than that would play at a time."""
_OFFERED = ("row", "seed")


def main(connection: socket.socket, orders: Orders, mode: Mode) -> None:
    """Load the user's file, and serve the calls that come in over `connection`."""
    try:
        environments = _Environments(orders)
        hello = environments.describe() if mode == "unknown" else Hello(is_async=mode == "async")
    except ConfigError as error:
        hello = Hello(problem=str(error))
    except BaseException as error:  # a user's `make` may raise anything
        traceback.print_exc()
        hello = Hello(problem=f"{FLAG}: {orders.spec} cannot be used: {reason(error, file=_file(orders))}")
    connection.sendall(encode(hello))
    if hello.problem:
        return
    if hello.is_async:
        asyncio.run(_serve_async(connection, environments))
    else:
        _serve(connection, environments)


def _file(orders: Orders) -> str:
    return str(Path(orders.spec.rpartition(":")[0]).expanduser().resolve())


class _Environments:
    """The open environments of this process."""

    def __init__(self, orders: Orders) -> None:
        """Load the user's file. Raises ConfigError."""
        self._make: Callable[..., Any] = load_function(orders.spec, FLAG, default=("make", "run"))
        self.is_agent = inspect.iscoroutinefunction(self._make)
        if self.is_agent:
            _check_agent(self._make)
            _reach_loopback(os.environ)
        else:
            declared(self._make, (), flag=FLAG)
        self._spec, self._file = orders.spec, _file(orders)
        self._limits = ImageLimits(0, orders.image_pixels, orders.total_pixels)
        self._open: dict[int, Environment] = {}

    def describe(self) -> Hello:
        """Make an environment, check its methods, and close it; an agent makes none."""
        if self.is_agent:
            return Hello(is_async=True, is_agent=True)
        environment: Environment = self._make()
        kind = type(environment).__name__
        step = getattr(environment, "step", None)
        if not callable(step):
            raise ConfigError(f"{FLAG}: {kind}, which {self._spec} returned, has no step(self, response)")
        parameters = parameters_of(step, flag=FLAG, name=f"{kind}.step")
        num_required = len(parameters.positional_only) + len(parameters.required)
        if num_required > 1 or not (num_required or parameters.names or parameters.takes_all):
            raise ConfigError(f"{FLAG}: {kind}.step takes the response, and nothing else that is required")
        reset = getattr(environment, "reset", None)
        if reset is not None:
            declared(reset, _OFFERED, flag=FLAG)
        try:
            tools = tools_of(environment)
        except ConfigError as error:
            raise ConfigError(f"{FLAG}: {kind}: {error}") from error
        methods = [getattr(environment, name, None) for name in ("reset", "step", "close", *tools)]
        with suppress(Exception):  # it may need a reset before
            _close(getattr(environment, "close", None))
        return Hello(
            [Tool(spec.name, spec.description, spec.parameters) for spec in tools.values()],
            is_async=any(inspect.iscoroutinefunction(method) for method in methods),
        )

    def call(self, request: Request) -> Any:
        """Call the environment's method and return what it returns, or a coroutine."""
        if request.verb == "run":
            return self._make(Task(request.text, request.key, _row(request), request.seed))
        if request.verb == "reset":
            environment = self._open[request.episode] = self._make()
            reset = getattr(environment, "reset", None)
            if reset is None:
                return None
            names = declared(reset, _OFFERED, flag=FLAG)
            offered = (("row", _row(request)), ("seed", request.seed))
            return reset(**{name: value for name, value in offered if name in names})
        environment = self._open[request.episode]
        if request.verb == "step":
            return environment.step(request.text)
        return call_tool(environment, request.text, request.arguments or {})

    def remove(self, episode: int) -> Callable[[], Any] | None:
        """Forget an environment. Returns its `close`, if it has one."""
        return getattr(self._open.pop(episode, None), "close", None)

    def answer(self, request: Request, returned: Any) -> Answer:
        """Convert what the environment returned. Raises UnusableError."""
        if request.verb == "run":
            return observations.of_run(request.number, returned)
        if request.verb == "reset":
            return observations.of_reset(request.number, returned, self._limits)
        if request.verb == "step":
            return observations.of_step(request.number, returned, self._limits)
        return observations.of_tool(request.number, request.text, returned, self._limits)

    def failure(self, request: Request, error: BaseException) -> Answer:
        """Convert an error of the environment; the log gets its traceback."""
        if isinstance(error, UnusableError):
            return Answer(request.number, "raised", problem=one_line(error, max_chars=MAX_PROBLEM_CHARS))
        if isinstance(error, ToolError):
            return Answer(request.number, "tool_error", problem=one_line(error, max_chars=MAX_PROBLEM_CHARS))
        with suppress(Exception):
            traceback.print_exception(error)
        if request.verb == "tool":
            return Answer(request.number, "tool_error", problem=message_of(error))
        try:
            return Answer(request.number, "raised", problem=reason(error, file=self._file), blame=failure_of(error))
        except Exception:  # attributes of a user's exception may raise, and the working directory may be gone
            return Answer(request.number, "raised", problem=message_of(error))


def _check_agent(run: Callable[..., Any]) -> None:
    """Raise ConfigError unless an agent takes a task, and nothing else that is required."""
    parameters = parameters_of(run, flag=FLAG)
    num_required = len(parameters.positional_only) + len(parameters.required)
    if num_required > 1 or not (num_required or parameters.names):
        raise ConfigError(
            f"{FLAG}: {name_of(run)} is async, so it is an agent: async def run(task); what makes environments is a "
            "plain function"
        )


def _reach_loopback(environment: MutableMapping[str, str]) -> None:
    """Have HTTP clients reach the gateway directly where the machine has a proxy."""
    for name in ("no_proxy", "NO_PROXY"):
        hosts = [host for host in environment.get(name, "").split(",") if host]
        environment[name] = ",".join(dict.fromkeys([*hosts, "127.0.0.1", "localhost", "::1"]))


def _row(request: Request) -> dict[str, Any] | None:
    row = request.arguments
    if row is None or not request.images:
        return row
    return row | {"images": [_open(picture) for picture in request.images]}


def _serve(connection: socket.socket, environments: _Environments) -> None:
    """Answer one call after the other."""
    while True:
        header = _read(connection, 4)
        if not header:
            return
        request = decode_request(_read(connection, int.from_bytes(header, "big")))
        if request.verb == "close":
            try:
                _close(environments.remove(request.episode))
            except (Exception, SystemExit):  # the episode has ended: the log is enough
                traceback.print_exc()
            answer = Answer(request.number, "observation")
        else:
            try:
                answer = environments.answer(request, environments.call(request))
            except BaseException as error:  # the user's code may raise anything, sys.exit included
                answer = environments.failure(request, error)
        connection.sendall(encode(answer))


def _read(connection: socket.socket, count: int) -> bytes:
    """Read so many bytes; none at the end of the stream."""
    content = bytearray()
    while len(content) < count:
        data = connection.recv(min(count - len(content), 2**20))
        if not data:
            return b""
        content += data
    return bytes(content)


async def _serve_async(connection: socket.socket, environments: _Environments) -> None:
    """Answer calls as they come in; those of different episodes run side by side."""
    connection.setblocking(False)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="vlmrl-agent"))
    server = _AsyncServer(environments)
    await asyncio.get_running_loop().connect_accepted_socket(lambda: server.stream, connection)
    await server.ended.wait()
    os._exit(0)  # tasks that ignore their cancellation would be waited for


class _AsyncServer:
    def __init__(self, environments: _Environments) -> None:
        self.ended = asyncio.Event()
        self.stream = Framing(self._receive, self.ended.set)
        self._environments = environments
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Number of the call -> its task."""
        self._closing: set[asyncio.Task[None]] = set()

    def _receive(self, content: bytes) -> None:
        request = decode_request(content)
        if request.verb == "cancel":
            self._cancel(request)
            return
        task = asyncio.create_task(self._answer(request))
        self._tasks[request.number] = task
        task.add_done_callback(lambda _: self._tasks.pop(request.number, None))

    async def _answer(self, request: Request) -> None:
        if request.verb == "close":
            await self._close(request.episode)
            answer = Answer(request.number, "observation")
        else:
            try:
                returned = self._environments.call(request)
                answer = self._environments.answer(
                    request, await returned if inspect.isawaitable(returned) else returned
                )
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    return  # its call has been cancelled, and answered
                answer = self._environments.failure(request, error)
            except BaseException as error:  # the user's code may raise anything, sys.exit included
                answer = self._environments.failure(request, error)
        self.stream.transport.write(encode(answer))

    def _cancel(self, request: Request) -> None:
        """Cancel a call. The answer says that the loop runs, even if the task ignores its cancellation."""
        task = self._tasks.get(request.number)
        if task is not None:
            task.cancel()
        closing = asyncio.create_task(self._close(request.episode))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        self.stream.transport.write(encode(Answer(request.number, "cancelled")))

    async def _close(self, episode: int) -> None:
        close = self._environments.remove(episode)
        if close is not None:
            try:
                returned = close()
                if inspect.isawaitable(returned):
                    await asyncio.wait_for(returned, CLOSE_LIMIT_S)
            except (Exception, SystemExit):  # the episode has ended: the log is enough
                traceback.print_exc()


def _open(picture: Picture) -> Any:
    from PIL import Image

    return Image.frombytes("RGB", (picture.width, picture.height), picture.rgb)


def _close(close: Callable[[], Any] | None) -> None:
    """Call an environment's `close` outside of an event loop."""
    returned = None if close is None else close()
    if inspect.iscoroutine(returned):
        asyncio.run(asyncio.wait_for(returned, CLOSE_LIMIT_S))
