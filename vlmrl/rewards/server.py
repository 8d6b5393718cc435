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
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from types import FrameType, TracebackType
from typing import Annotated, Any, NamedTuple, Protocol, Self

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Request, Response
from fastapi.responses import PlainTextResponse

from vlmrl.config.serve import Serve
from vlmrl.errors import ConfigError
from vlmrl.rewards.client import TOKEN
from vlmrl.rewards.connections import protocol
from vlmrl.rewards.local import Functions
from vlmrl.rewards.local_worker import RewardResult, one_line
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


class _Pending(NamedTuple):
    request: RewardRequest
    result: asyncio.Future[RewardResult]


class _FullError(Exception):
    """The queue is full."""


class _DisconnectedError(Exception):
    """The client has disconnected."""


class Batches:
    """The queue of responses, and the task that has them scored in batches."""

    def __init__(self, scorer: Scorer, serve: Serve) -> None:
        self._scorer = scorer
        self._serve = serve
        self._queue: asyncio.Queue[_Pending] = asyncio.Queue()

    @property
    def num_waiting(self) -> int:
        return self._queue.qsize()

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Return one result per request. Raises _FullError when they are more than may wait."""
        if self.num_waiting + len(requests) > self._serve.max_queue:
            raise _FullError
        loop = asyncio.get_running_loop()
        pending = [_Pending(request, loop.create_future()) for request in requests]
        for item in pending:
            self._queue.put_nowait(item)
        return await asyncio.gather(*(item.result for item in pending))

    async def score_batches(self) -> None:
        """Score batch after batch, one at a time: a model must not be called twice at once."""
        while True:
            batch = await self._next_batch()
            try:
                results = await self._scorer.score([item.request for item in batch])
            except Exception as error:  # the clients get any error of the scorer, and the server keeps running
                for item in batch:
                    if not item.result.done():
                        item.result.set_exception(error)
                continue
            for item, result in zip(batch, results, strict=True):
                if not item.result.done():  # else the client has disconnected
                    item.result.set_result(result)

    async def _next_batch(self) -> list[_Pending]:
        """Responses that arrive within `serve.max_wait_ms` of the first, up to `serve.max_batch`, without those whose
        client has disconnected."""
        batch: list[_Pending] = []
        while not batch:
            pending = [await self._queue.get()]
            with suppress(TimeoutError):
                async with asyncio.timeout(self._serve.max_wait_ms / 1000):
                    while len(pending) < self._serve.max_batch:
                        pending.append(await self._queue.get())
            batch = [item for item in pending if not item.result.done()]
        return batch


def make_app(scorer: Scorer, serve: Serve, token: str | None) -> FastAPI:
    """Return the server as an application. Clients need the `token`, if there is one."""
    batches = Batches(scorer, serve)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        scoring = asyncio.create_task(batches.score_batches())
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
        return {"status": "ok", "waiting": batches.num_waiting}

    @scores.get("/")
    @scores.get("/get_reward")
    async def check_token() -> Response:
        """Let a client check its token before it has responses to score."""
        raise HTTPException(405, "send POST", headers={"Allow": "POST"})

    @scores.post("/")
    @scores.post("/get_reward")
    async def score(request: Request) -> Response:
        requests = await _read(request, scorer, serve)
        try:
            results = await _until_disconnect(request, batches.score(requests))
        except _DisconnectedError:
            return Response(status_code=499)
        except _FullError:
            problem = f"serve.max_queue {serve.max_queue} responses wait already: try again later"
            raise HTTPException(503, problem, headers={"Retry-After": "1"}) from None
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


async def _until_disconnect(request: Request, scoring: Coroutine[Any, Any, list[RewardResult]]) -> list[RewardResult]:
    """Return the result of `scoring`. When the client disconnects, cancel `scoring` and raise _DisconnectedError: the
    responses of a client that retries after a time-out must not be scored twice."""
    task = asyncio.ensure_future(scoring)
    while True:
        done, _ = await asyncio.wait({task}, timeout=_LOOK_AGAIN_S)
        if done:
            return task.result()
        if await request.is_disconnected():
            task.cancel()
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
        make_app(scorer, serve, token),
        http=protocol(serve.body_timeout_s),
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(serve.stop_grace_s),
    )
    await _Server(config, limit_s=serve.stop_grace_s + _CLEAR_UP_S).serve(sockets=[listener])


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
    if not token and not _is_loopback(host):
        raise ConfigError(
            f"serve.host {host} is open to other machines: set the environment variable {TOKEN} to a secret of your "
            "choice, here and where vlmrl rl runs, or leave serve.host at 127.0.0.1"
        )


def listen(host: str, port: int) -> socket.socket:
    """Return a socket at this address. It refuses clients until `run` serves them.

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
