"""Generated videos: the label follows from the frames together, and from none alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vlmrl.data.rows import load_rows
from vlmrl.datasets.visual_motion import COLOURS, rows
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
    (x, y), (end_x, end_y) = centre(frames[0]), centre(frames[-1])
    name = ("right" if end_x > x else "left") if abs(end_x - x) > abs(end_y - y) else ("down" if end_y > y else "up")
    assert row["label"] == row["answer"] == name


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
