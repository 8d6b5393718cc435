"""Convert videos of any form that datasets use to the frames that trainer and engine both see."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from vlmrl.config.data import Columns
from vlmrl.data.image_source import ImageAccess, read
from vlmrl.data.media import InlineMedia, target_size
from vlmrl.data.unusable import UnusableError
from vlmrl.data.video_file import VideoFacts, VideoLimits, read_frames
from vlmrl.errors import DataError
from vlmrl.types import Pixels
from vlmrl.video_size import VideoSize

if TYPE_CHECKING:
    from vlmrl.plugins import Processor

_OPTIONS = ("video", "sample_fps", "video_start", "video_end")
"""Keys of qwen-vl-utils' dictionaries that are read."""
_LIST_FPS = 2.0
"""Frames per second of a list of frames without `sample_fps`, as in qwen-vl-utils."""


@dataclass(frozen=True, slots=True)
class VideoSource:
    """A video of a row, before it is opened: see `parse_video`."""

    source: Any
    """A file in any form of `image_source.read`, or a list of images, its frames."""
    sample_fps: float = _LIST_FPS
    """Frames per second of a list of frames."""
    start: float | None = None
    """Second at which the part begins that is taken."""
    end: float | None = None

    @property
    def frames(self) -> Sequence[Any] | None:
        """The images of a list of frames; None for a file."""
        return self.source if isinstance(self.source, list | tuple) else None


def parse_video(value: Any) -> VideoSource:
    """Parse a video of a row: a file, a list of images (its frames), or qwen-vl-utils' dictionary around either.

    The dictionary has `video`, and may have `sample_fps` (of a list), `video_start` and `video_end` (of a file).

    Raises:
        DataError: an option is unknown, no number, or of no effect.
    """
    if not isinstance(value, Mapping) or "video" not in value:
        return VideoSource(value)
    given = {key: option for key, option in value.items() if option is not None and key != "type"}
    unknown = [str(key) for key in given if key not in _OPTIONS]
    if unknown:
        raise DataError(
            f"a video has the option {unknown[0]!r}; read are {', '.join(_OPTIONS[1:])}. Leave it out, and set "
            "data.fps, data.fps_max_frames or data.video_max_pixels for all videos"
        )
    try:
        numbers = {key: float(given[key]) for key in _OPTIONS[1:] if key in given}
    except (TypeError, ValueError) as error:
        raise DataError(f"an option of a video is no number: {error}") from error
    video = VideoSource(
        given["video"], numbers.get("sample_fps", _LIST_FPS), numbers.get("video_start"), numbers.get("video_end")
    )
    unread = ("sample_fps",) if video.frames is None else ("video_start", "video_end")
    if without_effect := [key for key in unread if key in numbers]:
        form = "a file, which has its own rate" if video.frames is None else "a list of frames, all of which are taken"
        raise DataError(f"a video has {without_effect[0]}, but is {form}: leave it out")
    if not video.sample_fps > 0:
        raise DataError(f"the sample_fps of a video is {video.sample_fps:g}: it has to be above 0")
    return video


def make_video(
    video: VideoSource, *, processor: Processor, columns: Columns, access: ImageAccess, max_tokens: int | None = None
) -> InlineMedia:
    """Decode the frames of a video file and resize them.

    Frames and sizes are those of qwen-vl-utils: `smart_nframes` frames, evenly spaced, of `smart_resize`'s size.

    Args:
        max_tokens: a video of more is refused before it is decoded.

    Raises:
        DataError: the video cannot be used.
        UnusableError: it has too many tokens.
    """
    encoded = read(video.source, access=access, max_bytes=columns.max_video_mib * 2**20, kind="video")
    chosen = VideoSize(0, 0, (), 0.0, 0)

    def choose(facts: VideoFacts) -> tuple[Sequence[int], tuple[int, int]]:
        nonlocal chosen
        indices, total = _choose(facts, video, columns, encoded.name)
        size = frame_size((facts.width, facts.height), len(indices), processor=processor, columns=columns)
        chosen = VideoSize(*size, indices, facts.fps, total)
        _check_tokens(chosen, encoded.name, processor, columns, max_tokens)
        return indices, size

    limits = VideoLimits(
        frame_pixels=columns.max_video_frame_pixels,
        seconds=columns.max_video_s,
        decoded_pixels=columns.max_video_gpixels * 1e9,
        budget_pixels=columns.max_image_pixels,
    )
    _, pixels = read_frames(encoded, limits=limits, choose=choose)
    return _media(pixels, chosen, processor)


