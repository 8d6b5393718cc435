"""Client of reward servers: requests in batches, spread over the servers, and repeated after a failure.

`protocol.py` has the format. A token in the environment variable VLMRL_RM_TOKEN is sent as `Authorization: Bearer`.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import httpx

from vlmrl.errors import ConfigError, RewardError
from vlmrl.rewards.batch_queue import BatchQueue
from vlmrl.rewards.function_worker import SETTING, RewardResult, one_line
from vlmrl.rewards.protocol import Images, RewardRequest, read_results, write_request

TOKEN = "VLMRL_RM_TOKEN"
"""The environment variable that holds the token of reward servers and their clients."""

_REQUESTS_AT_ONCE = 4
"""Concurrent requests per server, so that it does not idle between two."""
_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 30.0
_CHECK_LIMIT_S = 10.0
_MAX_BYTES = 64 * 2**20
"""Limit on the body of a reply, which holds one number per response and some text."""
_SECRET = re.compile(
    r"((x|api|access|auth|client|private|secret|session|subscription)[-_.]?)*(key|token|secret|password|auth|sig|signature)",
    re.IGNORECASE,
)
"""Names of URL parameters that hold a secret."""
_REFUSED = (401, 403)
_TRY_AGAIN = (408, 425, 429)
"""Statuses below 500 after which the same request may succeed later."""


class _RequestError(Exception):
    """An HTTP request without scores."""

    def __init__(self, reason: str, *, status: int | None = None) -> None:
        """`status` is the HTTP status, if there was a reply."""
        super().__init__(reason)
        self.status = status

    @property
    def is_final(self) -> bool:
        """Whether the same request would fail again."""
        return self.status is not None and self.status < 500 and self.status not in _TRY_AGAIN


class _TooSlowError(_RequestError):
    """An HTTP request that took too long."""


@dataclass(slots=True)
class _Server:
    url: str
    num_requests: int = 0
    num_in_flight: int = 0
    """Requests in progress."""
    backoff_until: float = 0.0
    """Time until which other servers are preferred, after a failure."""

    @property
    def name(self) -> str:
        """The URL without parts that may hold a secret."""
        return str(httpx.URL(self.url).copy_with(query=None, fragment=None))


def read_token() -> str | None:
    """Return the token from the environment, if any. Raises ConfigError if an HTTP header cannot carry it."""
    token = os.environ.get(TOKEN, "").strip()
    if not re.fullmatch(r"[A-Za-z0-9._~+/=-]*", token):
        raise ConfigError(f"the environment variable {TOKEN} may hold only letters, digits and . _ ~ + / = -")
    return token or None


class Servers:
    """The servers of one reward. `start` opens the connections, `close` ends them.

    Args:
        timeout_s: limit on one HTTP request.
        retries: number of retries of a request, in addition to one try per server.
        batch_size: maximum number of responses in one HTTP request.
        images: form of sent images, see `protocol.py`.
        token: sent to all servers; none when empty.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout_s: float,
        retries: int,
        batch_size: int,
        images: Images,
        token: str | None,
    ) -> None:
        """Raises ConfigError if a URL is not a valid server URL."""
        self._servers = [_Server(checked(url)) for url in urls]
        self._timeout_s = timeout_s
        self._max_tries = retries + len(self._servers)
        self._batch_size = batch_size
        self._images = images
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client: httpx.AsyncClient | None = None
        self._queue = BatchQueue()
        self._senders: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Connect. Raises ConfigError if no server replies, or if one refuses the token."""
        num_senders = _REQUESTS_AT_ONCE * len(self._servers)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=num_senders)
        # The time limit is on the whole request: a server that sends a byte now and then must not block it forever.
        # A proxy from the environment is for other machines.
        direct: dict[str, None] = {f"all://{host}": None for host in ("127.0.0.1", "localhost", "[::1]")}
        self._client = httpx.AsyncClient(headers=self._headers, timeout=None, limits=limits, mounts=direct)
        results = partial(self._results, self._client)
        self._senders = [
            asyncio.create_task(self._queue.score_batches(results, self._max_size)) for _ in range(num_senders)
        ]
        await self._check(self._client)

    def submit(self, requests: Sequence[RewardRequest]) -> list[asyncio.Future[RewardResult]]:
        """Queue the requests, and return a future per request."""
        return self._queue.submit(requests)

    async def close(self) -> None:
        """Close the connections; requests in progress fail. Idempotent."""
        for sender in self._senders:
            sender.cancel()
        await asyncio.gather(*self._senders, return_exceptions=True)
        self._senders = []
        self._queue.close(RewardError("the connection to the reward servers was closed while responses waited"))
        if self._client is not None:
            await self._client.aclose()

    def _max_size(self, num_waiting: int) -> int:
        """Return one server's share: requests do not wait for a full batch, and batches are full when all servers are
        busy."""
        return min(math.ceil(num_waiting / len(self._servers)), self._batch_size)

    async def _results(self, client: httpx.AsyncClient, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Return one result per request; a failure is a result with its reason."""
        body = await asyncio.to_thread(write_request, requests, self._images)
        candidates = list(self._servers)
        for number in range(self._max_tries):
            server = _best(candidates)
            start = time.monotonic()
            try:
                return await self._send(client, server, body, len(requests))
            except _RequestError as failure:
                last = failure
            if last.is_final:
                candidates.remove(server)
                if not candidates:
                    break
                continue
            pause = min(_FIRST_PAUSE_S * 2**number, _MAX_PAUSE_S) * random.uniform(0.75, 1.25)
            now = time.monotonic()
            # The backoff is at least as long as the failed request took, so that a slow server does not hold every
            # batch while others work.
            server.backoff_until = now + max(pause, now - start)
            wait = min(server.backoff_until for server in candidates) - now
            if wait > 0 and number + 1 < self._max_tries:
                await asyncio.sleep(min(pause, wait))
        tries = "" if number == 0 else f" (the last of {number + 1} tries)"
        return [RewardResult(problem=f"{last}{tries}", blame="infrastructure")] * len(requests)

    async def _send(
        self, client: httpx.AsyncClient, server: _Server, body: bytes, num_responses: int
    ) -> list[RewardResult]:
        server.num_in_flight += 1
        server.num_requests += 1
        try:
            content = await _request(client, server, "POST", body, limit_s=self._timeout_s)
        except _TooSlowError as error:
            hint = "reward.remote_timeout_s: raise it, or lower reward.remote_batch_size"
            raise _RequestError(f"{error}, {hint}") from error
        finally:
            server.num_in_flight -= 1
        try:
            return read_results(content, num_responses)
        except ValueError as error:
            raise _RequestError(f"{server.name} {error}") from error

    async def _check(self, client: httpx.AsyncClient) -> None:
        refusals = [error for error in await asyncio.gather(*(_refusal(client, s) for s in self._servers)) if error]
        for refusal in refusals:
            if refusal.status is not None:
                raise ConfigError(f"{SETTING}: {refusal}")
        if len(refusals) == len(self._servers):
            raise ConfigError(f"{SETTING}: {refusals[0]}: start it (vlmrl serve-rm), or correct the address")


