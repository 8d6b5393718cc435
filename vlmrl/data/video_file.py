"""Decode frames of a video file in bounded memory and time."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from PIL import Image

from vlmrl.data.image_source import Encoded
from vlmrl.errors import DataError
from vlmrl.plugins import first_line

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream

FORMATS = ("MP4", "MOV", "WebM", "Matroska", "AVI", "GIF")
"""FFmpeg reads hundreds of formats, among them playlists that name other files and addresses."""
_MAX_FRAMES_PER_S = 240
"""Most frames per second of a file, on average over `VideoLimits.seconds`: a bound on the time to decode it."""


class VideoLimits(NamedTuple):
    """Limits of a video file."""

    frame_pixels: int
    """Pixels of a frame."""
    seconds: float
    """Length of the video."""


class VideoFacts(NamedTuple):
    """What the packets of a video file say, before any frame is decoded."""

    width: int
    height: int
    num_frames: int
    fps: float
    """Frames per second, on average."""


Choose = Callable[[VideoFacts], tuple[Sequence[int], tuple[int, int]]]
"""Chooses frame numbers, in order, and the (width, height) that the frames are resized to."""


def read_frames(encoded: Encoded, *, limits: VideoLimits, choose: Choose) -> tuple[VideoFacts, list[Image.Image]]:
    """Decode the frames that `choose` takes, each resized at once, bicubic: only those are held in memory.

    Raises:
        DataError: it is not a video of `FORMATS`, it is damaged or truncated, it has no frames, or it exceeds `limits`.
    """
    facts = _facts(encoded, limits)
    numbers, size = choose(facts)
    wanted = set(numbers)
    frames: dict[int, Image.Image] = {}
    last = max(numbers)
    number = -1
    with _opened(encoded, limits) as (container, stream):
        for number, frame in enumerate(container.decode(stream)):
            if number in wanted:
                # A stream may change its size within.
                _check_pixels(encoded.name, frame.width, frame.height, limits)
                frames[number] = Image.fromarray(frame.to_ndarray(format="rgb24")).resize(
                    size, Image.Resampling.BICUBIC
                )
            if number >= last:
                break
    if number < last:
        raise DataError(
            f"{encoded.name} is damaged or truncated: {number + 1} of its {facts.num_frames} frames can be decoded"
        )
    return facts, [frames[number] for number in numbers]


def _facts(encoded: Encoded, limits: VideoLimits) -> VideoFacts:
    """Read all packets, without decoding them: headers may lie about the number of frames, or lack it."""
    name = encoded.name
    with _opened(encoded, limits) as (container, stream):
        width, height = stream.codec_context.width, stream.codec_context.height
        declared, rate, start, end, count, num_hidden = int(stream.frames), stream.average_rate, None, 0.0, 0, 0
        for packet in container.demux(stream):
            if not packet.size:
                continue
            if packet.is_discard:  # cut off by an edit list: the decoder needs it, and gives no frame
                num_hidden += 1
                continue
            count += 1
            if packet.pts is not None and packet.time_base is not None:
                begin = float(packet.pts * packet.time_base)
                start = begin if start is None else min(start, begin)
                end = max(end, begin + float((packet.duration or 0) * packet.time_base))
            seconds = 0.0 if start is None else end - start
            if seconds > limits.seconds or count > limits.seconds * _MAX_FRAMES_PER_S:
                raise DataError(
                    f"{name} is longer than {limits.seconds:g} s, or has more than {_MAX_FRAMES_PER_S} frames in each: "
                    "cut it, or raise data.max_video_s"
                )
    if not count:
        raise DataError(f"{name} has no frames: it is empty or truncated")
    if count + num_hidden < declared:
        raise DataError(f"{name} is truncated: it has {count + num_hidden} of {declared} frames")
    fps = float(rate) if rate else (count / seconds if seconds > 0 else 0.0)
    if fps <= 0:
        raise DataError(f"{name} has no frame rate")
    _check_pixels(name, width, height, limits)
    return VideoFacts(width, height, count, fps)


@contextmanager
def _opened(encoded: Encoded, limits: VideoLimits) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open the first video stream. Raises DataError for anything that FFmpeg cannot read."""
    import av

    content, name = encoded
    demuxer = _demuxer(content)
    if demuxer is None:
        raise DataError(f"{name} is not a readable video ({len(content)} bytes): supported are {', '.join(FORMATS)}")
    # A bound inside the decoder, which allocates a frame, padded, before we see its size.
    options: dict[str, str] = {"max_pixels": str(2 * limits.frame_pixels + 2**16)}
    try:
        container: Any = av.open(io.BytesIO(content), format=demuxer, options={"protocol_whitelist": "none"})
        with container:
            if not container.streams.video:
                raise DataError(f"{name} has no video stream")
            stream = container.streams.video[0]
            _check_pixels(name, stream.codec_context.width, stream.codec_context.height, limits)
            stream.codec_context.options = options
            stream.thread_type = "NONE"  # rows are decoded by several threads already
            yield container, stream
    except DataError:
        raise
    except (av.FFmpegError, ValueError, OSError, MemoryError) as error:  # damaged files
        reason = getattr(error, "strerror", None) or first_line(error)
        raise DataError(f"{name} is damaged or truncated: {reason}") from error


def _demuxer(content: bytes) -> str | None:
    """FFmpeg's name of the container, by the first bytes: a file never chooses another."""
    if content[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "mov"
    if content[:4] == b"\x1aE\xdf\xa3":
        return "matroska"
    if content[:4] == b"RIFF" and content[8:12] == b"AVI ":
        return "avi"
    return "gif" if content[:4] == b"GIF8" else None


def _check_pixels(name: str, width: int, height: int, limits: VideoLimits) -> None:
    if width * height > limits.frame_pixels:
        raise DataError(
            f"{name} has frames of {width}x{height}, more than {limits.frame_pixels} pixels: it may be a decompression "
            "bomb; if not, raise data.max_video_frame_pixels"
        )
