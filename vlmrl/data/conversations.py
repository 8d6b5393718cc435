"""Normalise the conversation formats of datasets (ShareGPT, images inside messages) to chat messages."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vlmrl.config.data import COLUMN_KEYS
from vlmrl.data.video_media import parse_video
from vlmrl.errors import DataError
from vlmrl.types import ChatMessage, Media

STANDARD_ANSWER_COLUMNS = ("completion",)
"""Names of the target column in datasets for other trainers."""

Message = Mapping[str, Any]

_SHAREGPT_ROLES = {"human": "user"} | dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant")
_SYSTEM_ROLES = ("system", "developer")
_IMAGE_KINDS = ("image", "image_url", "input_image")
_IMAGE_KEYS = ("image", "image_url", "url", "path", "base64")
"""Keys of an image part that hold the image, in Transformers' chat templates and in OpenAI's API."""
_VIDEO_KINDS = ("video", "video_url", "input_video")
_VIDEO_KEYS = ("video", "video_url", "url", "path", "base64")
"""Keys of a video part that hold the video. Of qwen-vl-utils' options those of `parse_video` are read."""
_UNSUPPORTED_KEYS = ("tool_calls", "function_call", "reasoning_content", "thinking")


class Conversation(NamedTuple):
    """Chat messages with their images extracted."""

    messages: Any
    """Messages with `{"type": "image"}` or `{"type": "video"}` in place of each image and video. A value that is not a
    list of messages is kept as it is, and refused when it is rendered."""
    images: tuple[Any, ...]
    """The images and videos of the messages, in order: paths, URLs, bytes; a video is a `VideoSource`."""


def read_conversation(value: Any) -> Conversation:
    """Convert the question of a row to chat messages. Text, and anything that is not a list of messages, is kept.

    Examples:
        ShareGPT's `[{"from": "human", "value": "Hi"}]` -> `[{"role": "user", "content": "Hi"}]`;
        `[{"type": "image", "image": "a.png"}]` as content -> `[{"type": "image"}]`, with "a.png" in `images`;
        the text `'[{"role": "user", "content": "Hi"}]'` -> these messages.
    """
    if isinstance(value, str):
        value = _parse_messages(value) or value
    if not is_conversation(value):
        return Conversation(value, ())
    images: list[Any] = []
    messages = [_without_images(_with_role(message), images) for message in value]
    return Conversation(messages, tuple(images))


def with_media(messages: Sequence[Message], media: Sequence[Media]) -> tuple[ChatMessage, ...]:
    """Return messages whose content is a list of parts, as `Processor.messages` makes them, with images and videos."""
    images = iter(media)
    return tuple(
        ChatMessage(
            message["role"],
            tuple(part["text"] if part["type"] == "text" else next(images) for part in message["content"]),
        )
        for message in messages
    )


def is_conversation(value: Any) -> bool:
    """Whether a value is a non-empty list of messages."""
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(message, Mapping) for message in value)


def ends_with_answer(messages: Any) -> bool:
    """Whether the last message is the assistant's, which `vlmrl sft` then trains on."""
    return is_conversation(messages) and messages[-1].get("role") == "assistant"


def check_roles(messages: Any) -> None:
    """Raise DataError where a conversation to train on has its roles in a wrong order.

    System messages come first, and a user or a tool speaks before each response. Other values are not checked here.
    """
    if not is_conversation(messages):
        return
    before = "system"
    for place, message in enumerate(messages, start=1):
        role = message.get("role")
        if role in _SYSTEM_ROLES and before not in _SYSTEM_ROLES:
            raise DataError(f"message {place} has the role {role}, which belongs before all others")
        if role == "assistant" and before not in ("user", "tool"):
            where = "follows another one" if before == "assistant" else "has no question before it"
            raise DataError(f"message {place}, of the assistant, {where}: the roles are in a wrong order")
        if role == "tool" and before not in ("assistant", "tool"):
            raise DataError(f"message {place} is the result of a tool, and follows no message of the assistant")
        before = str(role)