async def _refusal(client: httpx.AsyncClient, server: _Server) -> _RequestError | None:
    """Check whether the server is reachable and accepts the token; return the error if not. Any other error reply, as
    from a server that takes only POST, is fine."""
    try:
        await _request(client, server, "GET", None, limit_s=_CHECK_LIMIT_S)
    except _RequestError as failure:
        return failure if failure.status in (None, *_REFUSED) else None
    return None


async def _request(
    client: httpx.AsyncClient, server: _Server, method: str, body: bytes | None, *, limit_s: float
) -> bytes:
    """Return the body of the server's reply. Raises _RequestError unless the status is a success."""
    headers = {} if body is None else {"Content-Type": "application/json"}
    content = bytearray()
    try:
        async with (
            asyncio.timeout(limit_s),
            client.stream(method, server.url, content=body, headers=headers) as reply,
        ):
            async for chunk in reply.aiter_bytes():
                content += chunk
                if len(content) > _MAX_BYTES:
                    raise _RequestError(f"{server.name} replied with more than {_MAX_BYTES} bytes")
    except TimeoutError as error:
        raise _TooSlowError(f"{server.name} takes longer than {limit_s:g} s") from error
    except httpx.HTTPError as error:
        raise _RequestError(f"{server.name} does not reply: {one_line(error) or type(error).__name__}") from error
    _check_status(reply.status_code, bytes(content), server.name)
    return bytes(content)


def _best(servers: Sequence[_Server]) -> _Server:
    """Return the least busy server that is not in backoff; if all are, the one whose backoff ends first."""
    now = time.monotonic()
    return min(
        servers, key=lambda server: (max(server.backoff_until - now, 0.0), server.num_in_flight, server.num_requests)
    )


def checked(url: str) -> str:
    """Return the URL. Raises ConfigError if it is not a valid server URL."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{SETTING}: {url} is not a URL: {error}") from error
    if parsed.userinfo or any(_SECRET.fullmatch(name) for name in parsed.params):
        raise ConfigError(
            f"{SETTING}: a URL with a password or a key would be written to files: set {TOKEN} in the environment"
        )
    if not parsed.host:
        raise ConfigError(f"{SETTING}: {url} names no host: write http://host:port")
    if parsed.port is not None and not 0 < parsed.port < 2**16:
        raise ConfigError(f"{SETTING}: {url} names port {parsed.port}, and there are 1 to {2**16 - 1}")
    return url


def _check_status(status: int, content: bytes, name: str) -> None:
    if 200 <= status < 300:
        return
    if status in _REFUSED:
        raise _RequestError(f"{name} refuses the token (status {status}): set {TOKEN} to the server's", status=status)
    text = one_line(content[:1000].decode(errors="replace"))
    raise _RequestError(f"{name} replied with status {status}" + (f": {text}" if text else ""), status=status)
