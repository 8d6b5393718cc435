"""Decode frames of a video file in bounded memory and time."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from vlmrl.data.decode import PIXEL_BUDGET
from vlmrl.data.image_source import Encoded
from vlmrl.data.video_header import check_whole, find_demuxer, num_samples
from vlmrl.data.video_packets import Packet, frame_times, runs_of
from vlmrl.errors import DataError
from vlmrl.plugins import first_line
from vlmrl.types import Pixels

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

_MAX_FRAMES_PER_S = 240
"""Most frames per second of a file, on average over `VideoLimits.seconds`: a bound on the time to decode it."""
_MAX_MISSING = 16
"""Most packets of a good file without a frame: those before its first key frame, where it was cut."""
_RATE_TOLERANCE = 0.05
"""The header's frame rate is used if the packets' times agree with it to this fraction."""


class VideoLimits(NamedTuple):
    """Limits of a video file."""

    frame_pixels: int
    """Pixels of a frame."""
    seconds: float
    """Length of the video."""
    decoded_pixels: float
    """Pixels of all frames that have to be decoded."""
    budget_pixels: int
    """Pixels that all threads decode at once: see `PixelBudget`."""


class VideoFacts(NamedTuple):
    """What the packets of a video file say, before its frames are decoded."""

    width: int
    """Of a frame as it is shown: a phone's recording may be turned."""
    height: int
    num_frames: int
    fps: float
    """Frames per second, on average."""


Choose = Callable[[VideoFacts], tuple[Sequence[int], tuple[int, int]]]
"""Chooses different frame numbers, in order, and the (width, height) that the frames are resized to."""


class _Scan(NamedTuple):
    """A file whose packets were read."""

    facts: VideoFacts
    packets: Sequence[Packet]
    """In the order of the file."""
    times: Sequence[int] | None
    """Time of each frame, rising; None where packets do not tell: frames are then counted as they are decoded."""
    quarter_turns: int
    """How often a frame is turned by 90 degrees, counterclockwise, before it is shown."""


