"""Generated videos: the label follows from the frames together, and from none alone."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from vlmrl.data.rows import load_rows
from vlmrl.datasets.visual_motion import COLOURS, move, rows
from vlmrl.errors import ConfigError


def clip(index: int, **options: Any) -> Any:
    return rows(split="train", seed=0, **({"pixels": 64} | options)).rows[index]


def centre(frame: Any) -> tuple[float, float]:
    """Mean (x, y) of the pixels of the dot."""
    pixels = np.asarray(frame).astype(int)
    ys, xs = np.nonzero(np.abs(pixels - np.median(pixels, axis=(0, 1))).sum(axis=2) > 60)
    return float(xs.mean()), float(ys.mean())


@pytest.mark.parametrize("index", range(12))
def test_the_dot_moves_as_the_label_says(index: int) -> None:
    row = clip(index, families=("move",))
    frames = row["videos"][0]["video"]
    centres = np.array([centre(frame) for frame in frames])
    steps = np.diff(centres, axis=0)
    # Where it leaves on one side, it comes back on the other.
    x, y = np.where(np.abs(steps) > 32, -np.sign(steps), np.sign(steps.round(1))).sum(axis=0)
    name = ("right" if x > 0 else "left") if abs(x) > abs(y) else ("down" if y > 0 else "up")
    assert row["label"] == row["answer"] == name


@pytest.mark.parametrize("index", range(8))
def test_stripes_drift_as_the_label_says(index: int) -> None:
    row = clip(index, families=("drift",), frames=4)
    frames = np.stack([np.asarray(frame).astype(int) for frame in row["videos"][0]["video"]])
    assert np.abs(frames - frames[:, :1]).max() == 0, "stripes are vertical"
    # A quarter of the distance of 32 pixels, around the corner.
    shift = {"left": -8, "right": 8}[row["label"]]
    for before, after in zip(frames[:-1, 0], frames[1:, 0], strict=True):
        assert (
            np.abs(np.roll(before, shift, axis=0) - after).mean()
            < np.abs(np.roll(before, -shift, axis=0) - after).mean() / 4
        )


@pytest.mark.parametrize("number", range(4))
def test_no_single_frame_tells_where_the_dot_goes(number: int) -> None:
    rng = random.Random(0)
    seen: Counter[tuple[int, int, str]] = Counter()
    for _ in range(16_000):
        _, answer, dots = move(rng, 4)
        seen[dots[number].x, dots[number].y, answer] += 1
    # 64 places in each of four directions: 62 or 63 each, with a standard deviation of 8.
    assert len(seen) == 4 * 64
    assert min(seen.values()) > 30


@pytest.mark.parametrize("index", range(6))
def test_colours_come_in_the_order_of_the_label(index: int) -> None:
    row = clip(index, families=("order",), frames=6)
    seen = ""
    for frame in row["videos"][0]["video"][::2]:
        pixels = np.asarray(frame).reshape(-1, 3).astype(int)
        shown = pixels[np.abs(pixels - np.median(pixels, axis=0)).sum(axis=1) > 60]
        core = np.median(shown, axis=0)
        seen += min(COLOURS, key=lambda name: np.abs(np.array(COLOURS[name]) - core).sum())[0]
    assert seen == row["label"]
    assert len(set(seen)) == 3


def test_a_video_may_be_an_mp4_file() -> None:
    (video,) = clip(0, encoded=True)["videos"]
    assert video["video"][4:8] == b"ftyp"


def test_splits_share_no_video() -> None:
    keys = {split: {rows(split=split, seed=0).rows.question_key(i) for i in range(200)} for split in ("train", "test")}
    assert not keys["train"] & keys["test"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("frames=3", "choose 2, 4, 6 or 8"),
        ("families=x", "choose among"),
        ("pixels=9", "even"),
        ("frames=2&families=move+order", "two frames show one colour"),
    ],
)
def test_bad_options_are_refused(option: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_rows(f"visual_motion?{option}", split="train", max_samples=10, seed=0)
