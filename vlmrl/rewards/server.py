"""Reward server: scores responses over HTTP, with functions or a model. `protocol.py` has the format.

POST / or /get_reward scores, GET /health reports that the server is up. Responses that arrive at about the same time
are scored together. A server with a token requires `Authorization: Bearer <token>` for scores.
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
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from types import FrameType, TracebackType
from typing import Annotated, Protocol, Self

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Request, Response
from fastapi.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from vlmrl.config.serve import Serve
from vlmrl.errors import ConfigError
from vlmrl.rewards.batch_queue import BatchQueue
from vlmrl.rewards.client import TOKEN
from vlmrl.rewards.connections import protocol
from vlmrl.rewards.function_worker import RewardResult, one_line
from vlmrl.rewards.functions import Functions
from vlmrl.rewards.paths import without_paths
from vlmrl.rewards.protocol import RewardRequest, TooManyPixelsError, read_request, write_results
from vlmrl.rewards.rewarder import combined

_MAX_BYTES = 256 * 2**20
"""Limit on a request, images included."""
_LOOK_AGAIN_S = 0.5
"""Interval at which the server checks whether a client still waits."""
_CLEAR_UP_S = 3.0
"""Time to end cleanly after `serve.stop_grace_s`."""
_log = logging.getLogger(__name__)


class Scorer(Protocol):
    """Scores responses."""

    wants_images: bool
    """Whether it reads images. Otherwise they are not opened."""

    async def score(self, requests: Sequence[RewardRequest]) -> Sequence[RewardResult]:
        """Return one result per request, in order. One call at a time."""


class FunctionScorer:
    """Scores with the weighted sum of reward functions. Their processes live within `async with`."""

    def __init__(
        self,
        weights: dict[str, float],
        user_function: str | None,
        *,
        num_workers: int,
        time_limit_s: float,
        pass_env: tuple[str, ...] = (),
    ) -> None:
        """`weights` are of built-in functions; the user's function, `path/to/file.py:function`, has weight 1."""
        self._functions = Functions(
            tuple(weights), user_function, num_workers=num_workers, time_limit_s=time_limit_s, pass_env=pass_env
        )
        self._weights = {name: weights.get(name, 1.0) for name in self._functions.names}
        self.wants_images = False

    async def __aenter__(self) -> Self:
        """Raises ConfigError when the user's function cannot be loaded."""
        try:
            await self._functions.start()
        except BaseException:
            await self._functions.close()
            raise
        self.wants_images = self._functions.wants_images
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        missing = [self._functions.missing(request) for request in requests]
        complete = [number for number, reason in enumerate(missing) if reason is None]
        results: dict[int, dict[str, RewardResult]] = {number: {} for number in complete}
        begun = await self._functions.begin([requests[number] for number in complete])
        async with aclosing(self._functions.collect([begun])) as collected:
            async for _, response, name, result in collected:
                results[complete[response]][name] = result
        return [
            combined(results[number], self._weights)
            if reason is None
            else RewardResult(problem=reason, blame="infrastructure")
            for number, reason in enumerate(missing)
        ]

    async def close(self) -> None:
        """End the processes. Idempotent."""
        await self._functions.close()


class _DisconnectedError(Exception):
    """The client has disconnected."""


