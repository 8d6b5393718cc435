"""The gateway's HTTP server: OpenAI's chat completions, with a key per episode.

POST /v1/chat/completions and /v1/vlmrl/reward and GET /v1/models need a key; GET /health and /metrics need none.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Generator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Header, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from vlmrl.agents.gateway import replies
from vlmrl.agents.gateway.bodies import ChatBody, RefusedError, read_object
from vlmrl.agents.gateway.episode import GatewayEpisode, Pending
from vlmrl.agents.gateway.replies import Completion
from vlmrl.config.gateway import Gateway
from vlmrl.errors import ClusterError
from vlmrl.plugins import Processor
from vlmrl.rewards.bounds import MAX_REWARD
from vlmrl.rewards.connections import protocol
from vlmrl.rewards.server import listen

MODEL = "policy"
"""Name of the model. Requests may have any other."""
_LOOK_AGAIN_S = 0.5
"""Interval at which the server checks whether a client still waits."""
_COMMENT_S = 10.0
"""Interval of comments in a stream that waits for the engine."""
_MAX_READ = 32
"""A request is read up to this multiple of its maximum size: a client that still sends could not read the reply."""
_LARGE = 2**20
"""Bytes beyond which a request takes one of the few places of its episode for large ones."""
_NO_PATH = "no such path: there are /v1/chat/completions, /v1/models, /v1/vlmrl/reward, /health and /metrics"
_START_LIMIT_S = 30.0
_log = logging.getLogger(__name__)

Find = Callable[[str], GatewayEpisode | None]
"""Return the episode of a key; None if there is none."""


class Keys:
    """The episodes in progress, each by a key of its own. Only digests of keys are kept."""

    def __init__(self) -> None:
        self._episodes: dict[bytes, GatewayEpisode] = {}

    def add(self, episode: GatewayEpisode) -> str:
        """Return a new key for an episode."""
        key = f"vlmrl-{secrets.token_urlsafe(24)}"
        self._episodes[_digest(key)] = episode
        return key

    def remove(self, key: str) -> None:
        """Revoke a key."""
        self._episodes.pop(_digest(key), None)

    def find(self, key: str) -> GatewayEpisode | None:
        return self._episodes.get(_digest(key))

    @property
    def episodes(self) -> list[GatewayEpisode]:
        return list(self._episodes.values())


class _Routes:
    """The replies of the server."""

    def __init__(
        self, find: Find, gateway: Gateway, processor: Processor, episodes: Callable[[], Iterable[GatewayEpisode]]
    ) -> None:
        self._find, self._gateway, self._processor, self._episodes = find, gateway, processor, episodes
        self._statuses: Counter[int] = Counter()

    async def health(self) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(self) -> Response:
        running = list(self._episodes())
        lines = [
            f"vlmrl_gateway_episodes {len(running)}",
            f"vlmrl_gateway_requests_in_progress {sum(episode.num_running for episode in running)}",
            *(f'vlmrl_gateway_replies_total{{status="{status}"}} {n}' for status, n in sorted(self._statuses.items())),
        ]
        return PlainTextResponse("\n".join([*lines, ""]))

    async def models(self, authorization: Annotated[str, Header()] = "") -> Response:
        self._episode(authorization)
        models = [{"id": MODEL, "object": "model", "created": 0, "owned_by": "vlmrl"}]
        return JSONResponse({"object": "list", "data": models})

    async def reward(self, request: Request, authorization: Annotated[str, Header()] = "") -> Response:
        """Add a reward to the last response, or to the one with the id `response_id`."""
        episode = self._episode(authorization)
        async with self._content(request, episode) as content:
            body = read_object(content)
        value, response_id = body.get("reward"), body.get("response_id")
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_REWARD:
            raise RefusedError(400, f"reward must be a finite number, at most {MAX_REWARD:,.0f}", param="reward")
        if response_id is not None and not isinstance(response_id, str):
            raise RefusedError(400, "response_id must be the id of a response", param="response_id")
        episode.add_reward(float(value), response_id)
        return JSONResponse({"object": "vlmrl.reward", "reward": value})

    async def complete(
        self,
        request: Request,
        authorization: Annotated[str, Header()] = "",
        x_stainless_retry_count: Annotated[str, Header()] = "0",
    ) -> Response:
        """Respond to a chat."""
        episode = self._episode(authorization)
        pending = await self._begin(request, episode, is_retry=x_stainless_retry_count.strip() not in ("", "0"))
        pending.num_waiting += 1
        try:
            completion = await _until_disconnect(request, pending)
        finally:
            pending.num_waiting -= 1
        if completion is None:
            self._statuses[499] += 1
            return Response(status_code=499)
        self._statuses[200] += 1
        if pending.body.stream:
            return StreamingResponse(_stream(pending, episode, self._processor), media_type="text/event-stream")
        written = completion.result(), pending.body, self._processor
        if pending.body.logprobs:  # those of long responses take seconds
            content = await asyncio.to_thread(_write, *written)
        else:
            content = _write(*written)
        if not await request.is_disconnected():
            episode.mark_delivered(pending)
        return Response(content, media_type="application/json")

    async def refuse(self, _: Request, error: Exception) -> Response:
        """Return an error that is the client's, or a limit."""
        if isinstance(error, HTTPException):
            problem = _NO_PATH if error.status_code == 404 else str(error.detail)
            error = RefusedError(error.status_code, problem, headers=error.headers)
        assert isinstance(error, RefusedError)
        self._statuses[error.status] += 1
        return JSONResponse(replies.as_error(error), error.status, dict(error.headers or {}))

    async def fail(self, _: Request, error: Exception) -> Response:
        """Return an error that is ours."""
        self._statuses[500] += 1
        return JSONResponse(replies.as_error(_failure(error)), 500)

    def _episode(self, authorization: str) -> GatewayEpisode:
        scheme, _, key = authorization.partition(" ")
        episode = self._find(key.strip() if scheme.lower() == "bearer" else "")
        if episode is None:
            raise _unknown_key()
        return episode

    async def _begin(self, request: Request, episode: GatewayEpisode, *, is_retry: bool) -> Pending:
        async with self._content(request, episode) as content:
            return await episode.request(content, is_retry=is_retry)

    @asynccontextmanager
    async def _content(self, request: Request, episode: GatewayEpisode) -> AsyncIterator[bytes]:
        """Read the body of a request, and hold its place among those of the episode while it is parsed.

        Raises RefusedError for one that is late, too large or one too many.
        """
        async with AsyncExitStack() as places:
            places.enter_context(episode.reading())
            yield await self._read(request, places, episode.large_bodies)

    async def _read(self, request: Request, places: AsyncExitStack, large: asyncio.Semaphore) -> bytes:
        max_mib, timeout_s = self._gateway.max_request_mib, self._gateway.body_timeout_s
        content, num_bytes = bytearray(), 0
        try:
            async with asyncio.timeout(timeout_s):
                async for chunk in request.stream():
                    if num_bytes <= _LARGE < num_bytes + len(chunk):
                        await places.enter_async_context(large)
                    num_bytes += len(chunk)
                    if num_bytes <= max_mib * 2**20:
                        content += chunk
                    elif num_bytes > _MAX_READ * max_mib * 2**20:
                        break
        except TimeoutError:
            problem = f"the request was not complete after gateway.body_timeout_s {timeout_s:g}"
            raise RefusedError(408, problem, headers={"Connection": "close"}) from None
        except ClientDisconnect:
            raise RefusedError(499, "the client has disconnected") from None
        if num_bytes > max_mib * 2**20:
            problem = f"a request may have {max_mib} MiB: gateway.max_request_mib"
            raise RefusedError(413, problem, headers={"Connection": "close"})
        return bytes(content)


