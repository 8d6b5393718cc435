"""Conversations as datasets write them (ShareGPT, images inside messages), in the one form of chat messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vlmrl.config.data import COLUMN_KEYS
from vlmrl.errors import DataError

STANDARD_ANSWERS = ("completion",)
"""What other trainers call the column of what the model should say."""

Message = Mapping[str, Any]

_SHAREGPT_ROLES = {"human": "user"} | dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant")
_IMAGE_KINDS = ("image", "image_url", "input_image")
_IMAGE_KEYS = ("image", "image_url", "url", "path", "base64")
"""Where a part of an image has it: those of Transformers' chat templates and of OpenAI's API."""
_NOT_TAUGHT = ("tool_calls", "function_call", "reasoning_content", "thinking")


class Conversation(NamedTuple):
    """Chat messages, their images taken out."""

    messages: Any
    """Messages with `{"type": "image"}` where an image was. What is no list of messages is left as it was: whoever
    renders it says what is wrong."""
    images: tuple[Any, ...]
    """What the images of the messages were, in order: paths, URLs, bytes."""


def read_conversation(given: Any) -> Conversation:
    """The question of a row in one form. Text, and what is no list of messages, stays as it is.

    Examples:
        ShareGPT's `[{"from": "human", "value": "Hi"}]` -> `[{"role": "user", "content": "Hi"}]`;
        `[{"type": "image", "image": "a.png"}]` as content -> `[{"type": "image"}]`, and "a.png" among the images;
        the text `'[{"role": "user", "content": "Hi"}]'` -> these messages.
    """
    if isinstance(given, str):
        given = _written_messages(given) or given
    if not is_conversation(given):
        return Conversation(given, ())
    images: list[Any] = []
    messages = [_without_images(_with_role(message), images) for message in given]
    return Conversation(messages, tuple(images))


def is_conversation(given: Any) -> bool:
    """Whether it is a list of messages, rather than a text."""
    return isinstance(given, list | tuple) and bool(given) and all(isinstance(message, Mapping) for message in given)


def ends_with_answer(messages: Any) -> bool:
    """Whether the assistant has the last word, which `vlmrl sft` then teaches."""
    return is_conversation(messages) and messages[-1].get("role") == "assistant"


def split_answer(question: Any, answer: Any, label: str | None, *, column: str | None) -> tuple[Any, str]:
    """The question, and what the model should say to it: the assistant's last message, else the row's answer, which is
    in `column`, else its label.

    Raises DataError when there is none of them, when it cannot be taught, and when a column that was chosen would not
    be read.
    """
    said = answer_text(answer)
    if ends_with_answer(question):
        if said is not None and column not in (COLUMN_KEYS["output_key"], *STANDARD_ANSWERS):
            raise DataError(f"its messages end with an answer of the assistant, and column {column!r} has another")
        if len(question) == 1:
            raise DataError("an answer of the assistant is its only message: nothing is asked")
        question, said = question[:-1], answer_text(question[-1:])
    said = said or label
    if not said:
        raise DataError(
            f"neither a last message of the assistant, nor column {column!r} (data.output_key), nor a label says one"
        )
    return question, said


def answer_text(answer: Any) -> str | None:
    """What the model should say: a text, a number, or a conversation of one message, which is the assistant's.

    None, and a text without a letter, are no answer. Raises DataError for messages that cannot be taught.
    """
    if answer is None or isinstance(answer, str):
        return answer or None
    conversation = read_conversation(answer).messages
    if not is_conversation(conversation):
        return str(answer)
    if len(conversation) > 1 or not ends_with_answer(conversation):
        roles = ", ".join(str(message.get("role")) for message in conversation)
        raise DataError(f"the answer should be one message of the assistant; its messages are of {roles}")
    return _message_text(conversation[0]) or None


def _message_text(message: Message) -> str:
    """The text of a message that is taught."""
    lost = [key for key in _NOT_TAUGHT if message.get(key)]
    if lost:
        raise DataError(f"the answer has {lost[0]}, which is not taught: write what the model should say into content")
    content = message.get("content")
    parts: Sequence[Any] = content if isinstance(content, list | tuple) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise DataError("the answer holds something else than text: text alone is taught")
    return "".join(map(str, texts))


def _written_messages(text: str) -> Any:
    """Messages that are written as JSON into a column of text, as OpenRLHF-M and lmm-r1 have them; None for other
    text. Read as a question, it would leave its images unopened."""
    if not text.lstrip().startswith("[") or not any(key in text for key in ('"role"', '"from"')):
        return None
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError):
        return None
    keys = ({"role", "content"}, {"from", "value"})
    is_all = is_conversation(messages) and all(any(pair <= message.keys() for pair in keys) for message in messages)
    return messages if is_all else None


def _with_role(message: Message) -> Message:
    """A message of ShareGPT's as one with role and content; any other as it is."""
    if "from" not in message or "value" not in message or message.get("role") is not None:
        return message
    name = message["from"]
    return {"role": _SHAREGPT_ROLES.get(name, name) if isinstance(name, str) else name, "content": message["value"]}


def _without_images(message: Message, images: list[Any]) -> Message:
    content = message.get("content")
    parts = [content] if isinstance(content, Mapping) else content
    if not isinstance(parts, list | tuple):
        return message
    return {**message, "content": [_part(part, images) for part in parts]}


def _part(part: Any, images: list[Any]) -> Any:
    if not isinstance(part, Mapping) or part.get("type") not in _IMAGE_KINDS:
        return part
    # Arrow fills the keys that other parts have with None: they were never said.
    given = next((part[key] for key in _IMAGE_KEYS if part.get(key) is not None), None)
    if isinstance(given, Mapping) and given.get("url") is not None:
        given = given["url"]
    if given is not None:
        images.append(given)
    return {"type": "image"}
