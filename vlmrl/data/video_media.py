"""Convert videos of any form that datasets use to the frames that trainer and engine both see."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from vlmrl.config.data import Columns
from vlmrl.data.image_source import ImageAccess, read
from vlmrl.data.media import InlineMedia, target_size
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
        DataError: an option is unknown or no number.
    """
    if not isinstance(value, Mapping) or "video" not in value:
        return VideoSource(value)
    given = {key: option for key, option in value.items() if option is not None and key != "type"}
    unknown = [str(key) for key in given if key not in _OPTIONS]
    if unknown:
        raise DataError(
            f"a video has the option {unknown[0]!r}; read are {', '.join(_OPTIONS[1:])}, and for all videos data.fps, "
            "data.fps_max_frames and data.video_max_pixels"
        )
    try:
        numbers = {key: float(given[key]) for key in _OPTIONS[1:] if key in given}
    except (TypeError, ValueError) as error:
        raise DataError(f"an option of a video is no number: {error}") from error
    video = VideoSource(
        given["video"], numbers.get("sample_fps", _LIST_FPS), numbers.get("video_start"), numbers.get("video_end")
    )
    if not video.sample_fps > 0:
        raise DataError(f"the sample_fps of a video is {video.sample_fps:g}: it has to be above 0")
    return video


class _Chosen(NamedTuple):
    """Frames of a file that are taken."""

    indices: tuple[int, ...]
    total: int


def make_video(video: VideoSource, *, processor: Processor, columns: Columns, access: ImageAccess) -> InlineMedia:
    """Decode the frames of a video file and resize them.

    Frames and sizes are those of qwen-vl-utils: `smart_nframes` frames, evenly spaced, of `smart_resize`'s size.

    Raises:
        DataError: the video cannot be used.
    """
    encoded = read(video.source, access=access, max_bytes=columns.max_video_mib * 2**20, kind="video")
    chosen = _Chosen((), 0)

    def choose(facts: VideoFacts) -> tuple[Sequence[int], tuple[int, int]]:
        nonlocal chosen
        chosen = _choose(facts, video, columns, encoded.name)
        size = frame_size((facts.width, facts.height), len(chosen.indices), processor=processor, columns=columns)
        return chosen.indices, size

    limits = VideoLimits(columns.max_video_frame_pixels, columns.max_video_s)
    facts, frames = read_frames(encoded, limits=limits, choose=choose)
    return _media(frames, VideoSize(*frames[0].size, chosen.indices, facts.fps, chosen.total), processor)


def make_video_of_frames(
    images: Sequence[Image.Image], *, sample_fps: float, processor: Processor, columns: Columns
) -> InlineMedia:
    """Make a video of a list of frames, in RGB, all of which are taken; the last is repeated if their number is odd.

    Raises:
        DataError: there are no frames, or frames of different sizes.
    """
    if not images:
        raise DataError("a video has no frames")
    sizes = {image.size for image in images}
    if len(sizes) > 1:
        shown = " and ".join(f"{width}x{height}" for width, height in sorted(sizes)[:2])
        raise DataError(f"a video is a list of frames of different sizes: {shown}")
    frames = [*images, *[images[-1]] * (len(images) % 2)]
    size = frame_size(images[0].size, len(frames), processor=processor, columns=columns)
    resized = [frame if frame.size == size else frame.resize(size, Image.Resampling.BICUBIC) for frame in frames]
    return _media(resized, VideoSize(*size, tuple(range(len(frames))), sample_fps, len(frames)), processor)


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


def _choose(facts: VideoFacts, video: VideoSource, columns: Columns, name: str) -> _Chosen:
    """Choose the frames. Raises DataError when the video, or the part that is asked for, has fewer than two."""
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
        length = f"{facts.num_frames} frames at {facts.fps:g} per second"
        part_of = (
            "" if video.start is None and video.end is None else ", of which video_start and video_end take a part"
        )
        raise DataError(f"{name} is too short ({length}{part_of}): two frames are needed") from error
    # In single precision and rounded as there.
    return _Chosen(tuple(torch.linspace(first, last, count).round().long().tolist()), total)


def _media(frames: Sequence[Image.Image], size: VideoSize, processor: Processor) -> InlineMedia:
    pixels: Pixels = np.stack([np.asarray(frame.convert("RGB"), dtype=np.uint8) for frame in frames])
    settings = f"video|{processor.resize_settings}|{size.width}x{size.height}|{size.timing}|"
    digest = hashlib.blake2b(settings.encode(), digest_size=16)
    digest.update(pixels.data)
    return InlineMedia(hash=digest.hexdigest(), size=size, pixels=pixels)
