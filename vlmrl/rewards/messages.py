"""Conversations as plain messages in the chat format, as reward functions and reward servers read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vlmrl.types import ChatMessage, Media
from vlmrl.video_size import VideoSize


def to_plain(messages: Sequence[ChatMessage], image: Callable[[Media], Any] | None = None) -> list[dict[str, Any]]:
    """Return the messages as dicts of `role` and `content`.

    The content is a text; in messages with images a list of parts, `{"type": "text", "text": ...}` and
    `{"type": "image", "image": image(media)}`, with `video` instead of `image` for videos. With `image` None, they are
    left out, and all contents are texts.
    """
    return [{"role": message.role, "content": _content(message, image)} for message in messages]


def with_images(messages: Sequence[Mapping[str, Any]], opened: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """Replace the image of each image part by what `opened` returns for it."""
    return [
        dict(message)
        if isinstance(message["content"], str)
        else {
            **message,
            "content": [
                part if part["type"] == "text" else {**part, part["type"]: opened(part[part["type"]])}
                for part in message["content"]
            ],
        }
        for message in messages
    ]


def _content(message: ChatMessage, image: Callable[[Media], Any] | None) -> str | list[dict[str, Any]]:
    if image is None or not message.media:
        return "".join(part for part in message.parts if isinstance(part, str))
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {(kind := _kind(part)): image(part), "type": kind}
        for part in message.parts
    ]


def _kind(media: Media) -> str:
    return "video" if isinstance(media.size, VideoSize) else "image"
