"""Right and subtly wrong responses to the questions of `visual_math`, for `dpo`, `rm` and process reward models.

    vlmrl dpo --data.prompt_dataset 'visual_preferences?families=count+clock&size=5000' ...

A wrong response is the solution of somebody who made one mistake: a shape missed, another colour counted, the neighbour
bar read, hands of a clock swapped. It has the form of a right one, and its answer is larger about as often as smaller.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vlmrl.data.rows import Generated, is_in_split
from vlmrl.data.solutions import SEPARATOR, Solution, Wording, Wrong, pick_wrong, preference_columns
from vlmrl.datasets.text_preferences import Expression
from vlmrl.datasets.visual_math import COLOURS, Drawn, Scene, inventor

_KINDS = ("circle", "square", "triangle")
_LARGEST = 10**6
_NEAR = 2

Range = tuple[int, int]
"""Smallest and largest right answer that the family may have."""
Solved = tuple[Solution, list[Wrong], Range]


@dataclass(frozen=True, slots=True)
class _Preference:
    """A question with its responses. See `vlmrl.data.rows.GeneratedQuestion`."""

    drawn: Drawn
    columns: dict[str, Any]

    @property
    def key(self) -> str:
        return self.drawn.picture_key

    def row(self) -> dict[str, Any]:
        drawn = self.drawn
        row = {"input": drawn.scene.question, "images": [drawn.draw()], **self.columns}
        return row | {"family": drawn.family, "difficulty": drawn.difficulty}


def rows(
    *,
    split: str,
    seed: int,
    size: int = 10_000,
    families: tuple[str, ...] = ("count", "arithmetic", "chart", "rectangle", "clock"),
    difficulty: tuple[int, ...] = (1,),
    pixels: int = 336,
    kind: str = "pairs",
    worked: bool = False,
    boxed: bool = False,
    separator: str = SEPARATOR,
) -> Sequence[dict[str, Any]]:
    """Generate `size` rows, cycling through the families, with pictures of `pixels` per side.

    `kind` is `pairs`, `unpaired` or `steps`; see `vlmrl.data.solutions.preference_columns` for their columns. With
    `worked`, and always with `steps`, responses show their steps, joined by `separator`. `boxed` puts the final answer
    into `\\boxed{}`. Splits share no picture, and a question of `visual_math` is in the same split as there.

    Raises:
        ConfigError: an option is out of range.
    """
    wording = Wording(kind, worked or kind == "steps", boxed, separator)
    wording.check("visual_preferences")
    invent_question = inventor(
        "visual_preferences", families=families, difficulty=difficulty, pixels=pixels, boxed=boxed
    )

    def invent(rng: random.Random, row: int) -> _Preference:
        while True:
            drawn = invent_question(rng, row)
            if not is_in_split(drawn.key, split):
                continue
            right, wrongs, within = _SOLVE[drawn.family](drawn.scene, drawn.difficulty)
            assert right.answer == str(drawn.scene.answer), drawn.scene
            wrong = pick_wrong(rng, right, wrongs, within=within)
            if wrong is not None:
                return _Preference(drawn, preference_columns(rng, right, wrong, wording))

    return Generated(invent, size=size, split=split, seed=seed)


# Counting


def _solve_count(scene: Scene, difficulty: int) -> Solved:
    more = re.fullmatch(r"How many more (\w+)s than (\w+)s\?", scene.question)
    if more:
        counts = {kind: sum(shape == kind for _, shape, _ in scene.shown) for kind in _KINDS}
        return _compare_kinds(counts, more[1], more[2])
    num_rows = 3 + difficulty
    some = re.fullmatch(r"How many (?:(\w+) (\w+)s|shapes are not (\w+))\?", scene.question)
    colour, kind, excluded = some.groups() if some else (None, None, None)

    def counted(kind: str | None, colour: str | None, excluded: str | None) -> list[int]:
        """Number of shapes of a kind and colour in every row of the grid. None: any."""
        matching = [
            row
            for row, shape, name in scene.shown
            if kind in (None, shape) and colour in (None, name) and name != excluded
        ]
        return [matching.count(row) for row in range(num_rows)]

    right = counted(kind, colour, excluded)
    wrongs = [
        Wrong("off by one", _add_rows([*right[:row], right[row] + change, *right[row + 1 :]]))
        for row in range(num_rows)
        for change in (-1, 1)
        if 0 <= right[row] + change <= num_rows
    ]
    colours = list(COLOURS)[: 2 + difficulty]
    if excluded:
        wrongs += [Wrong("other colour", _add_rows(counted(None, None, other))) for other in colours]
    if colour:
        wrongs += [Wrong("other colour", _add_rows(counted(kind, other, None))) for other in colours]
        wrongs += [Wrong("other shape", _add_rows(counted(other, colour, None))) for other in _KINDS]
    # Other kinds are mostly fewer than the one that is asked for: far off, small counts would mostly be wrong.
    near = [wrong for wrong in wrongs if abs(wrong.solution.size - sum(right)) <= _NEAR]
    return _add_rows(right), near, {1: (1, 9), 2: (0, 7), 3: (0, num_rows**2)}[difficulty]


def _add_rows(counts: Sequence[int]) -> Solution:
    steps = [f"Row {row}: {count}" for row, count in enumerate(counts, start=1)]
    return Solution((*steps, _equation(counts, "+", sum(counts))), str(sum(counts)), sum(counts))


def _compare_kinds(counts: dict[str, int], many: str, few: str) -> Solved:
    def compare(first: tuple[str, int], second: tuple[str, int]) -> Solution:
        readings = [f"{kind}s: {count}" for kind, count in (first, second)]
        return _subtract(readings, first[1], second[1])

    def wrongs() -> Iterator[Wrong]:
        for change in (-1, 1):
            yield Wrong("off by one", compare((many, counts[many] + change), (few, counts[few])))
            yield Wrong("off by one", compare((many, counts[many]), (few, counts[few] + change)))
        (third,) = set(_KINDS) - {many, few}
        yield Wrong("other shape", compare((many, counts[third]), (few, counts[few])))
        yield Wrong("other shape", compare((many, counts[many]), (few, counts[third])))

    return compare((many, counts[many]), (few, counts[few])), list(wrongs()), (0, _LARGEST)


# Dice and digits


def _solve_arithmetic(scene: Scene, difficulty: int) -> Solved:
    del difficulty
    if scene.question != "What is the sum of the dice?":
        expression = Expression.parse(scene.shown[0])
        return _read(expression, expression), list(_misread(expression)), (0, _LARGEST)
    faces = scene.shown
    wrongs = [
        Wrong("misread die", _add_dice([*faces[:die], faces[die] + change, *faces[die + 1 :]]))
        for die in range(len(faces))
        for change in (-1, 1)
        if 1 <= faces[die] + change <= 6
    ]
    return _add_dice(faces), wrongs, (len(faces), 6 * len(faces))


def _add_dice(faces: Sequence[int]) -> Solution:
    steps = [f"Die {die}: {face}" for die, face in enumerate(faces, start=1)]
    return Solution((*steps, _equation(faces, "+", sum(faces))), str(sum(faces)), sum(faces))


def _read(shown: Expression, solved: Expression) -> Solution:
    solution = solved.solve()
    return solution._replace(steps=(f"The picture shows {shown.text}", *solution.steps))


def _misread(expression: Expression) -> Iterator[Wrong]:
    for misread in expression.misread():
        yield Wrong("misread number", _read(misread, misread))
    for error, solution in expression.mistakes():
        if error != "misread number":
            yield Wrong(error, solution._replace(steps=(f"The picture shows {expression.text}", *solution.steps)))


# Charts


def _solve_chart(scene: Scene, difficulty: int) -> Solved:
    values: tuple[int, ...] = scene.shown
    unit, top = (1, 10) if difficulty < 3 else (5, 50)
    highest, lowest = values.index(max(values)), values.index(min(values))
    asked = ["ABCDE".index(name) for name in re.findall(r"bar ([A-E])", scene.question)]
    if difficulty == 3:
        asked = list(range(len(values))) if "sum" in scene.question else [highest, lowest]

    def solve(heights: Sequence[int]) -> Solution:
        readings = [f"Bar {'ABCDE'[bar]}: {height}" for bar, height in zip(asked, heights, strict=True)]
        if len(heights) == 1:
            return Solution(tuple(readings), str(heights[0]), heights[0])
        if len(heights) == 2:
            return _subtract(readings, *heights)
        return Solution((*readings, _equation(heights, "+", sum(heights))), str(sum(heights)), sum(heights))

    heights = [values[bar] for bar in asked]

    def wrongs() -> Iterator[Wrong]:
        for place, bar in enumerate(asked):
            others = {("misread bar", heights[place] - unit), ("misread bar", heights[place] + unit)}
            neighbours = [other for other in (bar - 1, bar + 1) if 0 <= other < len(values)]
            others |= {("neighbour bar", values[other]) for other in neighbours if len(asked) < 3}
            for error, height in sorted(others):
                if unit <= height <= top:
                    yield Wrong(error, solve([*heights[:place], height, *heights[place + 1 :]]))

    largest = {1: top, 2: top - unit, 3: len(values) * top}[difficulty]
    return solve(heights), list(wrongs()), (0, largest)


# Rectangles


def _solve_rectangle(scene: Scene, difficulty: int) -> Solved:
    asks_area = "area" in scene.question
    sides: tuple[int, ...] = scene.shown
    top = {1: 9, 2: 25, 3: 20}[difficulty]

    def wrongs() -> Iterator[Wrong]:
        for i, side in enumerate(sides):
            for change in (-1, 1):
                if 2 <= side + change <= top:
                    yield Wrong("misread side", _measure([*sides[:i], side + change, *sides[i + 1 :]], asks_area))
        if len(sides) == 2:
            yield Wrong("area and perimeter swapped", _measure(sides, not asks_area))
        else:
            inner = (sides[0] - sides[2], sides[1] - sides[3])
            yield Wrong("inner side", _measure((inner[0], *sides[1:]), asks_area))
            yield Wrong("inner side", _measure((sides[0], inner[1], *sides[2:]), asks_area))
            if asks_area:
                yield Wrong("corner added", _measure(sides, asks_area, sign=1))

    return _measure(sides, asks_area), list(wrongs()), (1, _LARGEST)


def _measure(sides: Sequence[int], asks_area: bool, sign: int = -1) -> Solution:
    """Area or perimeter of a rectangle, or of an L shape: `sign` 1 adds the corner instead of cutting it out."""
    wide, high, *cut = sides
    steps = [f"Sides: {wide} and {high}"]
    value = wide * high if asks_area else 2 * (wide + high)
    steps.append(f"{wide} × {high} = {value}" if asks_area else f"2 × ({wide} + {high}) = {value}")
    if cut and asks_area:
        corner = cut[0] * cut[1]
        steps.append(f"{cut[0]} × {cut[1]} = {corner}")
        steps.append(f"{value} {'-' if sign < 0 else '+'} {corner} = {value + sign * corner}")
        value += sign * corner
    return Solution(tuple(steps), str(value), value)


# Clocks


def _solve_clock(scene: Scene, difficulty: int) -> Solved:
    hour, minute = scene.shown
    step = {1: 30, 2: 5, 3: 1}[difficulty]
    wrongs = [Wrong("other hour", _time((hour + change - 1) % 12 + 1, minute)) for change in (-1, 1)]
    wrongs += [Wrong("other minute", _time(hour, (minute + change) % 60)) for change in (-step, step)]
    if difficulty == 2:
        wrongs.append(Wrong("hands swapped", _time(minute // 5 or 12, hour % 12 * 5)))
    return _time(hour, minute), wrongs, (0, _LARGEST)


def _time(hour: int, minute: int) -> Solution:
    return Solution((f"Hour: {hour}", f"Minute: {minute:02d}"), f"{hour}:{minute:02d}", 60 * (hour % 12) + minute)


def _subtract(readings: Sequence[str], first: int, second: int) -> Solution:
    value = first - second
    return Solution((*readings, _equation((first, second), "-", value)), str(value), value)


def _equation(numbers: Sequence[int], symbol: str, value: int) -> str:
    return f"{f' {symbol} '.join(map(str, numbers))} = {value}"


_SOLVE: dict[str, Callable[[Scene, int], Solved]] = {
    "count": _solve_count,
    "arithmetic": _solve_arithmetic,
    "chart": _solve_chart,
    "rectangle": _solve_rectangle,
    "clock": _solve_clock,
}