def read_frames(encoded: Encoded, *, limits: VideoLimits, choose: Choose) -> tuple[VideoFacts, Pixels]:
    """Decode the frames that `choose` takes, each resized at once, bicubic: only those are held in memory.

    Between them only what they need is decoded: from the key frame before each.

    Returns:
        The facts that the frames were chosen by, and the frames [n, height, width, 3].

    Raises:
        DataError: it is not a video of `FORMATS`, it is damaged or truncated, it has no frames, or it exceeds `limits`.
    """
    scan = _scan(encoded, limits)
    pixels = _decode(encoded, limits, scan, *choose(scan.facts))
    if pixels is not None:
        return scan.facts, pixels
    # Some packets give no frame, such as those before the first key frame of a file that was cut: choose again.
    total = scan.facts.num_frames
    count = _count_frames(encoded, limits, scan)
    if count < total - min(_MAX_MISSING, total // 8):
        raise DataError(f"{encoded.name} is damaged or truncated: {count} of its {total} frames can be decoded")
    scan = scan._replace(facts=scan.facts._replace(num_frames=count), times=None)
    pixels = _decode(encoded, limits, scan, *choose(scan.facts))
    assert pixels is not None, "as many frames were decoded before"
    return scan.facts, pixels


def _decode(
    encoded: Encoded, limits: VideoLimits, scan: _Scan, numbers: Sequence[int], size: tuple[int, int]
) -> Pixels | None:
    """Decode frames by their numbers; None if one of them does not come."""
    by_count = scan.times is None
    keys = numbers if scan.times is None else [scan.times[number] for number in numbers]
    runs = [range(len(scan.packets))] if by_count else runs_of(scan.packets, keys)
    _check_work(encoded.name, limits, scan, max(numbers) + 1 if by_count else sum(map(len, runs)))
    places = {key: place for place, key in enumerate(keys)}
    width, height = size
    frame_pixels = scan.facts.width * scan.facts.height
    with PIXEL_BUDGET.reserve_pixels(frame_pixels + len(numbers) * width * height, limits.budget_pixels):
        pixels = np.empty((len(numbers), height, width, 3), dtype=np.uint8)
        with _opened(encoded, limits) as (container, stream):
            for number, frame in enumerate(_frames(container, stream, runs)):
                place = places.pop(number if by_count else _time(frame), None)
                if place is not None:
                    # A stream may change its size within.
                    _check_pixels(encoded.name, frame.width, frame.height, limits)
                    if frame.is_corrupt:
                        raise DataError(f"{encoded.name} is damaged: its frame {numbers[place] + 1} is incomplete")
                    upright = np.rot90(frame.to_ndarray(format="rgb24"), scan.quarter_turns)
                    pixels[place] = np.asarray(Image.fromarray(upright).resize(size, Image.Resampling.BICUBIC))
                if not places:
                    return pixels
    return None


def _frames(container: InputContainer, stream: VideoStream, runs: Sequence[range]) -> Iterator[VideoFrame]:
    """Decode runs of packets, given by their places in the file."""
    decoder: Any = stream.codec_context
    waiting = iter(runs)
    run = next(waiting)
    for place, packet in enumerate(packet for packet in container.demux(stream) if packet.size):
        if place == run.stop:
            yield from decoder.decode(None)
            following = next(waiting, None)
            if following is None:
                return
            run = following
            decoder.flush_buffers()
        if place in run:
            yield from decoder.decode(packet)
    yield from decoder.decode(None)


def _count_frames(encoded: Encoded, limits: VideoLimits, scan: _Scan) -> int:
    _check_work(encoded.name, limits, scan, len(scan.packets))
    with _opened(encoded, limits) as (container, stream):
        return sum(1 for _ in _frames(container, stream, [range(len(scan.packets))]))


def _scan(encoded: Encoded, limits: VideoLimits) -> _Scan:
    """Read all packets, and decode the first frame: headers may lie about the number of frames, or lack it."""
    name = encoded.name
    demuxer = find_demuxer(encoded)
    check_whole(encoded, demuxer)
    if num_samples(encoded, demuxer) > limits.seconds * _MAX_FRAMES_PER_S:
        raise _too_long(name, limits)
    first: VideoFrame | None = None
    packets: list[Packet] = []
    start, latest, end, count = None, 0.0, 0.0, 0
    with _opened(encoded, limits) as (container, stream):
        decoder: Any = stream.codec_context
        declared, rate = int(stream.frames), stream.average_rate
        promised = (container.duration or 0) / 1e6  # of the longest stream
        can_skip = decoder.name in ("h264", "hevc", "vp8", "vp9", "libvpx-vp9", "libdav1d", "av1", "mpeg4")
        for packet in container.demux(stream):
            if first is None:
                first = next(iter(decoder.decode(packet if packet.size else None)), None)
            if not packet.size:
                continue
            # Cut off by an edit list: the decoder needs it, and gives no frame.
            packets.append(Packet(packet.pts, packet.is_keyframe, packet.is_discard))
            if packet.is_discard:
                continue
            count += 1
            if packet.pts is not None and packet.time_base is not None:
                begin = float(packet.pts * packet.time_base)
                start = begin if start is None else min(start, begin)
                latest = max(latest, begin)
                end = max(end, begin + float((packet.duration or 0) * packet.time_base))
            seconds = 0.0 if start is None else end - start
            if seconds > limits.seconds or count > limits.seconds * _MAX_FRAMES_PER_S:
                raise _too_long(name, limits)
    if not count or first is None:
        raise DataError(f"{name} has no frames: it is empty or truncated")
    if len(packets) < declared:
        raise DataError(f"{name} is truncated: it has {len(packets)} of {declared} frames")
    if end < promised / 2 and demuxer == "matroska":
        raise DataError(f"{name} is damaged or truncated: its frames end at {end:.1f} of {promised:.1f} s")
    # The last frame of a recording may have no duration.
    fps = _frame_rate(float(rate or 0), *((count, seconds) if end > latest else (count - 1, latest - (start or 0.0))))
    if fps <= 0:
        raise DataError(f"{name} has no frame rate")
    turns = round(first.rotation / 90) % 4
    width, height = (first.height, first.width) if turns % 2 else (first.width, first.height)
    _check_pixels(name, width, height, limits)
    return _Scan(VideoFacts(width, height, count, fps), packets, frame_times(packets) if can_skip else None, turns)


def _frame_rate(declared: float, count: int, seconds: float) -> float:
    """Frames per second: as the header says, unless the times of the packets tell otherwise, `count` in `seconds`.

    FFmpeg guesses the rate of a WebM or Matroska file with varying intervals from its first frames.
    """
    measured = count / seconds if seconds > 0 and count > 0 else 0.0
    return declared if not measured or abs(declared / measured - 1) <= _RATE_TOLERANCE else measured


def _time(frame: VideoFrame) -> int:
    return -1 if frame.pts is None else int(frame.pts)


@contextmanager
def _opened(encoded: Encoded, limits: VideoLimits) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open the first video stream. Raises DataError for anything that FFmpeg cannot read."""
    import av

    content, name = encoded
    demuxer = find_demuxer(encoded)
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


def _too_long(name: str, limits: VideoLimits) -> DataError:
    return DataError(
        f"{name} is longer than {limits.seconds:g} s, or has more than {_MAX_FRAMES_PER_S} frames in each: cut it, or "
        "raise data.max_video_s"
    )


def _check_work(name: str, limits: VideoLimits, scan: _Scan, num_decoded: int) -> None:
    pixels = num_decoded * scan.facts.width * scan.facts.height
    if pixels > limits.decoded_pixels:
        raise DataError(
            f"{name} takes too long to decode: {num_decoded} frames of {scan.facts.width}x{scan.facts.height}, "
            f"{pixels / 1e9:.1f} billion pixels; data.max_video_gpixels is {limits.decoded_pixels / 1e9:g}"
        )


def _check_pixels(name: str, width: int, height: int, limits: VideoLimits) -> None:
    if width * height > limits.frame_pixels:
        raise DataError(
            f"{name} has frames of {width}x{height}, more than {limits.frame_pixels} pixels: it may be a decompression "
            "bomb; if not, raise data.max_video_frame_pixels"
        )
