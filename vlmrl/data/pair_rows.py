"""Read the chosen and the rejected response of a row, each with its question."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from vlmrl.data.columns import Keys, value_at
from vlmrl.data.conversations import answer_text, is_conversation, read_conversation
from vlmrl.data.unusable import UnusableError, unusable_on_error
from vlmrl.errors import DataError

_SYSTEM_ROLES = ("system", "developer")


class Side(NamedTuple):
    """One response of a row, with the question that it responds to."""

    question: Any
    """A text, or chat messages with `{"type": "image"}` in place of each image."""
    images: Sequence[Any]
    """Images inside the messages, in order."""
    response: str


def read_side(row: Mapping[str, Any], keys: Keys, name: str) -> Side:
    """Read the response in the column of `name`, `chosen_key` or `rejected_key`.

    A conversation ends with the response, and its other messages are the question. Without others, or where the
    assistant begins, they continue `input_key`'s; a text responds to that too.

    Raises:
        UnusableError: the response is missing or empty, there is no question or there are two, or the roles of the
            messages are in a wrong order.
    """
    key = keys[name]
    given = read_conversation(value_at(row, keys["input_key"]))
    messages, images = read_conversation(value_at(row, key))
    if not is_conversation(messages):
        history: Sequence[Any] = ()
        with unusable_on_error("response unusable"):
            response = answer_text(messages)
    else:
        check_roles(messages, key)
        history = messages[:-1]
        with unusable_on_error("response unusable"):
            response = answer_text(messages[-1:])
    if response is None or not response.strip():
        raise UnusableError("empty response", f"column {key!r} (data.{name})")
    with unusable_on_error("no question"):
        question, question_images = _question(given.messages, given.images, history, images, keys["input_key"], key)
    return Side(question, question_images, response)


def read_margin(row: Mapping[str, Any], key: str | None) -> float:
    """Return by how much the chosen response is better; 0 without a column or value. Raises UnusableError."""
    value = value_at(row, key)
    with unusable_on_error("margin unusable"):
        margin = 0.0 if value is None else float(value)
        if not math.isfinite(margin):
            raise DataError(f"column {key!r} (data.margin_key) holds {value!r}")
    return margin


def check_roles(messages: Sequence[Mapping[str, Any]], column: str | None) -> None:
    """Raise UnusableError unless a conversation ends with the assistant, system messages come first, and neither user
    nor assistant speaks twice in a row."""
    roles = [str(message.get("role")) for message in messages]
    last_of_system = max((n for n, role in enumerate(roles) if role in _SYSTEM_ROLES), default=-1)
    turns = roles[last_of_system + 1 :]
    is_ordered = (
        all(role in _SYSTEM_ROLES for role in roles[: last_of_system + 1])
        and turns[-1:] == ["assistant"]
        and not any(a == b and a in ("user", "assistant") for a, b in pairwise(turns))
    )
    if not is_ordered:
        raise UnusableError(
            "roles in a wrong order",
            f"the messages of column {column!r} have the roles {', '.join(roles)}; user and assistant should take "
            "turns behind a system message, and the assistant should be the last",
        )


def _question(
    given: Any,
    given_images: Sequence[Any],
    history: Sequence[Mapping[str, Any]],
    images: Sequence[Any],
    input_key: str | None,
    column: str | None,
) -> tuple[Any, Sequence[Any]]:
    """Join the question of its own column and the messages before a response. Raises DataError."""
    if not history:
        if not given:
            raise DataError(f"column {input_key!r} (data.input_key) is empty, and column {column!r} has no question")
        return given, given_images
    first = next((message.get("role") for message in history if message.get("role") not in _SYSTEM_ROLES), None)
    if first != "user":
        if not given:
            raise DataError(f"no message before the response in column {column!r} is the user's")
        before = list(given) if is_conversation(given) else [{"role": "user", "content": given}]
        system = [message for message in history if message.get("role") in _SYSTEM_ROLES]
        rest = [message for message in history if message.get("role") not in _SYSTEM_ROLES]
        return [*system, *before, *rest], [*given_images, *images]
    if given and not _repeats(given, history):
        raise DataError(
            f"the conversation in column {column!r} has a question of its own, and column {input_key!r} another: set "
            "data.input_key to a column that does not exist in this dataset, or remove one of the questions"
        )
    return [*_system_of(given, history, input_key, column), *history], images


def _system_of(
    given: Any, history: Sequence[Mapping[str, Any]], input_key: str | None, column: str | None
) -> list[Mapping[str, Any]]:
    """Return the system messages of the column of questions that the conversation lacks. Raises DataError."""
    if not is_conversation(given):
        return []
    asked, own = ([message for message in side if message.get("role") in _SYSTEM_ROLES] for side in (given, history))
    if own and asked and (len(own) != len(asked) or not all(map(_repeats_content, asked, own))):
        raise DataError(f"columns {input_key!r} and {column!r} have different system messages")
    return [] if own else asked


def _repeats(given: Any, history: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the column of questions holds what the conversation has too, as in UltraFeedback."""
    if is_conversation(given):
        asked = [message for message in given if message.get("role") == "user"]
    else:
        asked = [{"role": "user", "content": given}]
    turns = [message for message in history if message.get("role") == "user"]
    return bool(asked) and all(any(_repeats_content(message, turn) for turn in turns) for message in asked)


def _repeats_content(message: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the other message has all that this one has: the same content, or the same text where this one has
    nothing else. A text equals a list with a part of this text."""
    content, text = message.get("content"), _text(message)
    return content == other.get("content") or (_is_text(content) and text == _text(other))


def _is_text(content: Any) -> bool:
    """Whether a content is a text, or a list of parts of text only."""
    if not isinstance(content, list | tuple):
        return isinstance(content, str)
    return all(isinstance(part, str) or (isinstance(part, Mapping) and part.get("type") == "text") for part in content)


def _text(message: Mapping[str, Any]) -> str:
    """Return the text of a message, that of its parts joined."""
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return "".join(text for text in texts if isinstance(text, str))
