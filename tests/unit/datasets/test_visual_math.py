import random
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vlmrl.data.rows import load_rows
from vlmrl.datasets.visual_math import COLOURS, FAMILIES
from vlmrl.errors import ConfigError


def rows(options: str, split: str = "train", seed: int = 0) -> Any:
    return load_rows(f"visual_math?{options}", split=split, max_samples=10**9, seed=seed)


def nearest_colour(pixel: Any) -> str | None:
    """The name of a pixel's colour, None for paper and smoothed edges."""
    distances = {name: max(abs(int(a) - b) for a, b in zip(pixel, rgb, strict=True)) for name, rgb in COLOURS.items()}
    name = min(distances, key=distances.__getitem__)
    return name if distances[name] < 10 else None


def test_circles_on_a_four_by_four_grid_are_counted_exactly() -> None:
    for row in rows("families=count&difficulty=1&size=60&pixels=112"):
        image = row["images"][0]
        assert image.size == (112, 112)
        centres = [round(112 * (0.03 + (i + 0.5) * 0.94 / 4)) for i in range(4)]
        seen = Counter(nearest_colour(image.getpixel((x, y))) for x in centres for y in centres)
        assert row["input"] == "How many circles?"
        assert row["label"] == str(seen.total() - seen[None])
        assert 1 <= int(row["label"]) <= 9


def test_shapes_of_one_colour_are_counted_exactly() -> None:
    rng = random.Random(3)
    for _ in range(100):
        scene = FAMILIES["count"](rng, 2)
        things = re.findall(r"\('(\w+)', '(\w+)'\)", scene.content)
        colour, kind = re.fullmatch(r"How many (\w+) (\w+)s\?", scene.question).groups()  # type: ignore[union-attr]
        assert scene.answer == things.count((kind, colour))


def test_bars_are_drawn_to_scale() -> None:
    for row in rows("families=chart&difficulty=1&size=20&pixels=400"):
        column = "ABC".index(re.search(r"bar (\w)", row["input"])[1])  # type: ignore[index]
        x = round(400 * (0.16 + (column + 0.5) * 0.27))
        colours = [nearest_colour(row["images"][0].getpixel((x, y))) for y in range(round(400 * 0.855))]
        height = sum(colour is not None for colour in colours) / 400
        assert round(height / 0.78 * 10) == int(row["label"])


def test_dice_show_the_dots_of_their_sum() -> None:
    for row in rows("families=arithmetic&difficulty=1&size=20&pixels=400"):
        dark = np.asarray(row["images"][0]).max(axis=2) < 146
        # One dot's area, from its radius of 0.034.
        assert round(dark.sum() / (np.pi * (0.034 * 400) ** 2)) == int(row["label"])


@pytest.mark.parametrize("difficulty", [1, 2, 3])
def test_labels_follow_from_the_picture(difficulty: int) -> None:
    rng = random.Random(0)
    for _ in range(200):
        scene = FAMILIES["rectangle"](rng, difficulty)
        sides = list(map(int, re.findall(r"\d+", scene.content)))
        area = sides[0] * sides[1] - (sides[2] * sides[3] if difficulty == 3 else 0)
        assert scene.answer == (area if "area" in scene.question else 2 * (sides[0] + sides[1]))

        clock = FAMILIES["clock"](rng, difficulty)
        hour, minute = map(int, str(clock.answer).split(":"))
        assert 1 <= hour <= 12
        assert minute % {1: 30, 2: 5, 3: 1}[difficulty] == 0
        assert clock.content.startswith(str(clock.answer))

        chart = FAMILIES["chart"](rng, difficulty)
        values = list(map(int, re.findall(r"\d+", chart.content)))
        bars = dict(zip("ABCDE", values, strict=False))
        asked = [bars[name] for name in re.findall(r"bar ([A-E])", chart.question)]
        if difficulty == 3:
            expected = sum(values) if "sum" in chart.question else max(values) - min(values)
        else:
            expected = asked[0] - (asked[1] if difficulty == 2 else 0)
        assert chart.answer == expected


def test_written_expressions_have_their_value() -> None:
    rng = random.Random(1)
    texts = []
    for _ in range(300):
        scene = FAMILIES["arithmetic"](rng, rng.choice([2, 3]))
        if scene.question == "What is the result?":
            left, sign, right, factor = re.match(r"\(?(\d+) ([+-]) (\d+)\)?(?: × (\d))?", scene.content).groups()  # type: ignore[union-attr]
            texts.append(sign)
            value = int(left) + int(right) * (1 if sign == "+" else -1)
            # `factor` belongs to the expression only after brackets.
            assert scene.answer == value * (int(factor) if factor and scene.content.startswith("(") else 1)
    assert set(texts) == {"+", "-"}


def test_comparisons_of_shapes_are_exact() -> None:
    rng = random.Random(2)
    kinds = set()
    for _ in range(300):
        scene = FAMILIES["count"](rng, 3)
        things = re.findall(r"\('(\w+)', '(\w+)'\)", scene.content)
        if match := re.fullmatch(r"How many shapes are not (\w+)\?", scene.question):
            assert scene.answer == sum(colour != match[1] for _, colour in things)
        else:
            many, few = re.fullmatch(r"How many more (\w+)s than (\w+)s\?", scene.question).groups()  # type: ignore[union-attr]
            counts = Counter(kind for kind, _ in things)
            assert scene.answer == counts[many] - counts[few] >= 0
        kinds.add(scene.question[:13])
    assert len(kinds) == 2


def test_rows_depend_only_on_seed_split_and_row() -> None:
    first, again = rows("size=10&pixels=56"), rows("size=30&pixels=56")
    for i in (7, 0, 3):
        a, b = first[i], again[i]
        assert np.array_equal(np.asarray(a.pop("images")[0]), np.asarray(b.pop("images")[0]))
        assert a == b
    assert [r["label"] for r in rows("size=20&pixels=56", seed=1)] != [r["label"] for r in again[:20]]


@pytest.mark.parametrize("family", list(FAMILIES))
def test_no_pair_of_picture_and_question_is_in_two_splits(family: str) -> None:
    seen = {
        split: {
            (row["input"], row["images"][0].tobytes()) for row in rows(f"families={family}&size=150&pixels=56", split)
        }
        for split in ("train", "test")
    }
    assert len(seen["train"]) > 50
    assert not seen["train"] & seen["test"]


def test_families_and_difficulties_alternate() -> None:
    counts = Counter((row["family"], row["difficulty"]) for row in rows("size=60&difficulty=1+3&pixels=56"))
    assert set(counts) == {(family, level) for family in FAMILIES for level in (1, 3)}
    assert set(counts.values()) == {6}


def test_pictures_have_the_requested_size_and_are_not_blank() -> None:
    for pixels in (56, 112, 336):
        for row in rows(f"size=15&difficulty=1+2+3&pixels={pixels}"):
            image = row["images"][0]
            assert isinstance(image, Image.Image)
            assert (image.mode, image.size) == ("RGB", (pixels, pixels))
            assert len(image.getcolors(pixels * pixels)) > 2


@pytest.mark.parametrize("options", ["families=count+algebra", "difficulty=4", "difficulty=0", "pixels=20"])
def test_options_out_of_range(options: str) -> None:
    with pytest.raises(ConfigError, match=r"visual_math\?"):
        rows(options)
