"""The tokens of one conversation: responses as they were sampled, feedback as the chat template renders it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from vlmrl.config.data import Columns
from vlmrl.data.conversations import with_media
from vlmrl.errors import DataError, SyncError
from vlmrl.plugins import Processor
from vlmrl.types import Floats, Ints, Media, Prompt, Segment, Turn

Parts = Sequence[str | Media]
"""Text and images, in order. `<image>` in text is plain text."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message of the environment to the policy."""

    parts: Parts
    role: Literal["user", "tool"] = "user"
    name: str | None = None
    """The tool that this is the result of."""
    call_id: str | None = None
    """The call that this is the result of."""

    def __post_init__(self) -> None:
        assert not isinstance(self.parts, str), "the parts of a message are a list"

    @property
    def media(self) -> tuple[Media, ...]:
        return tuple(part for part in self.parts if not isinstance(part, str))

    @property
    def num_chars(self) -> int:
        """Characters of its texts."""
        return sum(len(part) for part in self.parts if isinstance(part, str))

    def as_chat(self) -> dict[str, Any]:
        """Return the message in the form of chat templates."""
        content = [
            # Tokenizers refuse lone surrogates, which untrusted text may have.
            {"type": "text", "text": part.encode(errors="replace").decode()}
            if isinstance(part, str)
            else {"type": "image"}
            for part in self.parts
        ]
        named = {"name": self.name, "tool_call_id": self.call_id}
        return {"role": self.role, "content": content} | {key: value for key, value in named.items() if value}


@dataclass(frozen=True, slots=True, eq=False)
class Feedback:
    """Messages of the environment, as tokens behind the last response. It is not part of the conversation yet."""

    messages: tuple[Message, ...]
    tokens: Ints
    """[T] from the end of the last response to the beginning of the next. The whole next prompt if `opens_segment`."""
    request: Ints
    """[T'] the same with one placeholder per image."""
    media: tuple[Media, ...]
    """Images of `tokens`."""
    total_tokens: int
    """Tokens of the next prompt, with those that stand before."""
    opens_segment: bool = False
    """The chat template has rewritten the history: a new segment begins."""
    history: str | None = None
    """With `agent.history template`: text of the history behind the first prompt."""


