"""The environment of `vlmrl bench agents` and `async`: every step waits, and an episode has a fixed number of turns."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from vlmrl.agents import Reply


class Waiting:
    """Its row says how long a step takes, and how many there are."""

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        self._step_s, self._turns = row["metadata"]["step_s"], row["metadata"]["turns"]
        return f"This is episode {seed}."

    async def step(self, response: str) -> Reply:
        await asyncio.sleep(self._step_s)
        self._turns -= 1
        reward = float(len(response) % 2 == 0)
        return Reply(f"That had {len(response)} characters. Go on.", reward=reward, done=self._turns == 0)


def make() -> Waiting:
    return Waiting()
