"""Size and timing of a video: what its tokens and positions follow from, without its pixels."""

from __future__ import annotations

from typing import NamedTuple


class VideoSize(NamedTuple):
    """Size of a video's frames, and which frames of the file they are.

    Example: every fifth frame of a file with 20 frames at 10 per second -> indices (0, 5, 10, 15), fps 10.0, total 20,
    sampled_fps 2.0.
    """

    width: int
    height: int
    indices: tuple[int, ...]
    """Number of each frame in the file; an even number of frames."""
    fps: float
    """Frames per second of the file."""
    total: int
    """Frames of the file, or of the part that was asked for."""

    @property
    def num_frames(self) -> int:
        return len(self.indices)

    @property
    def sampled_fps(self) -> float:
        """Frames per second of the chosen frames."""
        return len(self.indices) / self.total * self.fps

    @property
    def timing(self) -> str:
        """Frame numbers and rates as text; part of the hash of a video, since prompts show times."""
        return f"{','.join(map(str, self.indices))}@{self.fps!r}/{self.total}"


Size = tuple[int, int] | VideoSize
"""(width, height) of an image in pixels, or the size of a video."""


def pixel_shape(size: Size) -> tuple[int, ...]:
    """Return the shape of the pixels: [height, width, 3], of a video with its frames before it."""
    if isinstance(size, VideoSize):
        return size.num_frames, size.height, size.width, 3
    width, height = size
    return height, width, 3


IMAGE, VIDEO = "<image>", "<video>"
"""Placeholders in a dataset's text."""


def placeholder(size: Size) -> str:
    """Return the placeholder of an image or video of this size."""
    return VIDEO if isinstance(size, VideoSize) else IMAGE
