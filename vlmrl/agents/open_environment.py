"""One episode of an environment or an agent: its calls, and what they return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from vlmrl.agents.environment import ToolError
from vlmrl.agents.messages import MAX_PROBLEM_CHARS, Picture, Verb
from vlmrl.agents.process import EnvironmentLost, EnvironmentRaised, Process, UnsendableError
from vlmrl.agents.worker import CLOSE_LIMIT_S, FLAG
from vlmrl.errors import ConfigError
from vlmrl.system.plain_text import one_line
from vlmrl.types import Pixels

CLOSE_CALL_LIMIT_S = CLOSE_LIMIT_S + 1.0
"""Time limit of the call: that of `close` itself, and a second to answer."""


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """The reaction of an environment."""

    parts: tuple[str | Pixels, ...]
    """Text and images, in order. None after `reset`: the first message is the row's own prompt."""
    reward: float = 0.0
    done: bool = False

    @property
    def num_chars(self) -> int:
        """Characters of its texts."""
        return sum(len(part) for part in self.parts if isinstance(part, str))

    @property
    def num_images(self) -> int:
        return sum(not isinstance(part, str) for part in self.parts)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an agent's `run` returned."""

    reward: float
    numbers: Mapping[str, float]
    """Other numbers, for metrics."""


class OpenEnvironment:
    """One episode of an environment. Its calls are made one after the other."""

    def __init__(
        self,
        process: Process,
        episode: int,
        tools: Sequence[str],
        limit_s: float,
        home: Callable[[Process], None] | None,
    ) -> None:
        """`home` takes back the process, if it is lent to this episode alone."""
        self._process, self._episode, self._tools, self._limit_s, self._home = process, episode, tools, limit_s, home
        self._is_closed = False

    async def reset(self, row: Mapping[str, Any] | None, seed: int, images: Sequence[Pixels] = ()) -> Observation:
        """Make the environment and start its episode.

        Args:
            row: question, label and metadata; None if it has no question.
            images: those of the row, RGB.

        Raises:
            EnvironmentRaised, EnvironmentLost
            ConfigError: neither row nor environment has a first message.
        """
        arguments = None if row is None else dict(row)
        try:
            observation = await self._call("reset", arguments=arguments, seed=seed, images=_pictures(images))
        except UnsendableError as error:
            raise EnvironmentRaised(f"the row cannot be passed to reset: {error}", blame="infrastructure") from error
        if not observation.parts and row is None:
            raise ConfigError(
                f"{FLAG}: reset returned None, for the row's own prompt, but the rows of this dataset have none: "
                "return text or an image, or give a dataset with questions"
            )
        return observation

    async def run(
        self,
        row: Mapping[str, Any] | None,
        seed: int,
        images: Sequence[Pixels] = (),
        *,
        base_url: str,
        api_key: str,
        limit_s: float,
        paused_s: Callable[[], float],
    ) -> Outcome:
        """Run the agent's episode, with the policy behind `base_url`. The seconds of `paused_s` do not count for the
        limit. Raises EnvironmentRaised and EnvironmentLost."""
        try:
            answer = await self._process.call(
                "run",
                self._episode,
                limit_s,
                base_url,
                paused_s=paused_s,
                arguments=None if row is None else dict(row),
                seed=seed,
                images=_pictures(images),
                key=api_key,
            )
        except UnsendableError as error:
            raise EnvironmentRaised(f"the row cannot be passed to run: {error}", blame="infrastructure") from error
        if answer.outcome != "observation":
            raise EnvironmentRaised(one_line(answer.problem, max_chars=MAX_PROBLEM_CHARS), blame=answer.blame)
        return Outcome(answer.reward, answer.numbers)

    async def step(self, response: str) -> Observation:
        """Pass a response of the policy to the environment. Raises EnvironmentRaised and EnvironmentLost."""
        return await self._call("step", response.encode(errors="replace").decode())

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> Observation:
        """Call a tool of the environment.

        Raises:
            ToolError: there is no such tool, the arguments do not fit, or it raised. The episode can go on.
            EnvironmentRaised: it returned something unusable.
            EnvironmentLost
        """
        if name not in self._tools:
            raise ToolError(one_line(f"there is no tool {name}; there are: {', '.join(self._tools) or 'none'}"))
        if not isinstance(arguments, Mapping):
            raise ToolError(f"the arguments of {name} must be an object")
        try:
            return await self._call("tool", name, arguments=dict(arguments))
        except UnsendableError as error:
            raise ToolError(f"the arguments of {name} cannot be used: {error}") from error

    async def close(self) -> None:
        """Close the environment, and free its process. Raises nothing. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._process.is_usable:
                with suppress(EnvironmentLost):
                    await self._process.call("close", self._episode, CLOSE_CALL_LIMIT_S)
        finally:
            self._process.num_episodes -= 1
            if self._home is not None:
                self._home(self._process)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _call(self, verb: Verb, text: str = "", **others: Any) -> Observation:
        answer = await self._process.call(verb, self._episode, self._limit_s, text, **others)
        problem = one_line(answer.problem, max_chars=MAX_PROBLEM_CHARS)
        if answer.outcome == "tool_error" and verb == "tool":
            raise ToolError(problem)
        if answer.outcome != "observation":
            raise EnvironmentRaised(problem, blame=answer.blame)
        return Observation(
            tuple(part if isinstance(part, str) else _pixels(part) for part in answer.parts), answer.reward, answer.done
        )


def _pictures(images: Sequence[Pixels]) -> list[Picture]:
    return [Picture(pixels.shape[1], pixels.shape[0], pixels.tobytes()) for pixels in images]


def _pixels(picture: Picture) -> Pixels:
    return np.frombuffer(picture.rgb, np.uint8).reshape(picture.height, picture.width, 3)
