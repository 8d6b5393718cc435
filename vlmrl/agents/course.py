"""The course of an episode, of an environment or of an agent: its time, its attempts, its row."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from vlmrl.agents.environments import EnvironmentLost, Observation
from vlmrl.types import ChatMessage, Episode, Failure, Group, Pixels, Prompt, Rollout, Sampling, Segment, StopReason

CUT_SHORT: frozenset[StopReason] = frozenset({"context", "images", "turns"})
"""Reasons that count as truncated."""
MAX_SEED = 2**32
"""Seeds of environments are below this, as NumPy wants them."""

Result = TypeVar("Result")


class Sampler(Protocol):
    """Samples responses to a prompt."""

    async def __call__(self, prompt: Prompt, sampling: Sampling) -> Group: ...


@dataclass
class Course:
    """Counts of an episode."""

    limit_s: float
    """Seconds that the environment may take in an attempt."""
    env_s: float = 0.0
    """Seconds that it took, in all attempts."""
    before_s: float = 0.0
    """Seconds that it took in earlier attempts."""
    tool_calls: int = 0
    tool_errors: int = 0
    retried: tuple[str, ...] = ()
    timeouts: int = 0

    async def call(self, reaction: Awaitable[Observation]) -> Observation:
        """Wait for the environment."""
        start = time.monotonic()
        try:
            return await reaction
        finally:
            self.env_s += time.monotonic() - start

    def check_time(self) -> None:
        """Check that there is time for another call: an episode that has ended counts, however long its last one took.

        Raises EnvironmentLost when the calls have taken too long together.
        """
        if self.env_s - self.before_s > self.limit_s:
            raise EnvironmentLost("timeout", f"its calls took over agent.episode_limit_s {self.limit_s:g} s together")

    def retry(self, problem: str) -> None:
        """Begin another attempt, because of a problem in this one."""
        self.before_s, self.tool_calls, self.tool_errors = self.env_s, 0, 0
        self.retried += (problem,)

    def episode(
        self,
        stop: StopReason,
        messages: Sequence[ChatMessage] = (),
        *,
        rendered: str = "",
        failure: Failure | None = None,
        problem: str | None = None,
    ) -> Episode:
        return Episode(
            stop,
            tuple(messages),
            rendered,
            env_s=self.env_s,
            tool_calls=self.tool_calls,
            tool_errors=self.tool_errors,
            retried=self.retried,
            timeouts=self.timeouts,
            failure=failure,
            problem=problem,
        )


class Row(NamedTuple):
    """A row of the data, as environments and agents get it."""

    columns: dict[str, Any] | None
    """question, label and metadata; None for the dataset `episodes`."""
    seed: int
    pixels: list[Pixels]
    """Those of its images."""


async def row_of(prompt: Prompt, sampling: Sampling) -> Row:
    """Return the row of a prompt, and the seed of its episodes."""
    columns = None
    if prompt.has_question:
        columns = {"question": prompt.question, "label": prompt.label, "metadata": dict(prompt.metadata)}
    pixels: list[Pixels] = []
    if prompt.media:
        pixels = await asyncio.to_thread(lambda: [item.fetch() for item in prompt.media])
    return Row(columns, sampling.request_seed(prompt.index) % MAX_SEED, pixels)


async def gather_episodes(episodes: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Wait for episodes that run side by side; an error of one ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(episode) for episode in episodes]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def failed_rollout(prompt: Prompt, episode: Episode) -> Rollout:
    """Return the rollout of an episode that failed: the prompt, and no response."""
    nothing = np.zeros(len(prompt.tokens))
    segment = Segment(
        prompt.tokens,
        nothing.astype(np.bool_),
        nothing.astype(np.float32),
        np.full(len(prompt.tokens), -1),
        (),
        prompt.media,
    )
    return Rollout((segment,), "", "stop", episode)
