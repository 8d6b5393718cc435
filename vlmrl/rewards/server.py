"""A reward server: answers over HTTP to be scored, whatever scores them. `protocol.py` says what travels.

POST / or /get_reward scores, GET /health says that the server is up. Answers that arrive at about the same time are
scored together. A server that has a token wants `Authorization: Bearer <token>` with everything but /health.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import math
import os
import socket
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple, Protocol

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from vlmrl.config.serve import Serve
from vlmrl.errors import ConfigError
from vlmrl.rewards.client import TOKEN
from vlmrl.rewards.local import Functions
from vlmrl.rewards.local_worker import Verdict, one_line
from vlmrl.rewards.paths import without_paths
from vlmrl.rewards.protocol import TooManyPixelsError, read_request, write_answer
from vlmrl.rewards.question import Question
from vlmrl.rewards.rewarder import combined

_MOST_BYTES = 256 * 2**20
"""Of a request, images included."""
_LOOK_AGAIN_S = 0.5
"""How often it is asked whether a client still waits."""
_CLEAR_UP_S = 3.0
"""For ending by itself after `serve.stop_grace_s`."""
_log = logging.getLogger(__name__)


class Judge(Protocol):
    """What says what answers are worth."""

    wants_images: bool
    """It looks at images. They are not opened where nobody does."""

    def judge(self, questions: Sequence[Question]) -> Sequence[Verdict]:
        """One verdict per answer, in order. It is never called twice at once."""

    def close(self) -> None:
        """End what it started."""


class FunctionJudge:
    """Reward functions as a judge: the weighted sum of what they say."""

    def __init__(
        self,
        weights: dict[str, float],
        own: str | None,
        *,
        num_workers: int,
        time_limit_s: float,
        pass_env: tuple[str, ...] = (),
    ) -> None:
        """`weights` are of built-in functions; the user's, `path/to/file.py:function`, has weight 1 beside them.

        Raises ConfigError when the user's function cannot be loaded.
        """
        self._functions = Functions(
            tuple(weights), own, num_workers=num_workers, time_limit_s=time_limit_s, pass_env=pass_env
        )
        self._weights = {name: weights.get(name, 1.0) for name in self._functions.names}
        self.wants_images = self._functions.wants_images

    def judge(self, questions: Sequence[Question]) -> list[Verdict]:
        missing = [self._functions.missing(question) for question in questions]
        can = [number for number, lacks in enumerate(missing) if lacks is None]
        said: dict[int, dict[str, Verdict]] = {number: {} for number in can}
        begun = self._functions.begin([questions[number] for number in can])
        with closing(self._functions.collect([begun])) as found:
            for _, answer, name, verdict in found:
                said[can[answer]][name] = verdict
        return [
            combined(said[number], self._weights) if lacks is None else Verdict(problem=lacks, blame="infrastructure")
            for number, lacks in enumerate(missing)
        ]

    def close(self) -> None:
        self._functions.close()


class _Waiting(NamedTuple):
    question: Question
    verdict: asyncio.Future[Verdict]


class _FullError(Exception):
    """No more answers may wait."""


class _GoneError(Exception):
    """Nobody waits for the answer any more."""


class Line:
    """Answers that wait for the judge, and are brought to it in batches."""

    def __init__(self, judge: Judge, serve: Serve) -> None:
        self._judge = judge
        self._serve = serve
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue()
        # One thread: a model must not be asked twice at once, and the event loop goes on answering meanwhile.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="judge")

    @property
    def num_waiting(self) -> int:
        return self._queue.qsize()

    async def score(self, questions: Sequence[Question]) -> list[Verdict]:
        """One verdict per answer. Raises _FullError when they are more than may wait."""
        if self.num_waiting + len(questions) > self._serve.max_queue:
            raise _FullError
        loop = asyncio.get_running_loop()
        waiting = [_Waiting(question, loop.create_future()) for question in questions]
        for one in waiting:
            self._queue.put_nowait(one)
        return await asyncio.gather(*(one.verdict for one in waiting))

    async def serve_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = await self._next_batch()
            try:
                verdicts = await loop.run_in_executor(self._thread, self._judge.judge, [one.question for one in batch])
            except Exception as error:  # whatever a judge may raise is the answer to those who asked, not our end
                for one in batch:
                    if not one.verdict.done():
                        one.verdict.set_exception(error)
                continue
            for one, verdict in zip(batch, verdicts, strict=True):
                if not one.verdict.done():  # else the client has gone
                    one.verdict.set_result(verdict)

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    async def _next_batch(self) -> list[_Waiting]:
        """What comes within `serve.max_wait_ms` of the first, up to `serve.max_batch`, less what nobody waits for."""
        batch: list[_Waiting] = []
        while not batch:
            waiting = [await self._queue.get()]
            with suppress(TimeoutError):
                async with asyncio.timeout(self._serve.max_wait_ms / 1000):
                    while len(waiting) < self._serve.max_batch:
                        waiting.append(await self._queue.get())
            batch = [one for one in waiting if not one.verdict.done()]
        return batch


def make_app(judge: Judge, serve: Serve, token: str | None) -> FastAPI:
    """The server as an application; `token` is what clients must show, if any."""
    line = Line(judge, serve)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        serving = asyncio.create_task(line.serve_for_ever())
        yield
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        line.close()

    app = FastAPI(title="vlmrl serve-rm", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    if token:
        app.add_middleware(_Gate, token=token)

    @app.get("/health")
    async def health() -> dict[str, str | int]:
        return {"status": "ok", "waiting": line.num_waiting}

    @app.post("/")
    @app.post("/get_reward")
    async def score(request: Request) -> Response:
        try:
            async with asyncio.timeout(serve.body_timeout_s):
                content = await _content(request)
        except TimeoutError:
            return _problem(408, f"the request was not whole after serve.body_timeout_s {serve.body_timeout_s:g}")
        if content is None:
            return _problem(413, f"a request may have {_MOST_BYTES} bytes")
        try:
            questions = await asyncio.to_thread(
                read_request, content, wants_images=judge.wants_images, max_pixels=serve.max_request_pixels
            )
        except ValueError as error:
            return _problem(413 if isinstance(error, TooManyPixelsError) else 422, str(error))
        if len(questions) > serve.max_queue:
            return _problem(
                413, f"{len(questions)} answers in one request: serve.max_queue lets {serve.max_queue} wait"
            )
        try:
            verdicts = await _unless_gone(request, line.score(questions))
        except _GoneError:
            return Response(status_code=499)
        except _FullError:
            return _problem(503, f"serve.max_queue {serve.max_queue} answers wait already: come back later")
        except Exception as error:
            _log.error("%s: %s", type(error).__name__, one_line(error))
            return _problem(500, f"{type(error).__name__}: {error}")
        return Response(write_answer([_for_others(verdict) for verdict in verdicts]), media_type="application/json")

    return app


class _Gate:
    """Lets in who shows the token; everybody to /health. FastAPI's own kind of middleware would hide from what lies
    behind it that a client has gone."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and scope["path"] != "/health" and not _shows(Request(scope), self._token):
            app = _problem(401, "send Authorization: Bearer and the server's token")
        await app(scope, receive, send)


