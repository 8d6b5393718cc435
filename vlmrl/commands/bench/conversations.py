"""The engine of `vlmrl bench agents`: plays conversations with environments, and replays them without."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import NamedTuple

from vlmrl.agents.course import Sampler
from vlmrl.agents.engine import AgentEngine
from vlmrl.types import Group, Prompt, Rollout, Sampling


class Timed(NamedTuple):
    """Conversations that an engine had at the same time."""

    groups: list[Group]
    seconds: float
    """From the beginning of the first until the end of the last."""
    cpu_s: float
    """Processor time of this process, all threads: vLLM's front end, and the work for environments."""

    @property
    def sampled_tokens(self) -> int:
        return sum(rollout.num_sampled for group in self.groups for rollout in group.rollouts)


class BenchEngine(AgentEngine):
    """An engine that starts with an empty prefix cache each time."""

    async def play(self, prompts: Sequence[Prompt], sampling: Sampling) -> Timed:
        """Play one episode for each prompt, all at the same time."""
        return await self._timed([self.respond(prompt, sampling) for prompt in prompts])

    async def replay(self, groups: Sequence[Group], sampling: Sampling) -> Timed:
        """Replay conversations, all at the same time: the requests of `play`, without the work for environments."""
        return await self._timed([replay(group, sampling, self.generate) for group in groups])

    async def _timed(self, conversations: Sequence[Awaitable[Group]]) -> Timed:
        await self._reset_prefix_cache()
        started, cpu_started = time.perf_counter(), time.process_time()
        groups = await asyncio.gather(*conversations)
        return Timed(groups, time.perf_counter() - started, time.process_time() - cpu_started)


async def replay(group: Group, sampling: Sampling, sample: Sampler) -> Group:
    """Sample the responses of conversations again, turn by turn, behind the same tokens and with the same seeds."""
    rollouts: list[Rollout] = []
    for number, rollout in enumerate(group.rollouts):
        (segment,) = rollout.segments
        for k, turn in enumerate(segment.turns):
            tokens = segment.tokens[: turn.start]
            prompt = replace(group.prompt, tokens=tokens, request=tokens)
            seeded = sampling.of_turn(episode=number, attempt=0, turn=k, max_new_tokens=turn.end - turn.start)
            rollouts += (await sample(prompt, seeded)).rollouts
    return Group(group.prompt, tuple(rollouts))
