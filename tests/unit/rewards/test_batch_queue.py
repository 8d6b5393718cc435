"""Requests are scored in batches; whoever waits gets the result, or the error."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from vlmrl.rewards.batch_queue import BatchQueue
from vlmrl.rewards.function_worker import RewardResult
from vlmrl.rewards.protocol import RewardRequest

pytestmark = pytest.mark.anyio


def requests(*responses: str) -> list[RewardRequest]:
    return [RewardRequest("test", prompt="", response=response) for response in responses]


async def by_length(batch: Sequence[RewardRequest]) -> list[RewardResult]:
    return [RewardResult(float(len(request.response))) for request in batch]


async def test_batches_are_as_large_as_they_may_be_and_each_request_gets_its_own_result() -> None:
    queue, sizes = BatchQueue(), []

    async def score(batch: list[RewardRequest]) -> list[RewardResult]:
        sizes.append(len(batch))
        return await by_length(batch)

    results = queue.submit(requests("a", "aa", "aaa", "aaaa", "aaaaa"))
    assert queue.num_waiting == 5
    scoring = asyncio.create_task(queue.score_batches(score, lambda num_waiting: min(2, num_waiting)))
    assert [result.value for result in await asyncio.gather(*results)] == [1, 2, 3, 4, 5]
    assert sizes == [2, 2, 1]
    scoring.cancel()


async def test_a_batch_waits_for_requests_that_come_soon() -> None:
    queue = BatchQueue()
    first = queue.submit(requests("a"))
    scoring = asyncio.create_task(queue.score_batches(by_length, lambda _: 2, max_wait_s=60))
    await asyncio.sleep(0.01)
    assert not first[0].done()
    await asyncio.wait_for(asyncio.gather(*first, *queue.submit(requests("b"))), timeout=10)
    scoring.cancel()


async def test_an_error_reaches_its_batch_alone_and_cancelled_requests_are_not_scored() -> None:
    queue, scored = BatchQueue(), []

    async def score(batch: list[RewardRequest]) -> list[RewardResult]:
        scored.extend(request.response for request in batch)
        if batch[0].response == "bad":
            raise ValueError("mine")
        return await by_length(batch)

    bad, cancelled, good = queue.submit(requests("bad", "cancelled", "good"))
    cancelled.cancel()
    scoring = asyncio.create_task(queue.score_batches(score, lambda _: 1))
    with pytest.raises(ValueError, match="mine"):
        await bad
    assert (await good).value == 4
    assert scored == ["bad", "good"]
    scoring.cancel()


async def test_who_waits_when_the_queue_closes_gets_its_error() -> None:
    queue = BatchQueue()
    results = queue.submit(requests("a", "b"))
    scoring = asyncio.create_task(queue.score_batches(lambda _: asyncio.sleep(60, []), lambda _: 1))
    await asyncio.sleep(0.01)
    assert queue.num_waiting == 1
    scoring.cancel()
    await asyncio.gather(scoring, return_exceptions=True)
    queue.close(ValueError("closed"))
    for result in results:
        with pytest.raises(ValueError, match="closed"):
            await result