async def _unless_gone(request: Request, scoring: Coroutine[Any, Any, list[Verdict]]) -> list[Verdict]:
    """What `scoring` comes to. When the client goes, it is cancelled and _GoneError raised: of a client that asks again
    after a time-out, nothing must be scored twice."""
    task = asyncio.ensure_future(scoring)
    while True:
        done, _ = await asyncio.wait({task}, timeout=_LOOK_AGAIN_S)
        if done:
            return task.result()
        if await request.is_disconnected():
            task.cancel()
            raise _GoneError


def run(judge: Judge, serve: Serve, token: str | None, *, listener: socket.socket) -> None:
    """Answer on `listener` until the process is told to stop (SIGTERM, Ctrl-C), and then what is under way."""
    config = uvicorn.Config(
        make_app(judge, serve, token),
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(serve.stop_grace_s),
    )
    _Server(config, limit_s=serve.stop_grace_s + _CLEAR_UP_S).run(sockets=[listener])


class _Server(uvicorn.Server):
    """Ends within a limit after it was told to, whatever clients and judge do: the interpreter would wait for threads,
    and those for a judge that hangs."""

    def __init__(self, config: uvicorn.Config, *, limit_s: float) -> None:
        super().__init__(config)
        self._limit_s = limit_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            late = threading.Timer(self._limit_s, _end_now)
            late.daemon = True
            late.start()
        super().handle_exit(sig, frame)


def _end_now() -> None:
    _log.error("vlmrl serve-rm: ended after serve.stop_grace_s with answers under way")
    os._exit(0)  # scoring processes go with this one


def check_token(host: str, token: str | None) -> None:
    """Raises ConfigError for a server that other machines would reach without a token."""
    if not token and not _is_loopback(host):
        raise ConfigError(
            f"serve.host {host} is open to other machines: set the environment variable {TOKEN} to a secret of your "
            "choice, here and where vlmrl rl runs, or leave serve.host at 127.0.0.1"
        )


def listen(host: str, port: int) -> socket.socket:
    """A socket at this address. It turns clients away until `run` is there for them.

    Raises ConfigError when the address is not this machine's or the port is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port is free as soon as its server has ended
        listener.bind((address[0], port, *address[2:]))
        return listener
    except (OSError, OverflowError) as error:
        raise ConfigError(f"serve.host {host}, serve.port {port}: cannot listen there: {error}") from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _shows(request: Request, token: str) -> bool:
    shown = request.headers.get("authorization", "")
    return hmac.compare_digest(shown.encode(), f"Bearer {token}".encode())


async def _content(request: Request) -> bytes | None:
    """None for more bytes than a request may have."""
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > _MOST_BYTES:
            return None
    return bytes(content)


def _problem(status: int, what: str) -> Response:
    headers = {"Retry-After": "1"} if status == 503 else {"Connection": "close"} if status == 408 else None
    return PlainTextResponse(without_paths(one_line(what)), status_code=status, headers=headers)


def _for_others(verdict: Verdict) -> Verdict:
    """The verdict as clients see it: where files lie on this machine is no business of theirs."""
    return verdict if verdict.problem is None else replace(verdict, problem=without_paths(verdict.problem))
