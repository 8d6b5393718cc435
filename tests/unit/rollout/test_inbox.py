"""Calls of the engine core end when it dies, though vLLM lets them wait."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from vlmrl.config.vllm import Vllm
from vlmrl.errors import DiedError
from vlmrl.rollout import inbox
from vlmrl.rollout.inbox import Inbox


class Engine(Inbox):
    def __init__(self) -> None:
        super().__init__("vllm", Vllm())
        self.llm = SimpleNamespace(errored=False)
        self.was_cancelled = False

    def _started(self) -> Any:
        return self.llm

    async def _death(self) -> DiedError:
        return DiedError("rollout engine vllm has died")

    async def wait(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise


async def result_of(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


def test_a_call_under_way_ends_when_the_core_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "_LOOK_S", 0.01)
    engine = Engine()

    async def run() -> None:
        calls = [asyncio.create_task(engine._core(engine.wait())) for _ in range(2)]
        await asyncio.sleep(0.05)
        assert not any(call.done() for call in calls)
        engine.llm.errored = True
        for call in calls:
            with pytest.raises(DiedError, match="has died"):
                await asyncio.wait_for(call, 5.0)

    asyncio.run(run())
    assert engine.was_cancelled


def test_calls_return_their_results_and_errors() -> None:
    engine = Engine()
    assert asyncio.run(engine._core(result_of(3))) == 3
    with pytest.raises(KeyError):
        asyncio.run(engine._core(result_of(KeyError("x"))))
    with pytest.raises(DiedError, match="has died"):
        asyncio.run(engine._core(result_of(EngineDeadError())))
