"""Episodes: the policy responds and the environment reacts, until one of them ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from vlmrl.agents.contents import Contents
from vlmrl.agents.conversation import Conversation, Feedback, Message, first_prompt
from vlmrl.agents.course import CUT_SHORT, Course, Sampler, failed_rollout, gather_episodes, row_of
from vlmrl.agents.environment import ToolError, ToolSpec
from vlmrl.agents.environments import EnvironmentLost, EnvironmentRaised, Environments, Observation, OpenEnvironment
from vlmrl.agents.tool_calls import ToolCall, ToolCallParser, as_function
from vlmrl.config.agent import Agent
from vlmrl.config.data import Columns
from vlmrl.data.media import InlineMedia
from vlmrl.errors import ConfigError, DataError
from vlmrl.plugins import Processor
from vlmrl.types import (
    ChatMessage,
    Episode,
    Failure,
    Group,
    Media,
    Prompt,
    Rollout,
    Sampling,
    StopReason,
)

_UNPARSED = "unparsed0"
"""Stands for the id of a call that could not be parsed: Mistral's templates want one of nine characters."""


class _Played(NamedTuple):
    """An episode that ended, or failed."""

    prompt: Prompt | None
    """The prompt with which it began; None if it never did."""
    rollout: Rollout | None
    """None if it failed."""
    episode: Episode


class _Reaction(NamedTuple):
    """The environment's reaction to a response."""

    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    done: bool = False


@dataclass(frozen=True, kw_only=True)
class Player:
    """Plays episodes of one environment with one policy."""

    settings: Agent
    environments: Environments
    tools: tuple[ToolSpec, ...]
    parser: ToolCallParser | None
    """Finds tool calls; None without tools."""
    processor: Processor
    columns: Columns
    sample: Sampler
    share: Callable[[InlineMedia], Media]
    """Stores an image of the environment, and returns the handle that the trainer reads."""

    async def play(self, prompt: Prompt, sampling: Sampling) -> Group:
        """Play `sampling.n` episodes that begin with the same state of the environment.

        An episode whose environment hangs or dies is played again, with the same seed of the environment and other
        seeds of responses. After `agent.max_retries` it has failed: it has no response and no reward.

        Raises:
            ConfigError: `reset` returned different first observations for the same row and seed, or the environment an
                image for a model that takes text only.
            ClusterError: no episode that plays has ended in the time that it may take, while this one waits.
        """
        played = await gather_episodes([self._episode(prompt, sampling, i) for i in range(sampling.n)])
        first = _common_prompt([one.prompt for one in played if one.prompt is not None], prompt)
        return Group(first, tuple(one.rollout or failed_rollout(first, one.episode) for one in played))

    async def _episode(self, prompt: Prompt, sampling: Sampling, number: int) -> _Played:
        course = Course(self.settings.episode_limit_s)
        first: Prompt | None = None
        for attempt in range(self.settings.max_retries + 1):
            try:
                environment = await self.environments.open(alone=attempt > 0, source=prompt.source)
                try:
                    first = await self._first_prompt(prompt, sampling, environment, course)
                    play = _Play(self, first, environment, course)
                    return await play.run(sampling, number=number, attempt=attempt)
                finally:
                    await environment.close()
            except (EnvironmentLost, _UnusableStartError) as error:
                problem = str(error)
                course.timeouts += isinstance(error, EnvironmentLost) and error.kind == "timeout"
                if attempt < self.settings.max_retries:
                    course.retry(problem)
        return _Played(first, None, course.episode("failed", failure="infrastructure", problem=problem))

    async def _first_prompt(
        self, prompt: Prompt, sampling: Sampling, environment: OpenEnvironment, course: Course
    ) -> Prompt:
        """Reset the environment; return its first observation as a prompt, or the row's own prompt."""
        row = await row_of(prompt, sampling)
        try:
            observation = await course.call(environment.reset(row.columns, row.seed, row.pixels))
            course.check_time()
            first = await self._to_prompt(observation, prompt) if observation.parts else prompt
        except (EnvironmentRaised, DataError) as error:
            raise _UnusableStartError(f"reset: {error}") from error
        if len(first.tokens) >= self.settings.context_len or len(first.media) > self.settings.max_images:
            raise self._unusable_start(f"{len(first.tokens)} tokens and {len(first.media)} images")
        return first

    async def _to_prompt(self, observation: Observation, row: Prompt) -> Prompt:
        """Make the first prompt of an episode from its first observation. Raises DataError as `first_prompt` does."""
        num_images, num_chars = self.contents.count_images(observation), observation.num_chars
        if num_images > self.settings.max_images or not self.contents.may_fit(num_chars):
            raise self._unusable_start(f"{num_chars} characters and {num_images} images")
        parts = await self.contents.to_parts(observation)

        def tokenize(processor: Processor) -> Prompt:
            return first_prompt(
                parts,
                processor=processor,
                columns=self.columns,
                index=row.index,
                source=row.source,
                tools=[as_function(tool) for tool in self.tools],
                label=row.label,
                metadata=row.metadata,
            )

        first = await self.contents.tokenize(num_chars, tokenize)
        return replace(first, label_key=row.label_key, question=row.question)

    def _unusable_start(self, size: str) -> _UnusableStartError:
        return _UnusableStartError(
            f"reset: the first observation has {size}; the limits are agent.context_len {self.settings.context_len} "
            f"and agent.max_images {self.settings.max_images}"
        )

    @cached_property
    def contents(self) -> Contents:
        """Converts what environments return."""
        return Contents(self.processor, columns=self.columns, context_len=self.settings.context_len, share=self.share)