def make_app(
    find: Find, gateway: Gateway, processor: Processor, episodes: Callable[[], Iterable[GatewayEpisode]] = tuple
) -> FastAPI:
    """Return the server as an application. `episodes` are those in progress, for metrics."""
    app = FastAPI(title="vlmrl gateway", docs_url=None, redoc_url=None, openapi_url=None)
    routes = _Routes(find, gateway, processor, episodes)
    for kind, handler in ((RefusedError, routes.refuse), (HTTPException, routes.refuse), (Exception, routes.fail)):
        app.add_exception_handler(kind, handler)
    app.get("/health")(routes.health)
    app.get("/metrics")(routes.metrics)
    app.get("/v1/models")(routes.models)
    app.post("/v1/chat/completions")(routes.complete)
    app.post("/v1/vlmrl/reward")(routes.reward)
    return app


class Server:
    """The gateway of an engine, in the engine's event loop."""

    def __init__(self, app: FastAPI, gateway: Gateway) -> None:
        """Take the port. Raises ConfigError if that cannot be had."""
        self._listener = listen(gateway.host, gateway.port, section="gateway")
        config = uvicorn.Config(
            app,
            http=protocol(gateway.body_timeout_s),
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
            timeout_keep_alive=600,
        )
        self._server = _QuietServer(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serve until `stop`. Raises ClusterError."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        try:
            async with asyncio.timeout(_START_LIMIT_S):
                while not self._server.started and not self._task.done():
                    await asyncio.sleep(0.01)
        except TimeoutError:
            pass
        if not self._server.started:
            error = self._task.exception() if self._task.done() else None
            reason = "" if error is None else f": {error}"  # another server may have had the port first
            raise ClusterError(f"the gateway does not start at {self.base_url}{reason}")

    @property
    def base_url(self) -> str:
        """The URL for clients of this machine, or of others if it listens there."""
        host, port = self._listener.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"

    async def stop(self) -> None:
        """End all connections. Idempotent."""
        task, self._task = self._task, None
        if task is not None and not task.done():  # else it did not start, which `start` has raised
            self._server.should_exit = True
            with suppress(TimeoutError):
                await asyncio.wait_for(task, 5.0)
        self._listener.close()


class _QuietServer(uvicorn.Server):
    """A server that leaves the signals of its process alone."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def _until_disconnect(request: Request, pending: Pending) -> asyncio.Task[Completion] | None:
    """Wait for the response, of a stream until the engine begins it; None if the client has disconnected.

    The engine goes on then: a retry may want the response. Raises RefusedError if there is none.
    """
    wanted: list[asyncio.Future[Any]] = [pending.task, *([pending.begun] if pending.body.stream else [])]
    while True:
        done, _ = await asyncio.wait(wanted, timeout=_LOOK_AGAIN_S, return_when=asyncio.FIRST_COMPLETED)
        if pending.task.done():
            _result(pending.task)
        if done:
            return pending.task
        if await request.is_disconnected():
            return None


def _result(task: asyncio.Task[Completion]) -> Completion:
    """Return the response, or raise why there is none."""
    if task.cancelled():
        raise _unknown_key()
    return task.result()


async def _stream(pending: Pending, episode: GatewayEpisode, processor: Processor) -> AsyncIterator[str]:
    """Yield the events of a response. It ends where the client disconnects."""
    pending.num_waiting += 1
    try:
        yield replies.first_chunk(pending.body, pending.id, pending.created)
        while not (await asyncio.wait({pending.task}, timeout=_COMMENT_S))[0]:
            yield replies.WAITING
        try:
            completion = _result(pending.task)
        except RefusedError as error:
            yield replies.error_event(error)
            return
        except Exception as error:  # a bug of ours: the client must not wait for ever
            yield replies.error_event(_failure(error))
            return
        for chunk in replies.chunks(completion, pending.body, processor):
            yield chunk
        # Clients disconnect as soon as they read the last event: nothing behind it may run.
        episode.mark_delivered(pending)
        yield replies.DONE
    finally:
        pending.num_waiting -= 1


def _write(completion: Completion, body: ChatBody, processor: Processor) -> str:
    return replies.as_completion(completion, body, processor).model_dump_json(exclude_unset=True)


def _unknown_key() -> RefusedError:
    return RefusedError(401, "send Authorization: Bearer and the key of an episode in progress", code="invalid_api_key")


def _failure(error: Exception) -> RefusedError:
    """Log a bug of ours, and return what the client sees of it."""
    _log.error("%s", type(error).__name__, exc_info=error)
    return RefusedError(500, "the gateway has failed: see its log")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()
