"""Questions on short videos with exact answers, made on demand: which way a dot or stripes moved, in what order colours
came.

    vlmrl rl --data.prompt_dataset 'visual_motion?families=move+order&frames=6&size=5000' --data.video_key videos ...

No single frame has the answer. Row i depends only on seed, split and i, and no video is in two splits.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL.Image import Image

from vlmrl.data.canvas import Canvas, Colour
from vlmrl.data.rows import Generated, Rows
from vlmrl.datasets.visual_math import COLOURS, PAPERS
from vlmrl.errors import ConfigError

_DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
_FPS = 2.0
_CELLS = 8
_PERIOD = 0.5


@dataclass(frozen=True, slots=True)
class Dot:
    """A dot in one frame, on a grid of `_CELLS` cells per side."""

    x: int
    y: int
    colour: str
    radius: float = 0.1
    """Fraction of the side."""

    def draw(self, canvas: Canvas) -> None:
        canvas.circle((self.x + 0.5) / _CELLS, (self.y + 0.5) / _CELLS, self.radius, COLOURS[self.colour])


@dataclass(frozen=True, slots=True)
class Stripes:
    """Two vertical stripes in one frame, half as wide as their distance, `_PERIOD`."""

    phase: float
    """Where they begin, in periods from the left."""
    colour: str

    def draw(self, canvas: Canvas) -> None:
        for number in range(-1, round(1 / _PERIOD) + 1):
            canvas.box((number + self.phase % 1) * _PERIOD, 0, _PERIOD / 2, 1, COLOURS[self.colour])


@dataclass(frozen=True, slots=True)
class Clip:
    """A video and a question about it, before it is drawn. See `vlmrl.data.rows.GeneratedQuestion`."""

    family: str
    question: str
    answer: str
    shapes: tuple[Dot | Stripes, ...]
    """One for each frame."""
    paper: Colour
    pixels: int
    encoded: bool

    @property
    def key(self) -> str:
        return f"{self.family}|{self.shapes}|{self.paper}"

    def draw(self) -> list[Image]:
        """Draw the frames."""
        frames = []
        for shape in self.shapes:
            canvas = Canvas(self.pixels, self.paper)
            shape.draw(canvas)
            frames.append(canvas.finish())
        return frames

    def row(self) -> dict[str, Any]:
        frames = self.draw()
        video = {"video": _mp4(frames)} if self.encoded else {"video": frames, "sample_fps": _FPS}
        return {
            "input": self.question,
            "label": self.answer,
            "videos": [video],
            "answer": self.answer,
            "family": self.family,
        }


def rows(
    *,
    split: str,
    seed: int,
    size: int = 10_000,
    families: tuple[str, ...] = ("move", "order"),
    frames: int = 4,
    pixels: int = 128,
    encoded: bool = False,
) -> Rows:
    """Generate `size` questions, cycling through the families, on videos of `frames` square frames, 2 per second.

    Labels are a direction (`move`, `drift`), or the first letters of colours (`order`). With `encoded` a video is an
    MP4 file, else a list of frames.

    Raises:
        ConfigError: an option is out of range.
    """
    unknown = [family for family in families if family not in FAMILIES]
    if unknown or not families:
        raise ConfigError(f"visual_motion?families={'+'.join(families)}: choose among {', '.join(FAMILIES)}")
    if frames not in range(2, _CELLS + 1) or frames % 2:
        raise ConfigError(f"visual_motion?frames={frames}: choose 2, 4, 6 or 8")
    if frames == 2 and "order" in families:
        raise ConfigError("visual_motion?families=order: two frames show one colour, choose 4, 6 or 8 frames")
    if pixels < 32 or pixels % 2:
        raise ConfigError(f"visual_motion?pixels={pixels}: choose an even number from 32 on")

    def invent(rng: random.Random, row: int) -> Clip:
        family = families[row % len(families)]
        question, answer, shapes = FAMILIES[family](rng, frames)
        return Clip(family, question, answer, tuple(shapes), rng.choice(PAPERS), pixels, encoded)

    generated = Generated(invent, size=size, split=split, seed=seed)
    columns = ("input", "label", "videos", "answer", "family")
    return Rows("visual_motion", generated, columns, has_own_columns=True, is_generated=True)


def move(rng: random.Random, frames: int) -> tuple[str, str, list[Dot]]:
    """A dot moves by one cell per frame, left, right, up or down.

    It leaves on one side and comes back on the other: were it kept inside, where it begins would tell where it goes.
    """
    answer = rng.choice(list(_DIRECTIONS))
    right, down = _DIRECTIONS[answer]
    x, y = rng.randrange(_CELLS), rng.randrange(_CELLS)
    colour = rng.choice(list(COLOURS))
    dots = [Dot((x + right * n) % _CELLS, (y + down * n) % _CELLS, colour) for n in range(frames)]
    return "Which way does the dot move?", answer, dots


def order(rng: random.Random, frames: int) -> tuple[str, str, list[Dot]]:
    """A large dot stays where it is and changes its colour after every second frame."""
    names = rng.sample(list(COLOURS), frames // 2)
    x, y = rng.randrange(2, _CELLS - 2), rng.randrange(2, _CELLS - 2)
    answer = "".join(name[0] for name in names)
    return "In what order do the colours come?", answer, [Dot(x, y, names[n // 2], radius=0.3) for n in range(frames)]


def drift(rng: random.Random, frames: int) -> tuple[str, str, list[Stripes]]:
    """Stripes move left or right, by a quarter of their distance per frame."""
    answer = rng.choice(("left", "right"))
    phase, colour = round(rng.random(), 3), rng.choice(list(COLOURS))
    step = _DIRECTIONS[answer][0] / 4
    return "Which way do the stripes move?", answer, [Stripes(phase + step * n, colour) for n in range(frames)]


Family = Callable[[random.Random, int], tuple[str, str, Sequence[Dot | Stripes]]]
FAMILIES: dict[str, Family] = {"move": move, "order": order, "drift": drift}


def _mp4(frames: Sequence[Image]) -> bytes:
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        stream = out.add_stream("libx264", rate=int(_FPS), options={"crf": "10"})
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            out.mux(stream.encode(av.VideoFrame.from_ndarray(np.asarray(frame), format="rgb24")))
        out.mux(stream.encode())
    return file.getvalue()
