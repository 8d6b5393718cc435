"""Messages between a run and the processes of its environments: msgpack behind four bytes of length."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import msgspec

from vlmrl.types import Failure

_LENGTH_BYTES = 4
_MAX_BYTES = 2**31
"""Most bytes of a message to a process, which the run itself writes."""
MAX_PROBLEM_CHARS = 500

Verb = Literal["reset", "step", "tool", "run", "close", "cancel"]
Mode = Literal["unknown", "sync", "async"]
"""Whether environments have asynchronous methods. In the first process it is unknown."""
Outcome = Literal["observation", "raised", "tool_error", "cancelled"]


class Picture(msgspec.Struct, array_like=True, frozen=True):
    """An image: RGB, row by row."""

    width: int
    height: int
    rgb: bytes


class Request(msgspec.Struct, array_like=True, frozen=True):
    """A call of an environment."""

    number: int
    """The answer has the same. That of `cancel` is the number of the call to cancel."""
    episode: int
    verb: Verb
    text: str = ""
    """The response of `step`; the name of the tool; the address of `run`'s policy."""
    arguments: dict[str, Any] | None = None
    """Those of the tool; the row of `reset` and `run`."""
    seed: int = 0
    images: list[Picture] = []
    """Images of the row."""
    key: str = ""
    """The key of `run`'s policy."""


class Answer(msgspec.Struct, array_like=True, frozen=True, tag="answer"):
    """The outcome of a call."""

    number: int
    outcome: Outcome
    parts: list[str | Picture] = []
    reward: float = 0.0
    done: bool = False
    problem: str = ""
    """Why there is no observation, in one line."""
    blame: Failure = "response"
    """The cause of `raised`."""
    numbers: dict[str, float] = {}
    """Those that `run` returned beside its reward."""


class Tool(msgspec.Struct, array_like=True, frozen=True):
    """See `environment.ToolSpec`."""

    name: str
    description: str
    parameters: dict[str, Any]


class Hello(msgspec.Struct, array_like=True, frozen=True, tag="hello"):
    """The first message of a process: it has loaded the user's file."""

    tools: list[Tool] = []
    is_async: bool = False
    is_agent: bool = False
    """The user's function is an agent, `async def run(task)`, which makes no environments."""
    problem: str = ""
    """Why the environments cannot be used, in one line; empty if they can."""


class Orders(msgspec.Struct, frozen=True):
    """Settings of all processes of a run's environments."""

    spec: str
    """`path/to/file.py:make`"""
    image_pixels: int
    total_pixels: int
    """See `data.media.ImageLimits`."""
    log: str | None = None
    """File for the output of environments; None: the output of the run."""


def encode(message: Any) -> bytes:
    """Encode a message. Raises what `msgspec.msgpack.encode` raises for values that msgpack does not have."""
    content = msgspec.msgpack.encode(message)
    return len(content).to_bytes(_LENGTH_BYTES, "big") + content


class _Decoders(NamedTuple):
    request: msgspec.msgpack.Decoder[Request]
    reply: msgspec.msgpack.Decoder[Answer | Hello]


_DECODERS = _Decoders(msgspec.msgpack.Decoder(Request), msgspec.msgpack.Decoder(Answer | Hello))


def decode_request(content: bytes) -> Request:
    """Decode a message to a process."""
    return _DECODERS.request.decode(content)


def decode_reply(content: bytes) -> Answer | Hello:
    """Decode a message of a process. Raises msgspec.DecodeError."""
    return _DECODERS.reply.decode(content)


class Framing(asyncio.Protocol):
    """Passes whole messages of a stream to `receive`; calls `end` when the stream ends or a message is too long."""

    transport: asyncio.WriteTransport

    def __init__(
        self, receive: Callable[[bytes], None], end: Callable[[], None], *, max_bytes: int = _MAX_BYTES
    ) -> None:
        self._receive, self._end, self._max_bytes = receive, end, max_bytes
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.WriteTransport", transport)  # uvloop's, in Ray's workers, is of no such class

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= _LENGTH_BYTES:
            length = int.from_bytes(self._buffer[:_LENGTH_BYTES], "big")
            if length > self._max_bytes:
                self.transport.abort()
                return
            end = _LENGTH_BYTES + length
            if len(self._buffer) < end:
                return
            content = bytes(memoryview(self._buffer)[_LENGTH_BYTES:end])
            del self._buffer[:end]
            self._receive(content)

    def connection_lost(self, error: Exception | None) -> None:
        self._end()
