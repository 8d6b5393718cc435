"""Episodes of an agent of the user's own, `async def run(task)`, which reaches the policy through the gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from vlmrl.agents.course import CUT_SHORT, Course, failed_rollout, gather_episodes, row_of
from vlmrl.agents.environments import EnvironmentLost, EnvironmentRaised, Environments, OpenEnvironment, Outcome
from vlmrl.agents.gateway.episode import GatewayEpisode
from vlmrl.agents.gateway.server import Keys
from vlmrl.agents.gateway.serving import Serving
from vlmrl.agents.gateway.tree import count_tokens
from vlmrl.config.agent import Agent
from vlmrl.rewards.bounds import problem_of_reward
from vlmrl.types import Episode, Group, Prompt, Rollout, Sampling

_NOTHING = "run ended without a response of the policy that had reached it"


class _Ran(NamedTuple):
    """An episode that ended, or failed."""

    behind: GatewayEpisode | None
    """Its requests; None if it failed."""
    episode: Episode
    """Without messages."""


@dataclass(frozen=True, kw_only=True)
class AgentPlayer:
    """Plays episodes of one agent with one policy."""

    settings: Agent
    environments: Environments
    serving: Serving
    keys: Keys
    base_url: str
    """Where the gateway is."""

    async def play(self, prompt: Prompt, sampling: Sampling) -> Group:
        """Play `sampling.n` episodes of a row.

        The prompt of the group is the one with which all episodes began, else the row's own. An episode whose agent
        hangs or dies is played again, as one of an environment is (`agents.episodes.Player`). Raises the errors of the
        engine, and ClusterError as `Environments.open` does.
        """
        ran = await gather_episodes([self._episode(prompt, sampling, i) for i in range(sampling.n)])
        first = _common_prompt([one.behind for one in ran if one.behind is not None]) or prompt
        return Group(first, tuple(_rollout(one, first) for one in ran))

    async def _episode(self, prompt: Prompt, sampling: Sampling, number: int) -> _Ran:
        course = Course(self.settings.episode_limit_s)
        num_lost = 0
        for attempt in range(self.settings.max_retries + 1):
            behind = GatewayEpisode(self.serving, prompt, sampling, number=number, attempt=attempt)
            try:
                environment = await self.environments.open(alone=attempt > 0, source=prompt.source)
                try:
                    ran = await self._run(environment, behind, course, prompt, sampling)
                finally:
                    await behind.close()
                    await environment.close()
                return _with_counts(ran, behind, num_lost)
            except EnvironmentLost as error:
                problem = str(error)
                course.timeouts += error.kind == "timeout"
                num_lost += count_tokens(behind.tree.nodes)
                if attempt < self.settings.max_retries:
                    course.retry(problem)
        failed = course.episode("failed", failure="infrastructure", problem=problem)
        return _Ran(None, replace(failed, counts={"dropped_tokens": num_lost}))

    async def _run(
        self,
        environment: OpenEnvironment,
        behind: GatewayEpisode,
        course: Course,
        prompt: Prompt,
        sampling: Sampling,
    ) -> _Ran:
        """Run the agent once. Raises EnvironmentLost, and the engine's errors."""
        row = await row_of(prompt, sampling)
        key = self.keys.add(behind)
        start = time.monotonic()
        try:
            outcome = await _unless_the_engine_fails(
                environment.run(
                    row.columns,
                    row.seed,
                    row.pixels,
                    base_url=self.base_url,
                    api_key=key,
                    limit_s=self.settings.episode_limit_s,
                    paused_s=lambda: behind.clock.seconds,
                ),
                behind,
            )
        except EnvironmentRaised as error:
            return self._raised(error, behind, course)
        finally:
            self.keys.remove(key)
            course.env_s += time.monotonic() - start - behind.clock.seconds
        if behind.last is None:
            raise EnvironmentLost("death", _NOTHING)
        total = behind.last.reward + outcome.reward
        if problem := problem_of_reward(total):
            unusable = EnvironmentRaised(f"the rewards of the last response are {total:g} together, {problem}")
            return self._raised(unusable, behind, course)
        behind.last.reward = total
        return _Ran(behind, replace(course.episode("done"), parts=outcome.numbers))

    def _raised(self, error: EnvironmentRaised, behind: GatewayEpisode, course: Course) -> _Ran:
        """Return an episode that ended because the agent raised; at a limit of the conversation it may."""
        if error.blame == "infrastructure" or behind.last is None:
            raise EnvironmentLost("death", str(error)) from error
        if behind.limit is not None:
            return _Ran(behind, course.episode(behind.limit))
        return _Ran(behind, course.episode("raised", failure="response", problem=str(error)))


async def _unless_the_engine_fails(running: Coroutine[Any, Any, Outcome], behind: GatewayEpisode) -> Outcome:
    """Wait for an agent. An error of the engine ends it, and is raised."""
    task = asyncio.create_task(running)
    try:
        ends: list[asyncio.Future[Any]] = [task, behind.failure]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if behind.failure.done():
            raise behind.failure.result()
        return await task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, EnvironmentLost, EnvironmentRaised):
            await task


def _with_counts(ran: _Ran, behind: GatewayEpisode, num_lost: int) -> _Ran:
    counts = dict(behind.counts)
    calls, errors = counts.pop("tool_calls", 0), counts.pop("tool_errors", 0)
    counts["dropped_tokens"] = counts.get("dropped_tokens", 0) + num_lost
    return ran._replace(episode=replace(ran.episode, tool_calls=calls + errors, tool_errors=errors, counts=counts))


def _common_prompt(episodes: list[GatewayEpisode]) -> Prompt | None:
    """Return the prompt with which all episodes began; None if they began differently."""
    prompts = [episode.tree.first_prompts()[0] for episode in episodes]
    return prompts[0] if prompts and all(_equals(prompt, prompts[0]) for prompt in prompts[1:]) else None


def _equals(one: Prompt, other: Prompt) -> bool:
    has_same_images = [item.hash for item in one.media] == [item.hash for item in other.media]
    return has_same_images and np.array_equal(one.tokens, other.tokens)


def _rollout(ran: _Ran, first: Prompt) -> Rollout:
    """Return the rollout of an episode in a group that begins with the prompt `first`."""
    behind = ran.behind
    if behind is None:
        return failed_rollout(first, ran.episode)
    assert behind.last is not None
    begins_with_it = _equals(behind.tree.first_prompts()[0], first)
    messages = behind.tree.messages(with_first_prompt=not begins_with_it)
    is_cut = ran.episode.stop in CUT_SHORT or behind.last_is_cut
    episode = replace(ran.episode, messages=messages, rendered=behind.rendered)
    return Rollout(behind.tree.segments(), behind.last.reply.text, "length" if is_cut else "stop", episode)