class Conversation:
    """The tokens of one episode: appends responses as sampled and feedback as rendered; nothing is tokenised again.

    Example of a turn:

        engine_rollout = engine.generate(conversation.next_prompt)
        conversation.add_response(engine_rollout.segments[0])
        feedback = conversation.feedback([Message(["Not quite.", picture])])
        if feedback.total_tokens <= context_len:
            conversation.add(feedback)
    """

    def __init__(self, prompt: Prompt, processor: Processor, *, history: Literal["keep", "template"] = "keep") -> None:
        """With `history` "template", a new segment begins where the chat template rewrites earlier responses."""
        self._prompt = prompt
        self._processor = processor
        self._follows_template = history == "template"
        self._drafts = [_Draft.of_prompt(prompt.tokens, prompt.request, prompt.media)]
        self._responses: list[Ints] = []
        self._feedback: list[tuple[Message, ...]] = []
        self._history: str | None = None

    @property
    def next_prompt(self) -> Prompt:
        """What the engine is to continue: index, source and data of the first prompt, with all tokens and images."""
        draft = self._drafts[-1]
        return replace(self._prompt, tokens=draft.tokens, request=draft.request, media=draft.media)

    @property
    def tokens(self) -> Ints:
        """All tokens of the sequence that goes on."""
        return self._drafts[-1].tokens

    @property
    def last_response(self) -> Ints:
        """The sampled tokens of the last response, with its end token."""
        return self._responses[-1]

    @property
    def last_prompt(self) -> Ints:
        """[T'] what the last response follows, with one placeholder per image."""
        request = self._drafts[-1].request
        return request[: len(request) - len(self.last_response)]

    @property
    def num_images(self) -> int:
        """Number of images so far."""
        return len(self._drafts[-1].media)

    @property
    def last_logprobs(self) -> Floats:
        """The engine's log-probs of the last response."""
        complete = self._drafts[-1].complete
        assert complete is not None, "there is no response yet"
        return complete.logprobs[complete.turns[-1].start :]

    @property
    def num_turns(self) -> int:
        """Number of responses."""
        return len(self._responses)

    def rendered(self, response: str) -> str:
        """Return the conversation as one text with control tokens, up to the last response, whose text is given."""
        prompt, before = self._prompt, self.last_prompt
        first = len(prompt.request)
        if np.array_equal(before[:first], prompt.request):
            return prompt.text + self._text(before[first:]) + response
        return self._text(before) + response  # the chat template has rewritten the end of the prompt

    def copy(self) -> Conversation:
        """Return a conversation that goes on from here by itself."""
        other = copy.copy(self)
        other._drafts, other._responses, other._feedback = [*self._drafts], [*self._responses], [*self._feedback]
        return other

    def add_response(self, response: Segment) -> None:
        """Append the engine's response to `next_prompt`: the segment of prompt and response that it returned.

        Raises:
            SyncError: the segment does not begin with the tokens of `next_prompt`.
        """
        assert len(self._responses) == len(self._feedback), "a response follows a response without feedback"
        draft = self._drafts[-1]
        first = len(draft.tokens)
        self._check_beginning(response)
        self._responses.append(response.tokens[first:])
        self._drafts[-1] = draft.with_response(response)

    def feedback(self, messages: Sequence[Message], processor: Processor | None = None) -> Feedback:
        """Return the tokens of these messages behind the last response, without adding them.

        A response that was cut at its longest length gets the template's end of turn first, which is not sampled.
        In another thread this needs a copy of the processor.

        Raises:
            DataError: the chat template rejects the messages.
        """
        assert len(self._responses) == len(self._feedback) + 1, "feedback follows a response"
        draft, messages, processor = self._drafts[-1], tuple(messages), processor or self._processor
        media = tuple(item for message in messages for item in message.media)
        chat = [message.as_chat() for message in messages]
        history = None
        if self._follows_template:
            earlier = [[message.as_chat() for message in follows] for follows in self._feedback]
            rendered = processor.history(self._history, self._responses, [*earlier, chat])
            history = rendered.text
            if rendered.is_rewritten:
                return self._rewritten(messages, history, rendered.beginning, media, processor)
        response = self.last_response
        last_token = int(response[-1]) if len(response) else None
        tokens, request = processor.bridge(chat, [item.size for item in media], last_token=last_token)
        return Feedback(messages, tokens, request, media, len(draft.tokens) + len(tokens), history=history)

    def add(self, feedback: Feedback) -> None:
        """Append feedback that `feedback` returned for the last response."""
        assert len(self._responses) == len(self._feedback) + 1, "feedback follows a response"
        self._feedback.append(feedback.messages)
        self._history = feedback.history
        if feedback.opens_segment:
            self._drafts.append(_Draft.of_prompt(feedback.tokens, feedback.request, feedback.media))
        else:
            self._drafts[-1] = self._drafts[-1].with_unsampled(feedback.tokens, feedback.request, feedback.media)

    def segments(self, rewards: Sequence[float]) -> tuple[Segment, ...]:
        """Return the segments up to the last response. `rewards` are those of its environment for each response."""
        if len(rewards) != len(self._responses):
            raise ValueError(f"{len(rewards)} rewards for {len(self._responses)} responses")
        remaining = iter(rewards)
        return tuple(draft.segment(remaining) for draft in self._drafts if draft.turns)

    def _text(self, tokens: Ints) -> str:
        return str(self._processor.tokenizer.decode(tokens.tolist(), clean_up_tokenization_spaces=False))

    def _rewritten(
        self,
        messages: tuple[Message, ...],
        text: str,
        beginning: str,
        media: tuple[Media, ...],
        processor: Processor,
    ) -> Feedback:
        """Return a new segment: the first prompt up to where its response begins, and the rendered history."""
        replaced, _ = processor.encode(beginning, [])
        prompt = self._prompt
        if len(replaced) and not np.array_equal(prompt.tokens[-len(replaced) :], replaced):
            raise DataError(
                f"{prompt.source}: the prompt does not end with {beginning!r}, which the model's chat template would "
                "replace in history: set agent.history to keep"
            )
        earlier = tuple(item for follows in self._feedback for message in follows for item in message.media)
        images = earlier + media
        tokens, request = processor.encode(text, [item.size for item in images])
        tokens = np.concatenate([prompt.tokens[: len(prompt.tokens) - len(replaced)], tokens])
        request = np.concatenate([prompt.request[: len(prompt.request) - len(replaced)], request])
        media = prompt.media + images
        return Feedback(messages, tokens, request, media, len(tokens), opens_segment=True, history=text)

    def _check_beginning(self, response: Segment) -> None:
        expected, tokens = self._drafts[-1].tokens, response.tokens
        length = min(len(expected), len(tokens))
        differing = np.flatnonzero(expected[:length] != tokens[:length])
        where = f"{self._prompt.source}, turn {len(self._responses) + 1}"
        if len(differing) or len(tokens) < len(expected):
            t = int(differing[0]) if len(differing) else length
            raise SyncError(
                f"{where}: the engine's tokens differ from those of the conversation at position {t} of "
                f"{len(expected)}: a history must not be rendered or tokenised again"
            )
        if response.sampled[: len(expected)].any() or not response.sampled[len(expected) :].all():
            raise SyncError(f"{where}: the engine's response is not all that follows the prompt")