class _UnusableStartError(Exception):
    """An environment could not begin an episode, which no response can be the cause of."""


class _Play:
    """One attempt to play an episode."""

    def __init__(self, player: Player, prompt: Prompt, environment: OpenEnvironment, course: Course) -> None:
        self._player, self._prompt, self._environment, self._course = player, prompt, environment, course
        self._settings = player.settings
        self._conversation = Conversation(prompt, player.processor, history=self._settings.history)
        self._messages: list[ChatMessage] = []
        self._rewards: list[float] = []
        self._num_images = 0
        """Images of the conversation and of the reactions to the last response."""

    async def run(self, sampling: Sampling, *, number: int, attempt: int) -> _Played:
        """Play to the end. Raises EnvironmentLost."""
        while True:
            seeded = sampling.of_turn(
                episode=number,
                attempt=attempt,
                turn=len(self._rewards),
                max_new_tokens=self._settings.context_len - len(self._conversation.next_prompt.tokens),
            )
            (response,) = (await self._player.sample(self._conversation.next_prompt, seeded)).rollouts
            self._conversation.add_response(response.segments[0])
            try:
                stop = await self._react(response)
            except (EnvironmentRaised, DataError) as error:
                if isinstance(error, EnvironmentRaised) and error.blame == "infrastructure":
                    raise EnvironmentLost("death", str(error)) from error
                if len(self._rewards) < self._conversation.num_turns:
                    self._note(response, 0.0)
                return self._ended("raised", response, failure="response", problem=str(error))
            if stop is not None:
                return self._ended(stop, response)

    async def _react(self, response: Rollout) -> StopReason | None:
        """Pass a response to the environment and append its feedback; return why the episode ends, if it does.

        Raises EnvironmentLost, and EnvironmentRaised or DataError when the environment raises or returns something
        unusable.
        """
        is_last = self._conversation.num_turns == self._settings.max_turns
        self._num_images = self._conversation.num_images
        reaction = await self._reaction(response, calls_tools=not is_last)
        self._note(response, reaction.reward)
        if reaction.done:
            return "done"
        if is_last:
            return "turns"
        if self._num_images > self._settings.max_images:
            return "images"
        num_chars = sum(message.num_chars for message in reaction.messages)
        if not self._player.contents.may_fit(num_chars):
            return "context"
        feedback = await self._player.contents.tokenize(
            num_chars, lambda processor: self._conversation.feedback(reaction.messages, processor)
        )
        if feedback.total_tokens >= self._settings.context_len:
            return "context"
        self._course.check_time()
        self._add(feedback)
        return None

    async def _reaction(self, response: Rollout, *, calls_tools: bool) -> _Reaction:
        parser = self._player.parser
        calls: tuple[ToolCall, ...] = ()
        if parser is not None:
            parsed = parser.parse(self._conversation.last_response, prompt=self._conversation.last_prompt)
            if parsed.problem is not None:
                self._course.tool_calls += 1
                self._course.tool_errors += 1
                return _Reaction((Message([parsed.problem], role="tool", call_id=_UNPARSED),))
            calls = parsed.calls
        if calls and not calls_tools:  # nobody would read the results
            return _Reaction()
        if calls:
            return await self._results(calls)
        observation = await self._course.call(self._environment.step(response.text))
        return await self._reacted(observation)

    async def _results(self, calls: Sequence[ToolCall]) -> _Reaction:
        """Make the calls of a response, up to one that ends the episode."""
        results: list[_Reaction] = []
        for call in calls:
            self._course.check_time()
            results.append(await self._call(call))
            if results[-1].done:
                break
        messages = tuple(message for result in results for message in result.messages)
        return _Reaction(messages, sum(result.reward for result in results), results[-1].done)

    async def _call(self, call: ToolCall) -> _Reaction:
        self._course.tool_calls += 1
        try:
            observation = await self._course.call(self._environment.call_tool(call.name, call.arguments))
        except ToolError as error:
            self._course.tool_errors += 1
            return _Reaction((Message([f"Error: {error}"], role="tool", name=call.name, call_id=call.id),))
        return await self._reacted(observation, role="tool", name=call.name, call_id=call.id)

    async def _reacted(self, observation: Observation, **named: Any) -> _Reaction:
        """Return an observation as a reaction, without the message if the policy will not read it: where the episode
        ends, and for images that there is no room for, which are only counted."""
        self._num_images += self._player.contents.count_images(observation)
        messages: tuple[Message, ...] = ()
        if not observation.done and self._num_images <= self._settings.max_images:
            messages = (Message(await self._player.contents.to_parts(observation), **named),)
        return _Reaction(messages, observation.reward, observation.done)

    def _note(self, response: Rollout, reward: float) -> None:
        self._rewards.append(reward)
        self._messages.append(ChatMessage("assistant", (response.text,), reward=reward))

    def _add(self, feedback: Feedback) -> None:
        self._conversation.add(feedback)
        for message in feedback.messages:
            self._messages.append(ChatMessage(message.role, tuple(message.parts)))

    def _ended(
        self, stop: StopReason, response: Rollout, *, failure: Failure | None = None, problem: str | None = None
    ) -> _Played:
        rendered = self._conversation.rendered(response.text)
        episode = self._course.episode(stop, self._messages, rendered=rendered, failure=failure, problem=problem)
        is_cut = stop in CUT_SHORT or response.finish_reason == "length"
        segments = self._conversation.segments(self._rewards)
        rollout = Rollout(segments, response.text, "length" if is_cut else "stop", episode)
        return _Played(self._prompt, rollout, episode)


def _common_prompt(prompts: Sequence[Prompt], row: Prompt) -> Prompt:
    """Return the prompt with which all episodes of a group began; the row's own if none did.

    Raises:
        ConfigError: they began differently.
    """
    if not prompts:
        return row
    first = prompts[0]
    for other in prompts[1:]:
        same_images = [item.hash for item in first.media] == [item.hash for item in other.media]
        if not same_images or first.tokens.tolist() != other.tokens.tolist():
            raise ConfigError(
                f"train.agent_func_path: two episodes of {row.source} with the same seed began with different "
                f"{'texts' if same_images else 'images'}: the first observation may depend on the row and the seed only"
            )
    return first
