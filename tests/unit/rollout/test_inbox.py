"""A bucket from another machine is copied once, and all engines of this machine load it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from vlmrl.config.vllm import Vllm
from vlmrl.errors import SyncError
from vlmrl.models.shared_memory import Ticket, open_ticket
from vlmrl.models.weight_buckets import pack_bucket, unpack_bucket
from vlmrl.rollout.inbox import Inbox


class Engine(Inbox):
    """An engine whose workers record the numbers that they load."""

    def __init__(self, *, is_updating: bool = True) -> None:
        super().__init__("vllm", Vllm(bucket_mib=1.0))
        self.is_updating = is_updating
        self.loaded: list[list[float]] = []

    def _require_update(self) -> int:
        if not self.is_updating:
            raise SyncError("outside of an update")
        return 1

    async def _call(self, method: str, *arguments: Any) -> list[Any]:
        assert method == "vlmrl_load"
        self.loaded.append([x for _, tensor in unpack_bucket(open_ticket(arguments[0])) for x in tensor.tolist()])
        return []


def bucket(value: float) -> Any:
    return pack_bucket([("a", torch.full((2,), value))])


def test_all_engines_of_a_machine_load_what_one_of_them_received() -> None:
    first, second = Engine(), Engine()

    async def sync() -> list[Ticket]:
        tickets = []
        for number in range(4):
            # Three are in flight: when the fourth arrives, both have loaded the first.
            tickets.append(await first.relay(bucket(float(number)), number, max(0, number - 2)))
            for engine in (first, second):
                await engine.load(tickets[-1])
        return tickets

    tickets = asyncio.run(sync())
    assert first.loaded == second.loaded == [[float(n)] * 2 for n in range(4)]
    assert len({ticket["descriptor"] for ticket in tickets[:3]}) == 3
    assert tickets[3]["descriptor"] == tickets[0]["descriptor"]


def test_a_bucket_that_overtakes_another_is_not_overwritten_before_it_is_loaded() -> None:
    engine = Engine()

    async def sync() -> None:
        tickets = {number: await engine.relay(bucket(float(number)), number, 0) for number in (0, 2, 1)}
        await engine.load(tickets[0])
        await engine.load(tickets[1])
        tickets[3] = await engine.relay(bucket(3.0), 3, 1)
        tickets[4] = await engine.relay(bucket(4.0), 4, 2)
        for number in (2, 3, 4):
            await engine.load(tickets[number])

    asyncio.run(sync())
    assert engine.loaded == [[float(n)] * 2 for n in range(5)]


def test_buckets_outside_of_an_update_are_refused() -> None:
    engine = Engine(is_updating=False)
    for call in (engine.relay(bucket(0.0), 0, 0), engine.load({}), engine.load_bucket(bucket(0.0))):
        with pytest.raises(SyncError, match="outside of an update"):
            asyncio.run(call)