def split_answer(question: Any, answer: Any, label: str | None, *, column: str | None) -> tuple[Any, str]:
    """Return the question and its target answer: the last assistant message, else `column`'s value, else the label.

    Raises:
        DataError: there is no answer, it cannot be trained on, or both the messages and a configured column have one.
    """
    target = answer_text(answer)
    if ends_with_answer(question):
        if target is not None and column not in (COLUMN_KEYS["output_key"], *STANDARD_ANSWER_COLUMNS):
            raise DataError(f"its messages end with an assistant message, and column {column!r} has another answer")
        if len(question) == 1:
            raise DataError("its only message is the assistant's: there is no question")
        question, target = question[:-1], answer_text(question[-1:]) or ""
    target = label if target is None else target
    if target is not None and not target.strip():
        raise DataError("the response is empty")
    if not target:
        raise DataError(
            f"it has no final assistant message, no value in column {column!r} (data.output_key) and no label"
        )
    return question, target


def answer_text(answer: Any) -> str | None:
    """Return the target text of an answer: a text, a number, or one assistant message, by itself or in a list.

    None for a missing or empty answer. Raises DataError for anything else, and messages that cannot be trained on.
    """
    if answer is None or isinstance(answer, str):
        return answer or None
    if isinstance(answer, float) and math.isnan(answer):  # as pandas and Parquet write a missing value
        return None
    if isinstance(answer, bool | int | float):
        return str(answer)
    conversation = read_conversation([answer] if isinstance(answer, Mapping) else answer).messages
    if not is_conversation(conversation):
        raise DataError(f"the answer is a {type(answer).__name__}; it should be a text or one assistant message")
    if len(conversation) > 1 or not ends_with_answer(conversation):
        roles = ", ".join(str(message.get("role")) for message in conversation)
        raise DataError(f"the answer should be one assistant message; its messages have the roles {roles}")
    return _message_text(conversation[0]) or None


def _message_text(message: Message) -> str:
    """Return the text of an assistant message to train on."""
    unsupported = [key for key in _UNSUPPORTED_KEYS if message.get(key)]
    if unsupported:
        raise DataError(f"the answer has {unsupported[0]}, which is not trained on: put the whole target into content")
    content = message.get("content")
    parts: Sequence[Any] = content if isinstance(content, list | tuple) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise DataError("the answer has parts other than text: only text is trained on")
    return "".join(map(str, texts))


def _parse_messages(text: str) -> Any:
    """Parse messages stored as JSON in a text column, as by OpenRLHF-M and lmm-r1; None for other text.

    Taken as plain text, such a question would lose its images.
    """
    if not text.lstrip().startswith("[") or not any(key in text for key in ('"role"', '"from"')):
        return None
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError):
        return None
    keys = ({"role", "content"}, {"from", "value"})
    is_valid = is_conversation(messages) and all(any(pair <= message.keys() for pair in keys) for message in messages)
    return messages if is_valid else None


def _with_role(message: Message) -> Message:
    """Convert a ShareGPT message to role and content; return any other unchanged."""
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
    if isinstance(part, Mapping) and part.get("type") in _VIDEO_KINDS:
        return _video_part(part, images)
    if not isinstance(part, Mapping) or part.get("type") not in _IMAGE_KINDS:
        return part
    # Arrow fills keys that only other parts have with None.
    image = next((part[key] for key in _IMAGE_KEYS if part.get(key) is not None), None)
    if isinstance(image, Mapping) and image.get("url") is not None:
        image = image["url"]
    if image is not None:
        images.append(image)
    return {"type": "image"}


def _video_part(part: Mapping[str, Any], images: list[Any]) -> Any:
    key = next((key for key in _VIDEO_KEYS if part.get(key) is not None), None)
    if key is not None:
        video = part[key]
        if isinstance(video, Mapping) and video.get("url") is not None:
            video = video["url"]
        others = {name: value for name, value in part.items() if name not in (key, "type")}
        images.append(parse_video({"video": video, **others}))
    return {"type": "video"}