def make_app(scorer: Scorer, serve: Serve, token: str | None) -> FastAPI:
    """Return the server as an application. Clients need the `token`, if there is one."""
    queue = BatchQueue()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        # One batch at a time: a model must not be called twice at once.
        batches = queue.score_batches(scorer.score, lambda _: serve.max_batch, max_wait_s=serve.max_wait_ms / 1000)
        scoring = asyncio.create_task(batches)
        yield
        scoring.cancel()
        await asyncio.gather(scoring, return_exceptions=True)

    async def check_authorization(authorization: Annotated[str, Header()] = "") -> None:
        if token and not hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
            raise HTTPException(401, "send Authorization: Bearer and the server's token")

    app = FastAPI(title="vlmrl serve-rm", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(HTTPException, _refuse)
    scores = APIRouter(dependencies=[Depends(check_authorization)])

    @app.get("/health")
    async def health() -> dict[str, str | int]:
        return {"status": "ok", "waiting": queue.num_waiting}

    @scores.get("/")
    @scores.get("/get_reward")
    async def check_token() -> Response:
        """Let a client check its token before it has responses to score."""
        raise HTTPException(405, "send POST", headers={"Allow": "POST"})

    @scores.post("/")
    @scores.post("/get_reward")
    async def score(request: Request) -> Response:
        requests = await _read(request, scorer, serve)
        if queue.num_waiting + len(requests) > serve.max_queue:
            problem = f"serve.max_queue {serve.max_queue} responses wait already: try again later"
            raise HTTPException(503, problem, headers={"Retry-After": "1"})
        try:
            results = await _until_disconnect(request, asyncio.gather(*queue.submit(requests)))
        except _DisconnectedError:
            return Response(status_code=499)
        except Exception as error:
            _log.error("%s: %s", type(error).__name__, one_line(error))
            raise HTTPException(500, f"{type(error).__name__}: {error}") from error
        return Response(write_results([_for_clients(result) for result in results]), media_type="application/json")

    app.include_router(scores)
    return app


async def _read(request: Request, scorer: Scorer, serve: Serve) -> list[RewardRequest]:
    """Return the responses to score. Raises HTTPException for a request that is late, too large or not in the
    format."""
    try:
        async with asyncio.timeout(serve.body_timeout_s):
            content = await _content(request)
    except TimeoutError:
        problem = f"the request was not complete after serve.body_timeout_s {serve.body_timeout_s:g}"
        raise HTTPException(408, problem, headers={"Connection": "close"}) from None
    try:
        requests = await asyncio.to_thread(
            read_request, content, wants_images=scorer.wants_images, max_pixels=serve.max_request_pixels
        )
    except ValueError as error:
        raise HTTPException(413 if isinstance(error, TooManyPixelsError) else 422, str(error)) from error
    if len(requests) > serve.max_queue:
        raise HTTPException(
            413, f"{len(requests)} responses in one request: serve.max_queue lets {serve.max_queue} wait"
        )
    return requests


async def _content(request: Request) -> bytes:
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > _MAX_BYTES:
            raise HTTPException(413, f"a request may have {_MAX_BYTES} bytes")
    return bytes(content)


async def _until_disconnect(request: Request, scoring: asyncio.Future[list[RewardResult]]) -> list[RewardResult]:
    """Return the result of `scoring`. When the client disconnects, cancel `scoring` and raise _DisconnectedError: the
    responses of a client that retries after a time-out must not be scored twice."""
    while True:
        done, _ = await asyncio.wait({scoring}, timeout=_LOOK_AGAIN_S)
        if done:
            return scoring.result()
        if await request.is_disconnected():
            scoring.cancel()
            raise _DisconnectedError


async def _refuse(_: Request, error: Exception) -> Response:
    """Return the error as one line of text, without the paths of this machine."""
    assert isinstance(error, HTTPException)
    return PlainTextResponse(without_paths(one_line(error.detail)), error.status_code, error.headers)


def _for_clients(result: RewardResult) -> RewardResult:
    """Return the result without the paths of this machine."""
    return result if result.problem is None else replace(result, problem=without_paths(result.problem))


async def run(scorer: Scorer, serve: Serve, token: str | None, *, listener: socket.socket) -> None:
    """Serve on `listener` until the process gets SIGTERM or Ctrl-C, and finish the requests in progress."""
    config = uvicorn.Config(
        _reply_when_stopped(make_app(scorer, serve, token)),
        http=protocol(serve.body_timeout_s),
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(serve.stop_grace_s),
    )
    await _Server(config, limit_s=serve.stop_grace_s + _CLEAR_UP_S).serve(sockets=[listener])


def _reply_when_stopped(app: ASGIApp) -> ASGIApp:
    """Wrap the application: requests that uvicorn cancels after `serve.stop_grace_s` get a reply, in place of a
    traceback in the log."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            with suppress(RuntimeError):  # the reply has begun
                await PlainTextResponse("the server is stopping", 503)(scope, receive, send)

    return wrapped


class _Server(uvicorn.Server):
    """End the process within a limit after a signal, regardless of clients and scorer: the interpreter would wait for
    the thread of a hanging model."""

    def __init__(self, config: uvicorn.Config, *, limit_s: float) -> None:
        super().__init__(config)
        self._limit_s = limit_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            late = threading.Timer(self._limit_s, _end_now)
            late.daemon = True
            late.start()
        else:  # uvicorn abandons its tasks, which would print a traceback each
            logging.getLogger("uvicorn.error").disabled = True
        super().handle_exit(sig, frame)


def _end_now() -> None:
    _log.error("vlmrl serve-rm: ended after serve.stop_grace_s with requests in progress")
    os._exit(0)  # scoring processes end with this one


def check_token(host: str, token: str | None) -> None:
    """Raise ConfigError for a server that other machines could reach without a token."""
    if not token and not is_loopback(host):
        raise ConfigError(
            f"serve.host {host} is open to other machines: set the environment variable {TOKEN} to a secret of your "
            "choice, here and where vlmrl rl runs, or leave serve.host at 127.0.0.1"
        )


def listen(host: str, port: int, *, section: str = "serve") -> socket.socket:
    """Return a socket at this address. It refuses clients until it is served. `section` has the address's settings.

    Raises ConfigError when the address is not this machine's or the port is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port is free as soon as its server has ended
        listener.bind((address[0], port, *address[2:]))
        return listener
    except (OSError, OverflowError) as error:
        raise ConfigError(f"{section}.host {host}, {section}.port {port}: cannot listen there: {error}") from error


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
