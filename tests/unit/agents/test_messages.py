"""Messages arrive whole, however the stream is cut."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmrl.agents.messages import Answer, Framing, Hello, Picture, Request, Tool, decode_reply, decode_request, encode

pytestmark = pytest.mark.anyio

REPLIES: list[Answer | Hello] = [
    Hello([Tool("zoom", "Enlarge.", {"type": "object"})], is_async=True),
    Answer(1, "observation", ["x", Picture(1, 2, b"abcdef"), ""], reward=-0.5, done=True),
    Answer(2, "raised", problem="ValueError: no", blame="infrastructure"),
]


@given(st.lists(st.integers(1, 50)))
def test_messages_arrive_whole_however_the_stream_is_cut(lengths: list[int]) -> None:
    received: list[Any] = []
    framing = Framing(lambda content: received.append(decode_reply(content)), lambda: None)
    stream = b"".join(map(encode, REPLIES))
    for length in lengths:
        framing.data_received(stream[:length])
        stream = stream[length:]
    framing.data_received(stream)
    assert received == REPLIES


def test_requests() -> None:
    request = Request(3, 4, "reset", arguments={"label": None}, seed=2**62, images=[Picture(1, 1, b"abc")])
    assert decode_request(encode(request)[4:]) == request


async def test_a_message_that_is_too_long_ends_the_stream() -> None:
    received: list[bytes] = []
    ended = asyncio.Event()
    framing = Framing(received.append, ended.set, max_bytes=10)
    server = await asyncio.start_server(lambda _, writer: writer.write(b"\0\0\0\x02ab\0\0\0\x0babc"), "127.0.0.1", 0)
    async with server:
        await asyncio.get_running_loop().create_connection(lambda: framing, *server.sockets[0].getsockname())
        async with asyncio.timeout(10):
            await ended.wait()
    assert received == [b"ab"]
