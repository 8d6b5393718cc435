"""Image questions with exact answers, generated on demand: counting, dice and digits, bar charts, rectangles, clocks.

    vlmrl rl --data.prompt_dataset 'visual_math?families=count+clock&difficulty=1+2&size=5000&pixels=336' ...

Row i depends only on seed, split and i, and no pair of picture and question is in two splits.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from PIL.Image import Image

from vlmrl.data.canvas import INK, Canvas, Colour
from vlmrl.data.rows import Generated
from vlmrl.errors import ConfigError

COLOURS = {
    "red": (214, 40, 40),
    "green": (42, 157, 80),
    "blue": (38, 100, 214),
    "yellow": (244, 196, 32),
    "purple": (134, 66, 190),
    "orange": (240, 128, 28),
}
PAPERS = ((255, 255, 255), (250, 246, 238), (240, 246, 252), (243, 250, 242), (252, 242, 246), (240, 240, 244))
_FAINT = (205, 209, 216)
_MIN_PIXELS = 56


@dataclass(frozen=True, slots=True)
class Scene:
    """A picture and a question about it, before it is drawn."""

    question: str
    answer: int | str
    content: str
    """Everything in the picture, as text."""
    paint: Callable[[Canvas], None]
    shown: tuple[Any, ...]
    """The values that the answer follows from: (row, kind, colour) of each shape; faces; the expression; heights of the
    bars; width and height, and those of a cut-out corner; hour and minute."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A scene with all parameters of its picture. See `vlmrl.data.rows.GeneratedQuestion`."""

    scene: Scene
    family: str
    difficulty: int
    paper: Colour
    pixels: int
    boxed: bool

    @property
    def key(self) -> str:
        return f"{self.family}|{self.scene.question}|{self.scene.content}|{self.paper}"

    @property
    def picture_key(self) -> str:
        """Identity of the picture, whatever is asked about it."""
        return f"{self.family}|{self.scene.content}|{self.paper}"

    def draw(self) -> Image:
        """Draw the picture."""
        canvas = Canvas(self.pixels, self.paper)
        self.scene.paint(canvas)
        return canvas.finish()

    def row(self) -> dict[str, Any]:
        label = str(self.scene.answer)
        return {
            "input": self.scene.question,
            "label": label,
            "images": [self.draw()],
            "answer": f"\\boxed{{{label}}}" if self.boxed else label,
            "family": self.family,
            "difficulty": self.difficulty,
        }


def rows(
    *,
    split: str,
    seed: int,
    size: int = 10_000,
    families: tuple[str, ...] = ("count", "arithmetic", "chart", "rectangle", "clock"),
    difficulty: tuple[int, ...] = (1,),
    pixels: int = 336,
    boxed: bool = False,
) -> Sequence[dict[str, Any]]:
    """Generate `size` questions, cycling through the families, on square pictures of `pixels` per side.

    Labels are whole numbers, for clocks h:mm. `boxed` puts the target answer of supervised training (not the label) in
    `\\boxed{}`.

    Raises:
        ConfigError: an option is out of range.
    """
    invent = inventor("visual_math", families=families, difficulty=difficulty, pixels=pixels, boxed=boxed)
    return Generated(invent, size=size, split=split, seed=seed)


