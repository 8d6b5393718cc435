"""Drawing on a square image in relative coordinates, for datasets that generate their images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from PIL import Image, ImageDraw, ImageFont

Colour = tuple[int, int, int]
Point = tuple[float, float]

INK: Colour = (38, 42, 52)

# Factors by which the canvas is larger than the image: drawing large and reducing smooths the edges.
_OVERSAMPLING, _OVERSAMPLING_OF_LARGE = 4, 3
_LARGE = 200  # pixels


class Canvas:
    """A square image. Lengths are fractions of its side; y points down."""

    def __init__(self, pixels: int, paper: Colour) -> None:
        self._scale = _OVERSAMPLING if pixels < _LARGE else _OVERSAMPLING_OF_LARGE
        self._side = pixels * self._scale
        self._image = Image.new("RGB", (self._side, self._side), paper)
        self._draw = ImageDraw.Draw(self._image)

    def finish(self) -> Image.Image:
        return self._image.reduce(self._scale)

    def polygon(
        self, points: Sequence[tuple[float, float]], fill: Colour, outline: Colour | None = None, width: float = 0
    ) -> None:
        scaled = [(x * self._side, y * self._side) for x, y in points]
        self._draw.polygon(scaled, fill=fill)
        if outline is not None:
            self._draw.line([*scaled, *scaled[:2]], fill=outline, width=self._thickness(width), joint="curve")

    def circle(
        self, x: float, y: float, radius: float, fill: Colour, outline: Colour | None = None, width: float = 0
    ) -> None:
        box = [
            (x - radius) * self._side,
            (y - radius) * self._side,
            (x + radius) * self._side,
            (y + radius) * self._side,
        ]
        self._draw.ellipse(box, fill=fill, outline=outline, width=self._thickness(width) if outline else 0)

    def box(self, x: float, y: float, width: float, height: float, fill: Colour, corner: float = 0) -> None:
        corners = [x * self._side, y * self._side, (x + width) * self._side, (y + height) * self._side]
        self._draw.rounded_rectangle(corners, radius=corner * self._side, fill=fill)

    def line(self, start: Point, end: Point, fill: Colour, width: float) -> None:
        points = [(x * self._side, y * self._side) for x, y in (start, end)]
        self._draw.line(points, fill=fill, width=self._thickness(width))

    def hand(self, x: float, y: float, turn: float, length: float, width: float, fill: Colour) -> None:
        """Draw a clock hand with round ends; `turn` is the angle from twelve o'clock in full turns."""
        end = (x + length * math.sin(math.tau * turn), y - length * math.cos(math.tau * turn))
        self.line((x, y), end, fill, width)
        self.circle(*end, width / 2, fill)

    def text(self, x: float, y: float, text: str, height: float, fill: Colour = INK, anchor: str = "mm") -> None:
        self._draw.text(
            (x * self._side, y * self._side), text, fill=fill, font=_font(round(height * self._side)), anchor=anchor
        )

    def expression(self, x: float, y: float, text: str, height: float) -> None:
        """Draw text whose + - × are strokes: Pillow's default font lacks some of these signs."""
        font = _font(round(height * self._side))
        parts = [(part, 0.55 * height if part in "+-×" else font.getlength(part) / self._side) for part in text.split()]
        gap = 0.28 * height
        x -= (sum(width for _, width in parts) + gap * (len(parts) - 1)) / 2
        for part, width in parts:
            if part in "+-×":
                self._operator(part, x + width / 2, y, width / 2)
            else:
                self.text(x, y, part, height, anchor="lm")
            x += width + gap

    def _operator(self, symbol: str, x: float, y: float, arm: float) -> None:
        strokes = {"+": [(1.0, 0.0), (0.0, 1.0)], "-": [(1.0, 0.0)], "×": [(0.75, 0.75), (0.75, -0.75)]}
        for right, down in strokes[symbol]:
            start, end = (x - right * arm, y - down * arm), (x + right * arm, y + down * arm)
            self.line(start, end, INK, 0.17 * arm * 2)

    def _thickness(self, width: float) -> int:
        return max(1, round(width * self._side))


@lru_cache(maxsize=64)
def _font(height: int) -> Any:
    return ImageFont.load_default(max(height, 1))
