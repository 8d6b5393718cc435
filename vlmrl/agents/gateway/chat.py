"""The messages of a chat request, as values that can be compared with what was sampled."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vlmrl.agents.conversation import Message
from vlmrl.types import ChatMessage, Media, Role


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call, as a client sees it."""

    id: str
    name: str
    arguments: str
    """JSON, as it was written."""

    @property
    def meaning(self) -> tuple[str, str]:
        """Name and normalised arguments: clients may parse JSON and write it again."""
        return self.name, normalised(self.arguments)

    def as_chat(self) -> dict[str, Any]:
        """Return the call in the form of chat templates, which want the arguments as an object."""
        try:
            arguments = json.loads(self.arguments)
        except (ValueError, RecursionError):
            arguments = self.arguments
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


@dataclass(frozen=True, eq=False)
class ChatInput:
    """A message of a request."""

    role: Role
    parts: tuple[str | Media, ...] = ()
    """Text and images, in order."""
    calls: tuple[Call, ...] = ()
    """Tool calls of an assistant message."""
    call_id: str | None = None
    """The call that a tool message is the result of."""
    name: str | None = None
    """The tool that a tool message is the result of; the name that the client gave to another."""

    @cached_property
    def key(self) -> Hashable:
        """A value that is equal for equal messages: texts side by side are one text, and images count by their hash."""
        calls = tuple((call.id, call.meaning) for call in self.calls)
        return self.role, _joined(self.parts), calls, self.call_id, self.name

    @property
    def text(self) -> str:
        """All its text."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def media(self) -> tuple[Media, ...]:
        return tuple(part for part in self.parts if not isinstance(part, str))

    def as_feedback(self) -> Message:
        """Return the message in the form of `Conversation.feedback`, for the roles `user` and `tool`."""
        assert self.role in ("user", "tool"), self.role
        return Message(self.parts, role="tool" if self.role == "tool" else "user", name=self.name, call_id=self.call_id)

    def as_chat(self) -> dict[str, Any]:
        """Return the message in the form of chat templates."""
        chat = Message(self.parts, name=self.name, call_id=self.call_id).as_chat() | {"role": self.role}
        return chat | ({"tool_calls": [call.as_chat() for call in self.calls]} if self.calls else {})

    def as_message(self, *, reward: float | None = None) -> ChatMessage:
        """Return the message for users and reward functions, with the tool calls as text behind it."""
        calls = "".join(f"\n{call.name}({call.arguments})" for call in self.calls)
        return ChatMessage(self.role, (*self.parts, calls) if calls else self.parts, reward)


@dataclass(frozen=True, slots=True, eq=False)
class Tools:
    """The tools of a request. Equal tools in equal order are equal."""

    functions: tuple[Mapping[str, Any], ...] = ()
    """In OpenAI's format."""

    @property
    def key(self) -> str:
        return json.dumps(self.functions, sort_keys=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tools) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def keys_of(messages: Sequence[ChatInput]) -> tuple[Hashable, ...]:
    """Return the keys of messages, in order."""
    return tuple(message.key for message in messages)


def normalised(arguments: str) -> str:
    """Return JSON with sorted keys and without spaces; text that is no JSON as it is."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return arguments


def _joined(parts: Sequence[str | Media]) -> tuple[Hashable, ...]:
    joined: list[Hashable] = []
    text = ""
    for part in parts:
        if isinstance(part, str):
            text += part
        else:
            joined += [text, ("image", part.hash)] if text else [("image", part.hash)]
            text = ""
    return tuple([*joined, text] if text else joined)