def inventor(
    dataset: str, *, families: tuple[str, ...], difficulty: tuple[int, ...], pixels: int, boxed: bool
) -> Callable[[random.Random, int], Drawn]:
    """Return the function that invents the question of a row. `dataset` is for messages.

    Raises:
        ConfigError: an option is out of range.
    """
    unknown = [family for family in families if family not in FAMILIES]
    if unknown or not families:
        raise ConfigError(f"{dataset}?families={'+'.join(families)}: choose among {', '.join(FAMILIES)}")
    if not difficulty or any(level not in (1, 2, 3) for level in difficulty):
        raise ConfigError(f"{dataset}?difficulty={'+'.join(map(str, difficulty))}: choose among 1, 2 and 3")
    if pixels < _MIN_PIXELS:
        raise ConfigError(f"{dataset}?pixels={pixels}: pictures smaller than {_MIN_PIXELS} per side are not legible")

    def invent(rng: random.Random, row: int) -> Drawn:
        family = families[row % len(families)]
        level = difficulty[row // len(families) % len(difficulty)]
        scene = FAMILIES[family](rng, level)
        return Drawn(scene, family, level, rng.choice(PAPERS), pixels, boxed)

    return invent


# Counting


def count(rng: random.Random, difficulty: int) -> Scene:
    """Count shapes. 1: all circles, 4x4 grid. 2: one of three shapes in four colours, 5x5. 3: comparisons, 6x6."""
    cells = 3 + difficulty
    colours = list(COLOURS)[: 2 + difficulty]
    if difficulty == 1:
        shapes = [("circle", rng.choice(colours)) for _ in range(rng.randint(1, 9))]
        question, answer = "How many circles?", len(shapes)
    else:
        shapes, question, answer = _count_some(rng, colours, cells=cells, compares=difficulty == 3)
    places = sorted(rng.sample(range(cells * cells), len(shapes)))
    rng.shuffle(shapes)

    def paint(canvas: Canvas) -> None:
        step = 0.94 / cells
        for place, (shape, name) in zip(places, shapes, strict=True):
            x, y = 0.03 + (place % cells + 0.5) * step, 0.03 + (place // cells + 0.5) * step
            _shape(canvas, shape, x, y, 0.39 * step, COLOURS[name])

    shown = tuple((place // cells, *shape) for place, shape in zip(places, shapes, strict=True))
    return Scene(question, answer, f"{cells}{list(zip(places, shapes, strict=True))}", paint, shown)


def _count_some(
    rng: random.Random, colours: Sequence[str], *, cells: int, compares: bool
) -> tuple[list[tuple[str, str]], str, int]:
    """Choose shapes and a question about some of them: the number of one kind and colour, or a comparison."""
    kinds = ["circle", "square", "triangle"]
    colour, kind, other = rng.choice(colours), rng.choice(kinds), rng.choice(colours)
    count = rng.randint(0, 9 if compares else 7)
    shapes = [(kind, colour)] * count
    distractors = [(k, c) for k in kinds for c in colours if (k, c) != (kind, colour)]
    shapes += [rng.choice(distractors) for _ in range(rng.randint(0, cells * cells * 2 // 3 - count))]
    if not compares:
        return shapes, f"How many {colour} {kind}s?", count
    if rng.random() < 0.5:
        return shapes, f"How many shapes are not {other}?", sum(c != other for _, c in shapes)
    few, many = sorted(kinds[:2], key=lambda k: sum(shape == k for shape, _ in shapes))
    counts = [sum(shape == k for shape, _ in shapes) for k in (many, few)]
    return shapes, f"How many more {many}s than {few}s?", counts[0] - counts[1]


def _shape(canvas: Canvas, shape: str, x: float, y: float, radius: float, fill: Colour) -> None:
    if shape == "circle":
        canvas.circle(x, y, radius, fill)
    elif shape == "square":
        canvas.box(x - 0.88 * radius, y - 0.88 * radius, 1.76 * radius, 1.76 * radius, fill, corner=0.12 * radius)
    else:
        canvas.polygon([(x, y - radius), (x + radius, y + 0.8 * radius), (x - radius, y + 0.8 * radius)], fill)


# Dice and digits

_PIPS = {
    1: [(0, 0)],
    2: [(-1, -1), (1, 1)],
    3: [(-1, -1), (0, 0), (1, 1)],
    4: [(-1, -1), (1, -1), (-1, 1), (1, 1)],
    5: [(-1, -1), (1, -1), (0, 0), (-1, 1), (1, 1)],
    6: [(-1, -1), (1, -1), (-1, 0), (1, 0), (-1, 1), (1, 1)],
}


def arithmetic(rng: random.Random, difficulty: int) -> Scene:
    """Add dice or calculate. 1: two dice. 2: four dice, or a sum or difference in digits. 3: two operations."""
    if difficulty == 1 or (difficulty == 2 and rng.random() < 0.5):
        return _dice(rng, 2 * difficulty)
    a, b, c = rng.randint(10, 60), rng.randint(2, 40), rng.randint(2, 9)
    a, b = max(a, b), min(a, b)
    sign = rng.choice("+-")
    value = a + b if sign == "+" else a - b
    if difficulty == 2:
        return _written(rng, f"{a} {sign} {b}", value)
    return _written(rng, f"({a} {sign} {b}) × {c}", value * c)


def _dice(rng: random.Random, number: int) -> Scene:
    faces = [rng.randint(1, 6) for _ in range(number)]
    corners = [(0.25, 0.25), (0.75, 0.25), (0.25, 0.75), (0.75, 0.75)]
    places = sorted(rng.sample(range(4), number))
    name = rng.choice(list(COLOURS))

    def paint(canvas: Canvas) -> None:
        for place, face in zip(places, faces, strict=True):
            x, y = corners[place]
            canvas.box(x - 0.19, y - 0.19, 0.38, 0.38, COLOURS[name], corner=0.06)
            canvas.box(x - 0.175, y - 0.175, 0.35, 0.35, (255, 255, 255), corner=0.05)
            for right, down in _PIPS[face]:
                canvas.circle(x + 0.1 * right, y + 0.1 * down, 0.034, INK)

    return Scene("What is the sum of the dice?", sum(faces), f"{places}{faces}{name}", paint, tuple(faces))


def _written(rng: random.Random, text: str, value: int) -> Scene:
    name = rng.choice(list(COLOURS))
    height = rng.choice([0.15, 0.17, 0.19]) if len(text) < 9 else 0.13
    y = rng.choice([0.35, 0.5, 0.65])

    def paint(canvas: Canvas) -> None:
        canvas.box(0.05, y - 0.17, 0.9, 0.34, COLOURS[name], corner=0.06)
        canvas.box(0.065, y - 0.155, 0.87, 0.31, (255, 255, 255), corner=0.05)
        canvas.expression(0.5, y, text, height)

    return Scene("What is the result?", value, f"{text}{name}{height}{y}", paint, (text,))


# Charts


def chart(rng: random.Random, difficulty: int) -> Scene:
    """Read a bar chart. 1: one of three bars. 2: the difference of two of four. 3: the sum or range of five."""
    number = 2 + difficulty
    top, step = (10, 2) if difficulty < 3 else (50, 10)
    unit = 1 if difficulty < 3 else 5
    values = [unit * rng.randint(1, top // unit) for _ in range(number)]
    names = "ABCDE"[:number]
    colours = [rng.choice(list(COLOURS)) for _ in range(number)]
    first, second = sorted(rng.sample(range(number), 2), key=lambda i: -values[i])
    if difficulty == 1:
        question, answer = f"What is the value of bar {names[first]}?", values[first]
    elif difficulty == 2:
        question, answer = (
            f"How much higher is bar {names[first]} than bar {names[second]}?",
            values[first] - values[second],
        )
    elif rng.random() < 0.5:
        question, answer = "What is the sum of all bars?", sum(values)
    else:
        question, answer = "How much higher is the highest bar than the lowest?", max(values) - min(values)

    def paint(canvas: Canvas) -> None:
        left, bottom, height = 0.16, 0.86, 0.78
        for tick in range(0, top + 1, unit):
            y = bottom - height * tick / top
            canvas.line((left, y), (0.97, y), _FAINT, 0.004 if tick % step else 0.008)
            if tick % step == 0:
                canvas.text(left - 0.03, y, str(tick), 0.075, anchor="rm")
        width = 0.81 / number
        for i, value in enumerate(values):
            x = left + (i + 0.18) * width
            canvas.box(x, bottom - height * value / top, 0.64 * width, height * value / top, COLOURS[colours[i]])
            canvas.text(x + 0.32 * width, 0.93, names[i], 0.085)
        canvas.line((left, bottom), (0.97, bottom), INK, 0.01)
        canvas.line((left, bottom), (left, 0.04), INK, 0.01)

    return Scene(question, answer, f"{values}{colours}", paint, tuple(values))


# Rectangles


def rectangle(rng: random.Random, difficulty: int) -> Scene:
    """Area or perimeter. 1: sides up to 9. 2: sides up to 25. 3: an L shape."""
    if difficulty == 3:
        return _l_shape(rng)
    top = 9 if difficulty == 1 else 25
    wide, high = rng.randint(2, top), rng.randint(2, top)
    asks_area = rng.random() < 0.5
    name = rng.choice(list(COLOURS))
    width = 0.66 * min(1.0, max(0.4, wide / max(wide, high)))
    height = 0.66 * min(1.0, max(0.4, high / max(wide, high)))

    def paint(canvas: Canvas) -> None:
        x, y = 0.55 - width / 2, 0.45 - height / 2
        points = [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]
        canvas.polygon(points, _pale(COLOURS[name]), COLOURS[name], 0.014)
        canvas.text(x + width / 2, y + height + 0.07, str(wide), 0.1)
        canvas.text(x - 0.03, y + height / 2, str(high), 0.1, anchor="rm")

    question = "What is the area of the rectangle?" if asks_area else "What is the perimeter of the rectangle?"
    answer = wide * high if asks_area else 2 * (wide + high)
    return Scene(question, answer, f"{wide}x{high}{name}", paint, (wide, high))


def _l_shape(rng: random.Random) -> Scene:
    """Area or perimeter of an L shape; the outer sides and those of the cut-out corner are labelled."""
    wide, high = rng.randint(6, 20), rng.randint(6, 20)
    cut_wide, cut_high = rng.randint(2, wide - 3), rng.randint(2, high - 3)
    asks_area = rng.random() < 0.5
    name = rng.choice(list(COLOURS))

    def paint(canvas: Canvas) -> None:
        x, y, side = 0.17, 0.13, 0.66
        # Not to scale where the cut would be too small or too large to write on.
        cut_x = x + side * (1 - min(0.6, max(0.35, cut_wide / wide)))
        cut_y = y + side * min(0.6, max(0.35, cut_high / high))
        points = [(x, y), (cut_x, y), (cut_x, cut_y), (x + side, cut_y), (x + side, y + side), (x, y + side)]
        canvas.polygon(points, _pale(COLOURS[name]), COLOURS[name], 0.014)
        canvas.text(x + side / 2, y + side + 0.07, str(wide), 0.09)
        canvas.text(x - 0.025, y + side / 2, str(high), 0.09, anchor="rm")
        canvas.text(cut_x + 0.75 * (x + side - cut_x), cut_y - 0.06, str(cut_wide), 0.09)
        canvas.text(cut_x + 0.03, y + 0.25 * (cut_y - y), str(cut_high), 0.09, anchor="lm")

    area, perimeter = wide * high - cut_wide * cut_high, 2 * (wide + high)
    question = "What is the area of the shape?" if asks_area else "What is the perimeter of the shape?"
    sides = (wide, high, cut_wide, cut_high)
    answer = area if asks_area else perimeter
    return Scene(question, answer, f"L{wide}x{high}-{cut_wide}x{cut_high}{name}", paint, sides)


# Clocks


def clock(rng: random.Random, difficulty: int) -> Scene:
    """Read a clock. 1: full and half hours. 2: steps of five minutes. 3: any minute."""
    step = {1: 30, 2: 5, 3: 1}[difficulty]
    hour, minute = rng.randint(1, 12), step * rng.randrange(60 // step)
    rim, hands = rng.choice(list(COLOURS)), rng.choice(["ink", *COLOURS])
    has_digits = rng.random() < 0.6

    def paint(canvas: Canvas) -> None:
        canvas.circle(0.5, 0.5, 0.46, (255, 255, 255), COLOURS[rim], 0.03)
        for tick in range(60):
            x, y = math.sin(math.tau * tick / 60), -math.cos(math.tau * tick / 60)
            if tick % 5 == 0 and has_digits:
                canvas.text(0.5 + 0.35 * x, 0.5 + 0.35 * y, str(tick // 5 or 12), 0.085)
            elif tick % 5 == 0:
                canvas.line((0.5 + 0.35 * x, 0.5 + 0.35 * y), (0.5 + 0.42 * x, 0.5 + 0.42 * y), INK, 0.016)
            elif difficulty == 3:
                canvas.line((0.5 + 0.4 * x, 0.5 + 0.4 * y), (0.5 + 0.42 * x, 0.5 + 0.42 * y), INK, 0.006)
        colour = INK if hands == "ink" else COLOURS[hands]
        canvas.hand(0.5, 0.5, (hour + minute / 60) / 12, 0.2, 0.038, INK)
        canvas.hand(0.5, 0.5, minute / 60, 0.3, 0.022, colour)
        canvas.circle(0.5, 0.5, 0.03, INK)

    time = f"{hour}:{minute:02d}"
    return Scene("What time does the clock show?", time, f"{time}{rim}{hands}{has_digits}", paint, (hour, minute))


FAMILIES: dict[str, Callable[[random.Random, int], Scene]] = {
    "count": count,
    "arithmetic": arithmetic,
    "chart": chart,
    "rectangle": rectangle,
    "clock": clock,
}


def _pale(colour: Colour) -> Colour:
    red, green, blue = (255 - (255 - channel) // 4 for channel in colour)
    return red, green, blue