@dataclass(frozen=True, slots=True, eq=False)
class _Draft:
    """A segment that may go on."""

    tokens: Ints
    request: Ints
    media: tuple[Media, ...]
    complete: Segment | None = None
    """The sequence up to the last response, without rewards."""
    turns: tuple[Turn, ...] = ()

    @classmethod
    def of_prompt(cls, tokens: Ints, request: Ints, media: tuple[Media, ...]) -> _Draft:
        return cls(tokens, request, media)

    def with_unsampled(self, tokens: Ints, request: Ints, media: tuple[Media, ...]) -> _Draft:
        return replace(
            self,
            tokens=np.concatenate([self.tokens, tokens]),
            request=np.concatenate([self.request, request]),
            media=self.media + media,
        )

    def with_response(self, response: Segment) -> _Draft:
        first, end = len(self.tokens), len(response.tokens)
        turns = (*self.turns, Turn(first, end))
        sampled, logprobs, versions = response.sampled.copy(), response.logprobs.copy(), response.versions.copy()
        if self.complete is not None:
            past = len(self.complete.tokens)
            sampled[:past] = self.complete.sampled
            logprobs[:past] = self.complete.logprobs
            versions[:past] = self.complete.versions
        return replace(
            self,
            tokens=response.tokens,
            request=np.concatenate([self.request, response.tokens[first:]]),
            complete=Segment(response.tokens, sampled, logprobs, versions, turns, self.media),
            turns=turns,
        )

    def segment(self, rewards: Iterator[float]) -> Segment:
        assert self.complete is not None, "a draft without a response has no segment"
        return replace(self.complete, turns=tuple(replace(turn, reward=float(next(rewards))) for turn in self.turns))


def first_prompt(
    parts: Parts,
    *,
    processor: Processor,
    columns: Columns,
    index: int,
    source: str,
    tools: Sequence[Mapping[str, Any]] = (),
    label: str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Prompt:
    """Return the prompt of an episode that begins with these parts, a user message.

    Raises:
        DataError: the chat template rejects it, or the model takes no images.
    """
    message = Message(parts)
    media = message.media
    question = [message.as_chat()]
    rendered = processor.render(question, num_images=len(media), columns=columns, tools=tools, literal=True)
    messages = processor.messages(question, num_images=len(media), columns=columns, literal=True)
    tokens, request = processor.encode(rendered, [item.size for item in media])
    return Prompt(
        index=index,
        source=source,
        text=processor.readable(rendered),
        tokens=tokens,
        request=request,
        label=label,
        media=media,
        metadata=metadata or {},
        is_chat=True,
        messages=with_media(messages, media),
    )
