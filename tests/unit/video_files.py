"""Small video files, written by PyAV."""

from __future__ import annotations

import io
from collections.abc import Mapping
from fractions import Fraction

import av
import numpy as np

from vlmrl.types import Pixels

DEMUXERS = {"mp4": "libx264", "webm": "libvpx-vp9", "matroska": "libx264", "avi": "mpeg4", "gif": "gif"}


def frames_of(count: int, size: tuple[int, int] = (64, 48)) -> Pixels:
    """[count, height, width, 3]: grey, brighter from frame to frame."""
    width, height = size
    levels = np.linspace(20, 230, count).round().astype(np.uint8)
    return np.broadcast_to(levels[:, None, None, None], (count, height, width, 3)).copy()


def video_file(
    frames: Pixels,
    *,
    rate: float = 8,
    container: str = "mp4",
    fast_start: bool = False,
    codec: str | None = None,
    options: Mapping[str, str] | None = None,
) -> bytes:
    """Encode frames [n, height, width, 3]. `options` are the encoder's."""
    file = io.BytesIO()
    file.name = f"video.{container}"
    of_container = {"movflags": "frag_keyframe+empty_moov"} if fast_start else {}
    with av.open(file, "w", format=container, container_options=of_container) as out:
        rate = Fraction(rate).limit_denominator(1000)
        stream = out.add_stream(codec or DEMUXERS[container], rate=rate, options=dict(options or {}))
        stream.width, stream.height = frames.shape[2], frames.shape[1]
        stream.pix_fmt = "rgb8" if container == "gif" else "yuv420p"
        for frame in frames:
            out.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        out.mux(stream.encode())
    return file.getvalue()