def make_video_of_frames(
    images: Iterable[Image.Image],
    num_frames: int,
    *,
    sample_fps: float,
    processor: Processor,
    columns: Columns,
    max_tokens: int | None = None,
) -> InlineMedia:
    """Make a video of a list of `num_frames` frames, in RGB, all of which are taken, each resized as it comes; the last
    is repeated if their number is odd.

    Raises:
        DataError: there are no frames, or frames of different sizes.
        UnusableError: it has more than `max_tokens` tokens.
    """
    if not num_frames:
        raise DataError("a video has no frames")
    first: tuple[int, int] | None = None
    total = num_frames + num_frames % 2
    size = VideoSize(0, 0, tuple(range(total)), sample_fps, total)
    pixels: Pixels = np.empty((0, 0, 0, 3), dtype=np.uint8)
    for number, image in enumerate(images):
        if first is None:
            first = image.size
            width, height = frame_size(first, total, processor=processor, columns=columns)
            size = size._replace(width=width, height=height)
            _check_tokens(size, "a video of frames", processor, columns, max_tokens)
            pixels = np.empty((total, height, width, 3), dtype=np.uint8)
        if image.size != first:
            shown = " and ".join(f"{width}x{height}" for width, height in sorted((first, image.size)))
            raise DataError(f"a video is a list of frames of different sizes: {shown}")
        target = (size.width, size.height)
        pixels[number] = np.asarray(image if image.size == target else image.resize(target, Image.Resampling.BICUBIC))
    pixels[-1] = pixels[num_frames - 1]
    return _media(pixels, size, processor)


def _check_tokens(size: VideoSize, name: str, processor: Processor, columns: Columns, max_tokens: int | None) -> None:
    """Refuse a video that no prompt has room for, before its frames fill the memory."""
    if max_tokens is not None and (num_tokens := processor.num_tokens(size)) > max_tokens:
        raise UnusableError(
            "too long",
            f"{name} takes {num_tokens} tokens ({size.num_frames} frames of {size.width}x{size.height}), data.max_len "
            f"is {columns.max_len}: raise it, or lower data.fps, data.fps_max_frames or data.video_max_pixels",
        )


def frame_size(size: tuple[int, int], num_frames: int, *, processor: Processor, columns: Columns) -> tuple[int, int]:
    """Return the (width, height) that the frames of a video are resized to, as in qwen-vl-utils' `fetch_video`.

    Raises:
        DataError: the aspect ratio is above 200.
    """
    assert processor.resize_factor is not None, "the model takes no images"
    least = columns.video_min_pixels
    # Two frames make one patch, so a frame counts half.
    most = max(min(columns.video_max_pixels, int(columns.video_total_pixels / num_frames * 2)), int(least * 1.05))
    return target_size(size, factor=processor.resize_factor, min_pixels=least, max_pixels=most)


def _choose(facts: VideoFacts, video: VideoSource, columns: Columns, name: str) -> tuple[tuple[int, ...], int]:
    """Choose the numbers of the frames, and return how many frames they are chosen from.

    Raises:
        DataError: the video, or the part that is asked for, has fewer than two.
    """
    import torch
    from qwen_vl_utils.vision_process import calculate_video_frame_range, smart_nframes

    part = {"video_start": video.start, "video_end": video.end}
    wanted = {"fps": columns.fps, "min_frames": columns.fps_min_frames, "max_frames": columns.fps_max_frames}
    try:
        first, last, total = calculate_video_frame_range(part, facts.num_frames, facts.fps)
        # Below `fps` the library takes all frames of the file, and warns about it.
        wanted["fps"] = min(columns.fps, facts.fps)
        count = smart_nframes(wanted, total_frames=total, video_fps=facts.fps)
    except ValueError as error:
        length = f"{facts.num_frames} frames at {facts.fps:g} per second, {facts.num_frames / facts.fps:.1f} s"
        if video.start is None and video.end is None:
            raise DataError(f"{name} is too short ({length}): two frames are needed") from error
        start = f"{video.start or 0:g} s"
        end = "the end" if video.end is None else f"{video.end:g} s"
        raise DataError(f"{name} ({length}) has fewer than two frames from {start} to {end}") from error
    # In single precision and rounded as there.
    return tuple(torch.linspace(first, last, count).round().long().tolist()), total


def _media(pixels: Pixels, size: VideoSize, processor: Processor) -> InlineMedia:
    settings = f"video|{processor.resize_settings}|{size.width}x{size.height}|{size.timing}|"
    digest = hashlib.blake2b(settings.encode(), digest_size=16)
    digest.update(pixels.data)
    return InlineMedia(hash=digest.hexdigest(), size=size, pixels=pixels)
