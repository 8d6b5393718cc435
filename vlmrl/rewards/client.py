"""Asks reward servers for scores, in the background: in batches, spread over the servers, and again after a failure.

`protocol.py` says what travels. A token in the environment variable VLMRL_RM_TOKEN is sent as `Authorization: Bearer`.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import httpx

from vlmrl.errors import ConfigError
from vlmrl.rewards.local_worker import SETTING, Verdict, one_line
from vlmrl.rewards.protocol import Images, read_answer, write_request
from vlmrl.rewards.question import Question

TOKEN = "VLMRL_RM_TOKEN"
"""The environment variable that holds the token of reward servers and their clients."""

_REQUESTS_AT_ONCE = 4
"""To each server: it need not wait for the next one to arrive."""
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_CHECK_LIMIT_S = 10.0
_MOST_BYTES = 64 * 2**20
"""Of an answer. It holds one number per answer and some words."""
_SECRET = re.compile(
    r"((x|api|access|auth|client|private|secret|session|subscription)[-_.]?)*(key|token|secret|password|auth|sig|signature)",
    re.IGNORECASE,
)
"""What a parameter of a URL is called that nobody should write down."""
_REFUSED = (401, 403)
_TRY_AGAIN = (408, 425, 429)
"""Statuses below 500 that say that the same request may work later."""

Result = TypeVar("Result")


class _Asked(NamedTuple):
    """One answer on its way."""

    question: Question
    future: Future[Verdict]


class _RequestError(Exception):
    """One request that brought no scores."""

    def __init__(self, reason: str, *, status: int | None = None) -> None:
        """`status` is that of the answer, if there was one."""
        super().__init__(reason)
        self.status = status

    @property
    def is_final(self) -> bool:
        """Asking again would bring the same."""
        return self.status is not None and self.status < 500 and self.status not in _TRY_AGAIN


class _TooSlowError(_RequestError):
    """One that took too long."""


@dataclass(slots=True)
class _Server:
    url: str
    num_requests: int = 0
    num_under_way: int = 0
    """Requests that it is working on."""
    rests_until: float = 0.0
    """It failed: others are asked first until then."""

    @property
    def name(self) -> str:
        """The URL without what may be a secret."""
        return str(httpx.URL(self.url).copy_with(query=None, fragment=None))


def read_token() -> str | None:
    """What the environment holds, if anything. Raises ConfigError for what no HTTP header can carry."""
    token = os.environ.get(TOKEN, "").strip()
    if not re.fullmatch(r"[A-Za-z0-9._~+/=-]*", token):
        raise ConfigError(f"the environment variable {TOKEN} may hold letters, digits and . _ ~ + / = - alone")
    return token or None


class Servers:
    """Servers of one reward. A thread talks to them; `close` ends it.

    Args:
        timeout_s: for one request.
        retries: how often a request is sent again; every server gets one try beside these.
        batch_size: most answers in one request.
        images: what is sent of them, see above.
        token: sent to all of them; none when empty.
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
        self._servers = [_Server(checked(url)) for url in urls]
        self._timeout_s = timeout_s
        self._most_tries = retries + len(self._servers)
        self._batch_size = batch_size
        self._images = images
        self._num_senders = _REQUESTS_AT_ONCE * len(self._servers)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="reward-servers", daemon=True)
        self._thread.start()
        self._wait(self._open())

    def check(self) -> None:
        """Raises ConfigError when no server answers at all, or when one refuses the token."""
        refusals = [refusal for refusal in self._wait(self._knock()) if refusal is not None]
        for refusal in refusals:
            if refusal.status is not None:
                raise ConfigError(f"{SETTING}: {refusal}")
        if len(refusals) == len(self._servers):
            raise ConfigError(f"{SETTING}: {refusals[0]}: start it (vlmrl serve-rm), or correct the address")

    def ask(self, questions: Sequence[Question]) -> list[Future[Verdict]]:
        """One verdict per question, some time later. Returns at once."""
        asked = [_Asked(question, Future()) for question in questions]
        self._loop.call_soon_threadsafe(self._enqueue, asked)
        return [one.future for one in asked]

    def close(self) -> None:
        """Forget what is under way. Idempotent."""
        if self._loop.is_closed():
            return
        self._wait(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    # What follows runs in the thread.

    async def _open(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self._num_senders)
        # The time limit is on the whole request: a server that sends a byte now and then must not hold it for ever.
        # A proxy that the environment names is for other machines.
        direct: dict[str, None] = {f"all://{host}": None for host in ("127.0.0.1", "localhost", "[::1]")}
        self._client = httpx.AsyncClient(headers=self._headers, timeout=None, limits=limits, mounts=direct)
        self._queue: asyncio.Queue[_Asked] = asyncio.Queue()
        self._senders = [asyncio.create_task(self._send_for_ever()) for _ in range(self._num_senders)]

    async def _end(self) -> None:
        for sender in self._senders:
            sender.cancel()
        await asyncio.gather(*self._senders, return_exceptions=True)
        await self._client.aclose()

    def _enqueue(self, asked: Sequence[_Asked]) -> None:
        for one in asked:
            self._queue.put_nowait(one)

    async def _send_for_ever(self) -> None:
        while True:
            batch = await self._next_batch()
            try:
                verdicts = await self._verdicts([one.question for one in batch])
            except asyncio.CancelledError:
                for one in batch:
                    one.future.set_exception(RuntimeError("the connection to the reward servers was closed"))
                raise
            except Exception as error:  # a bug of ours: it must reach whoever waits
                for one in batch:
                    one.future.set_exception(error)
                continue
            for one, verdict in zip(batch, verdicts, strict=True):
                one.future.set_result(verdict)

    async def _next_batch(self) -> list[_Asked]:
        """Each server's share of what is waiting: nobody waits for a batch to fill up, and batches are full when the
        servers are busy."""
        batch: list[_Asked] = []
        while not batch:
            waiting = [await self._queue.get()]
            share = math.ceil((1 + self._queue.qsize()) / len(self._servers))
            while len(waiting) < min(share, self._batch_size):
                waiting.append(self._queue.get_nowait())
            batch = [one for one in waiting if one.future.set_running_or_notify_cancel()]
        return batch

    async def _verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        """One per question. Every failure ends up in them, with its reason."""
        body = await asyncio.to_thread(write_request, questions, self._images)
        willing = list(self._servers)
        for number in range(self._most_tries):
            server = _best(willing)
            start = time.monotonic()
            try:
                return await self._send(server, body, len(questions))
            except _RequestError as failure:
                last = failure
            if last.is_final:
                willing.remove(server)
                if not willing:
                    break
                continue
            pause = min(_FIRST_PAUSE_S * 2**number, _LONGEST_PAUSE_S) * random.uniform(0.75, 1.25)
            now = time.monotonic()
            # One that let us wait rests as long as that took, so that it does not hold every batch while others work.
            server.rests_until = now + max(pause, now - start)
            soonest = min(one.rests_until for one in willing) - now
            if soonest > 0 and number + 1 < self._most_tries:
                await asyncio.sleep(min(pause, soonest))
        tries = "" if number == 0 else f" (the last of {number + 1} tries)"
        return [Verdict(problem=f"{last}{tries}", blame="infrastructure")] * len(questions)

    async def _send(self, server: _Server, body: bytes, num_answers: int) -> list[Verdict]:
        server.num_under_way += 1
        server.num_requests += 1
        try:
            content = await self._request(server, "POST", body, limit_s=self._timeout_s)
        except _TooSlowError as error:
            hint = "reward.remote_timeout_s: raise it, or lower reward.remote_batch_size"
            raise _RequestError(f"{error}, {hint}") from error
        finally:
            server.num_under_way -= 1
        try:
            return read_answer(content, num_answers)
        except ValueError as error:
            raise _RequestError(f"{server.name} {error}") from error

    async def _request(self, server: _Server, method: str, body: bytes | None, *, limit_s: float) -> bytes:
        """What the server answers. Raises _RequestError for anything but a success."""
        headers = {} if body is None else {"Content-Type": "application/json"}
        content = bytearray()
        try:
            async with (
                asyncio.timeout(limit_s),
                self._client.stream(method, server.url, content=body, headers=headers) as response,
            ):
                async for chunk in response.aiter_bytes():
                    content += chunk
                    if len(content) > _MOST_BYTES:
                        raise _RequestError(f"{server.name} answered with more than {_MOST_BYTES} bytes")
        except TimeoutError as error:
            raise _TooSlowError(f"{server.name} takes longer than {limit_s:g} s") from error
        except httpx.HTTPError as error:
            raise _RequestError(f"{server.name} does not answer: {one_line(error) or type(error).__name__}") from error
        _check_status(response.status_code, bytes(content), server.name)
        return bytes(content)

    async def _knock(self) -> list[_RequestError | None]:
        return await asyncio.gather(*(self._refusal(server) for server in self._servers))

    async def _refusal(self, server: _Server) -> _RequestError | None:
        """Why the server is of no use. One that only takes POST says so, which will do."""
        try:
            await self._request(server, "GET", None, limit_s=_CHECK_LIMIT_S)
        except _RequestError as failure:
            return failure if failure.status in (None, *_REFUSED) else None
        return None


def _best(servers: Sequence[_Server]) -> _Server:
    """The one with the least to do of those that do not rest; of those that do, the one whose rest ends first."""
    now = time.monotonic()
    return min(servers, key=lambda one: (max(one.rests_until - now, 0.0), one.num_under_way, one.num_requests))


def checked(url: str) -> str:
    """The same. Raises ConfigError for what is no URL of a server."""
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
    said = one_line(content[:1000].decode(errors="replace"))
    raise _RequestError(f"{name} answered with status {status}" + (f": {said}" if said else ""), status=status)
