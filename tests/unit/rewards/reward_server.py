"""Reward servers for tests: fake ones in threads, and real ones in the event loop of the test."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import uvicorn
from fastapi import FastAPI

from vlmrl.rewards.connections import protocol
from vlmrl.rewards.server import listen

Asked = Mapping[str, Any]
Reply = Callable[[int, Asked], tuple[int, bytes]]
"""(number of earlier requests, request) -> (status, body)"""


@dataclass
class Seen:
    """The requests that a server received."""

    url: str
    requests: list[Asked] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


def lengths(_: int, asked: Asked) -> tuple[int, bytes]:
    """Score a response by its number of characters."""
    return 200, json.dumps({"rewards": [len(response) for response in asked["responses"]]}).encode()


@contextmanager
def server(reply: Reply = lengths, *, delay_s: float = 0.0) -> Iterator[Seen]:
    """A server that replies to POST with `reply`."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(seen.requests)
                seen.requests.append(asked)
                seen.headers.append(dict(self.headers))
            time.sleep(delay_s)
            status, body = reply(number, asked)
            with suppress(ConnectionError):  # the client has timed out
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        seen = Seen(f"http://127.0.0.1:{running.server_port}/get_reward")
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield seen
        finally:
            running.shutdown()
            thread.join()


@asynccontextmanager
async def serving(app: FastAPI, *, headers_timeout_s: float = 60.0) -> AsyncIterator[str]:
    """The application behind a URL, in the event loop of the test."""
    with listen("127.0.0.1", 0) as listener:
        http = protocol(headers_timeout_s)
        running = uvicorn.Server(uvicorn.Config(app, http=http, lifespan="on", log_level="warning"))
        task = asyncio.create_task(running.serve(sockets=[listener]))
        while not running.started:
            assert not task.done()
            await asyncio.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            running.should_exit = True
            await task
