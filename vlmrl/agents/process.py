"""A process of environments, seen from the run: its calls, their time limits, and its end."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vlmrl.agents.messages import (
    MAX_PROBLEM_CHARS,
    Answer,
    Framing,
    Hello,
    Mode,
    Orders,
    Picture,
    Request,
    Verb,
    decode_reply,
    encode,
)
from vlmrl.agents.observations import MAX_CHARS, MAX_PARTS
from vlmrl.agents.spawner import Spawner
from vlmrl.rewards.bounds import problem_of_reward
from vlmrl.system.exits import format_exit, may_be_out_of_memory, oom_kills
from vlmrl.system.plain_text import one_line
from vlmrl.types import Failure, Retry

_LATE_S = 0.1
"""Time for an answer that has arrived while the run was busy."""
_CANCEL_LIMIT_S = 5.0
"""Time in which the event loop of asynchronous environments has to react. Hundreds of them may be at work before."""
_OVERHEAD_BYTES = 2**20


class EnvironmentRaised(Exception):  # noqa: N818 - an outcome
    """An environment raised, or returned something unusable. `str` is one line for users."""

    def __init__(self, problem: str, *, blame: Failure = "response") -> None:
        super().__init__(problem)
        self.blame = blame
        """The cause, by the rule of rewards: errors of the network and the operating system are `infrastructure`."""


class EnvironmentLost(Exception):  # noqa: N818 - an outcome
    """An environment hung past its limit, or its process ended. `str` is one line for users."""

    def __init__(self, kind: Retry, problem: str) -> None:
        super().__init__(problem)
        self.kind = kind


class UnsendableError(Exception):
    """A value that the messages between processes cannot hold."""


@dataclass(eq=False)
class _Call:
    """A call in progress, and its time limit."""

    number: int
    episode: int
    verb: Verb
    limit_s: float
    start: float
    paused_s: Callable[[], float]
    timer: asyncio.TimerHandle = field(init=False)


class Process:
    """A process of environments, and the calls that wait for it."""

    def __init__(self, spawner: Spawner, orders: Orders) -> None:
        self._spawner, self._orders = spawner, orders
        self._calls = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Answer]] = {}
        self._cancelled: dict[int, asyncio.Future[None]] = {}
        """Calls whose cancellation the process has not confirmed yet."""
        self._loop = asyncio.get_running_loop()
        self._hello: asyncio.Future[Hello] = self._loop.create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._number = 0
        self._oom_kills = oom_kills()
        self._reason: str | None = None
        """Why it has ended."""
        self.num_episodes = 0
        self.is_shared = False
        """It may have several episodes at the same time. A call of one that is not is ended by killing it."""
        self.is_usable = True

    async def start(self, mode: Mode) -> Hello:
        """Start the process. Raises EnvironmentLost if it ends before it is ready."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        max_bytes = 3 * self._orders.total_pixels + 8 * MAX_CHARS + _OVERHEAD_BYTES
        self._stream = Framing(self._receive, self.kill, max_bytes=max_bytes)
        await self._loop.create_unix_connection(lambda: self._stream, sock=ours)
        with theirs:
            self._number = await self._spawner.start(mode, theirs, self._note_exit)
        return await self._hello

    def kill(self, reason: str | None = None) -> None:
        """Kill the process and those that it has started. Pending calls raise EnvironmentLost, with its exit code if
        there is no `reason`."""
        if self.is_usable:
            self.is_usable, self._reason = False, reason
            self._spawner.kill(self._number)

    async def call(
        self,
        verb: Verb,
        episode: int,
        limit_s: float,
        text: str = "",
        *,
        paused_s: Callable[[], float] = lambda: 0.0,
        **others: Any,
    ) -> Answer:
        """Make a call. `paused_s` returns the seconds so far that do not count for its limit.

        Raises:
            EnvironmentLost: it took too long, or the process ended.
            UnsendableError: an argument cannot be sent.
        """
        if not self.is_usable:
            raise EnvironmentLost("death", self._reason or "its process has ended")
        number = next(self._calls)
        try:
            message = encode(Request(number, episode, verb, text, **others))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise UnsendableError(one_line(error, max_chars=MAX_PROBLEM_CHARS)) from error
        answer = self._pending[number] = self._loop.create_future()
        self._stream.transport.write(message)
        call = _Call(number, episode, verb, limit_s, self._loop.time(), paused_s)
        call.timer = self._loop.call_later(limit_s, self._expire, call)
        try:
            return await answer
        except asyncio.CancelledError:
            self._abandon(number, episode)
            raise
        finally:
            call.timer.cancel()
            self._pending.pop(number, None)

    def _expire(self, call: _Call) -> None:
        remaining_s = call.start + call.limit_s + call.paused_s() - self._loop.time()
        if remaining_s > 0:
            call.timer = self._loop.call_later(remaining_s, self._expire, call)
            return
        task = self._loop.create_task(self._end_call(call.number, call.episode, call.verb, call.limit_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end_call(self, number: int, episode: int, verb: Verb, limit_s: float) -> None:
        """End a call that has reached its limit."""
        await asyncio.sleep(_LATE_S)
        answer = self._pending.get(number)
        if answer is None or answer.done():
            return
        self._abandon(number, episode)
        if self.is_shared:
            confirmed = self._cancelled[number] = self._loop.create_future()
            await asyncio.wait([confirmed], timeout=_CANCEL_LIMIT_S)
            del self._cancelled[number]
            if not confirmed.done():
                self.kill(f"an environment of the same process blocked its event loop for over {_CANCEL_LIMIT_S:g} s")
        if not answer.done():
            answer.set_exception(EnvironmentLost("timeout", f"{verb} took longer than {limit_s:g} s"))

    def _abandon(self, number: int, episode: int) -> None:
        if not self.is_shared:
            self.kill("its process was killed in the middle of a call")
        elif self.is_usable:
            self._stream.transport.write(encode(Request(number, episode, "cancel")))

    def _receive(self, content: bytes) -> None:
        try:
            message = decode_reply(content)
        except msgspec.DecodeError:
            self.kill("its process sent something else than an answer")
            return
        if isinstance(message, Hello):
            if not self._hello.done():
                self._hello.set_result(message)
        elif message.outcome == "cancelled":
            if (confirmed := self._cancelled.get(message.number)) is not None and not confirmed.done():
                confirmed.set_result(None)
        elif (answer := self._pending.get(message.number)) is not None and not answer.done():
            if _is_sound(message, self._orders):
                answer.set_result(message)
            else:
                self.kill("its process sent an observation that does not agree with itself, or is too large")

    def _note_exit(self, code: int | None) -> None:
        self.is_usable = False
        is_out_of_memory = may_be_out_of_memory(code) and oom_kills() > self._oom_kills
        self._reason = self._reason or f"its process {format_exit(code, is_out_of_memory=is_out_of_memory)}"
        futures: list[asyncio.Future[Any]] = [*self._pending.values(), self._hello]
        for future in futures:
            if not future.done():
                future.set_exception(EnvironmentLost("death", self._reason))
        with suppress(EnvironmentLost, asyncio.CancelledError):
            self._hello.result()  # else asyncio reports that nobody has seen its exception
        self._stream.transport.abort()


def _is_sound(answer: Answer, orders: Orders) -> bool:
    pictures = [part for part in answer.parts if isinstance(part, Picture)]
    texts = [answer.problem, *answer.numbers, *(part for part in answer.parts if isinstance(part, str))]
    return (
        all(problem_of_reward(number) is None for number in (answer.reward, *answer.numbers.values()))
        and len(answer.parts) + len(answer.numbers) <= MAX_PARTS
        and sum(map(len, texts)) <= MAX_CHARS
        and all(min(p.width, p.height) > 0 and len(p.rgb) == 3 * p.width * p.height for p in pictures)
        and all(p.width * p.height <= orders.image_pixels for p in pictures)
        and sum(p.width * p.height for p in pictures) <= orders.total_pixels
    )
