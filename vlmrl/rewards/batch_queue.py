"""Queue of responses that wait to be scored in batches, by reward servers or by the scorer of one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from vlmrl.rewards.function_worker import RewardResult
from vlmrl.rewards.protocol import RewardRequest


class _Pending(NamedTuple):
    """A request that waits for its result."""

    request: RewardRequest
    result: asyncio.Future[RewardResult]


class BatchQueue:
    """Requests that wait for their results. `score_batches` takes them in batches; several may run at once."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[_Pending] = asyncio.Queue()

    @property
    def num_waiting(self) -> int:
        return self._queue.qsize()

    def submit(self, requests: Sequence[RewardRequest]) -> list[asyncio.Future[RewardResult]]:
        """Queue the requests, and return a future per request. One that is cancelled is not scored."""
        loop = asyncio.get_running_loop()
        pending = [_Pending(request, loop.create_future()) for request in requests]
        for item in pending:
            self._queue.put_nowait(item)
        return [item.result for item in pending]

    async def score_batches(
        self,
        score: Callable[[list[RewardRequest]], Awaitable[Sequence[RewardResult]]],
        max_size: Callable[[int], int],
        *,
        max_wait_s: float = 0.0,
    ) -> None:
        """Score batch after batch, until cancelled; those that were being scored then wait again.

        Args:
            score: returns one result per request. Its error is that of every request of the batch.
            max_size: size limit of a batch, from the number of requests that wait.
            max_wait_s: how long a batch waits for more requests after its first.
        """
        while True:
            batch = await self._next_batch(max_size, max_wait_s)
            try:
                results = await score([item.request for item in batch])
            except asyncio.CancelledError:
                for item in batch:
                    self._queue.put_nowait(item)
                raise
            except Exception as error:  # whoever waits gets any error, and the next batch is scored
                _fail(batch, error)
                continue
            for item, result in zip(batch, results, strict=True):
                if not item.result.done():  # else it was cancelled meanwhile
                    item.result.set_result(result)

    def close(self, error: Exception) -> None:
        """Fail all requests that wait."""
        while not self._queue.empty():
            _fail([self._queue.get_nowait()], error)

    async def _next_batch(self, max_size: Callable[[int], int], max_wait_s: float) -> list[_Pending]:
        """Take the next requests, without those that were cancelled."""
        batch: list[_Pending] = []
        while not batch:
            pending = [await self._queue.get()]
            limit = max_size(1 + self._queue.qsize())
            with suppress(TimeoutError):
                async with asyncio.timeout(max_wait_s):
                    while len(pending) < limit:
                        pending.append(await self._queue.get())
            batch = [item for item in pending if not item.result.done()]
        return batch


def _fail(pending: Sequence[_Pending], error: Exception) -> None:
    for item in pending:
        if not item.result.done():
            item.result.set_exception(error)
            item.result.exception()  # asyncio would report an exception that nobody reads
