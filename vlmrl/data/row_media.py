"""Images and videos of a row in reading order, and their places in its question."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vlmrl.config.data import Columns
from vlmrl.config.names import is_given
from vlmrl.data.columns import as_list, has_image_bytes, is_image_name
from vlmrl.data.image_source import NO_ACCESS, ImageAccess
from vlmrl.data.media import ImageLimits, InlineMedia, TotalPixelsError, make_row_media, open_images
from vlmrl.data.question import PlacedText
from vlmrl.data.unusable import UnusableError, unusable_on_error
from vlmrl.data.video_media import VideoSource, make_video, make_video_of_frames, parse_video
from vlmrl.errors import DataError
from vlmrl.video_size import IMAGE, VIDEO

if TYPE_CHECKING:
    from vlmrl.plugins import Processor

_TYPES = {IMAGE: "image", VIDEO: "video"}


class RowMedia(NamedTuple):
    """Images and videos of a row, before they are opened."""

    question: Any
    """The question, in rows with videos as messages with a part in place of each image and video."""
    sources: Sequence[Any]
    """In reading order; a video is a `VideoSource`."""


@dataclass(frozen=True, slots=True)
class MediaRules:
    """Which images and videos the rows of a run may have."""

    processor: Processor
    columns: Columns
    agent_max_images: int | None
    """Images of a conversation with an environment; None without an environment."""

    def gather(
        self, question: Any, images: Sequence[Any], inline: Sequence[Any], videos: Sequence[Any] = ()
    ) -> RowMedia:
        """Return the images and videos of a row's columns, or those inside its messages.

        Raises:
            UnusableError: there are both, too many, or some that the model does not take.
        """
        if (images or videos) and inline:
            columns, number = ("data.image_key", len(images)) if images else ("data.video_key", len(videos))
            raise UnusableError(
                "question and images do not fit",
                f"{len(inline)} images inside the messages and {number} in {columns}: use only one",
            )
        with unusable_on_error("question and videos do not fit"):
            parsed = [parse_video(video) for video in videos]
            placed = place_videos(question, images, parsed) if parsed else (question, inline or images)
        self._check(placed[1])
        is_plain_text = self.columns.video_key is None and is_given(self.columns, "video_key")  # `none`
        takes_videos = self.processor.frame_factor is not None
        if takes_videos and not is_plain_text and not any(isinstance(source, VideoSource) for source in placed[1]):
            with unusable_on_error("question and videos do not fit"):
                refuse_unfilled(question)
        return RowMedia(*placed)

    def _check(self, sources: Sequence[Any]) -> None:
        num_videos = sum(isinstance(source, VideoSource) for source in sources)
        num_images = len(sources) - num_videos
        bound, setting = self.columns.max_images_per_prompt, "data.max_images_per_prompt"
        if self.agent_max_images is not None:
            bound, setting = min((bound, setting), (self.agent_max_images, "agent.max_images"))
        if num_images > bound:
            raise UnusableError("too many images", f"{num_images} images, {setting} is {bound}")
        if num_images and self.processor.resize_factor is None:
            raise UnusableError("model takes no images", f"{num_images} images, but the model takes text only")
        if not num_videos:
            return
        if self.columns.video_key is None:
            raise UnusableError("videos are not read", f"{num_videos} in its messages: set data.video_key")
        if num_videos > self.columns.max_videos_per_prompt:
            most = self.columns.max_videos_per_prompt
            raise UnusableError("too many videos", f"{num_videos} videos, data.max_videos_per_prompt is {most}")
        if self.processor.frame_factor is None:
            raise UnusableError("model takes no videos", f"{num_videos} videos, but the model takes none")
        if self.agent_max_images is not None:
            raise UnusableError("no videos with agents", "a conversation with an environment takes no video yet")


def open_row_media(
    sources: Sequence[Any],
    *,
    processor: Processor,
    columns: Columns,
    access: ImageAccess = NO_ACCESS,
    max_tokens: int | None = None,
) -> tuple[InlineMedia, ...]:
    """Open, convert and resize the images and videos of one row, in their order; a video is a `VideoSource`.

    Args:
        max_tokens: tokens that all of them may have; None: any number. Videos above it are not decoded.

    Raises:
        DataError: one of them cannot be used.
        UnusableError: the videos have too many tokens.
    """
    images = [source for source in sources if not isinstance(source, VideoSource)]
    opened = make_row_media(images, processor=processor, columns=columns, access=access)
    if len(images) == len(sources):
        return opened
    of_images = iter(opened)
    left = None if max_tokens is None else max_tokens - sum(processor.num_tokens(image.size) for image in opened)
    media = []
    for source in sources:
        if isinstance(source, VideoSource):
            media.append(_open_video(source, processor, columns, access, left))
            left = None if left is None else left - processor.num_tokens(media[-1].size)
        else:
            media.append(next(of_images))
    return tuple(media)


def kind_of_problem(sources: Sequence[Any]) -> str:
    """Return what is counted when the images and videos of a row cannot be opened."""
    return "video unusable" if any(isinstance(source, VideoSource) for source in sources) else "image unusable"


def as_videos(value: Any) -> Sequence[Any]:
    """Return the videos of a row's column as a list. It holds a list or a single video.

    A list of images (by their names or types) is one video, its frames.
    """
    videos = as_list(value)
    return [videos] if videos and all(map(_is_image, videos)) else videos


def place_videos(question: Any, images: Sequence[Any], videos: Sequence[VideoSource]) -> tuple[Any, list[Any]]:
    """Replace the placeholders of a row with videos by parts; returns chat messages, and images and videos in order.

    `<video>` and `<image>` in texts mark the places. Without marks of a kind, all of that kind come first in the first
    message of the user, images before videos. Messages may have parts of both kinds already. A text becomes a
    `PlacedText`.

    Raises:
        DataError: the numbers of placeholders and of images or videos differ.
    """
    is_text = isinstance(question, str)
    messages = [{"role": "user", "content": question}] if is_text else list(question)
    if not all(isinstance(message, Mapping) for message in messages):
        return question, [*images, *videos]  # refused when it is rendered
    # Without images, `<image>` is the processor's to refuse, or plain text; LLaVA-Video marks its videos so.
    marks_read = re.compile(f"({IMAGE}|{VIDEO})" if images else f"({VIDEO})")
    if not images and _count(messages, VIDEO) == 0 and _count(messages, IMAGE) == len(videos):
        marks_read = re.compile(f"({IMAGE})")
    split = [{**message, "content": _split(message.get("content"), marks_read)} for message in messages]
    if IMAGE in marks_read.pattern and not images:
        split = [{**message, "content": _as_videos(message["content"])} for message in split]
    waiting: dict[str, list[Any]] = {"image": list(images), "video": list(videos)}
    first = next((message for message in split if message.get("role") == "user"), split[0])
    for kind in ("video", "image"):
        if not waiting[kind]:
            continue
        marks = sum(_kind(part) == kind for message in split for part in message["content"] or ())
        if marks not in (0, len(waiting[kind])):
            raise DataError(f"the row has {len(waiting[kind])} {kind}s, but its question has {marks} placeholders")
        if not marks:
            first["content"] = [{"type": kind}] * len(waiting[kind]) + list(first["content"] or ())
    kinds = [_kind(part) for message in split for part in message["content"] or ()]
    return PlacedText(split) if is_text else split, [
        waiting[kind].pop(0) for kind in kinds if kind is not None and waiting[kind]
    ]


def refuse_unfilled(question: Any) -> None:
    """Raise DataError for a placeholder of a video in a row that has none: a model would respond without seeing it."""
    messages = [{"content": question}] if isinstance(question, str) else question
    for message in messages if isinstance(messages, list | tuple) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = content if isinstance(content, list | tuple) else [content]
        texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
        if any(isinstance(text, str) and VIDEO in text for text in texts):
            raise DataError(
                f"the question has the placeholder {VIDEO}, but the row has no video: set data.video_key to the column "
                "that holds the videos, or to none if this is plain text"
            )


def _open_video(
    video: VideoSource, processor: Processor, columns: Columns, access: ImageAccess, max_tokens: int | None
) -> InlineMedia:
    if video.frames is None:
        return make_video(video, processor=processor, columns=columns, access=access, max_tokens=max_tokens)
    if len(video.frames) > columns.fps_max_frames:  # before they are read
        raise DataError(
            f"a video is a list of {len(video.frames)} frames, data.fps_max_frames is {columns.fps_max_frames}"
        )
    images = open_images(video.frames, limits=ImageLimits.of(columns), access=access)
    try:
        return make_video_of_frames(
            images,
            len(video.frames),
            sample_fps=video.sample_fps,
            processor=processor,
            columns=columns,
            max_tokens=max_tokens,
        )
    except TotalPixelsError as error:
        raise DataError(
            f"the {len(video.frames)} frames of a video have more than {columns.max_row_pixels} pixels in total: raise "
            "data.max_row_pixels"
        ) from error


def _split(content: Any, marks: re.Pattern[str]) -> Any:
    """Split placeholders in the texts of a content into separate parts. Content of another form is kept."""
    if content is None or isinstance(content, Mapping):
        return None if content is None else [content]
    if not isinstance(content, str | list | tuple):
        return [content]
    parts: list[Any] = []
    for part in [content] if isinstance(content, str) else content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
        if not isinstance(text, str):
            parts.append(part)
            continue
        pieces = marks.split(text)
        parts += [
            {"type": _TYPES[piece]} if piece in _TYPES else {"type": "text", "text": piece} for piece in pieces if piece
        ]
    return parts


def _count(messages: Sequence[Mapping[str, Any]], mark: str) -> int:
    """Return how often a placeholder stands in the texts of messages."""
    pieces = (piece for message in messages for piece in _split(message.get("content"), re.compile(f"({mark})")) or ())
    return sum(_kind(piece) == _TYPES[mark] for piece in pieces)


def _as_videos(content: Any) -> Any:
    """Take the images of a content for videos."""
    return content and [{"type": "video"} if _kind(part) == "image" else part for part in content]


def _is_image(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path") or value.get("image") or ""
    # A GIF is a video of its own here.
    if isinstance(value, bytes):
        return has_image_bytes(value) and not value.startswith(b"GIF8")
    if isinstance(value, str | Path):
        text = str(value)
        return (
            is_image_name(text) and not text.lower().startswith("data:image/gif") and not text.lower().endswith(".gif")
        )
    return hasattr(value, "getbands") or (isinstance(value, np.ndarray) and value.ndim <= 3)


def _kind(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind if kind in ("image", "video") else None
