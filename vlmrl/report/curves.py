"""The metrics of a run as curves, thinned to what a screen can show."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np


class Curve(NamedTuple):
    """A metric over the steps in which it is a finite number, or over stretches of them."""

    steps: list[int]
    """Steps, or the middle one of each stretch."""
    values: list[float]
    """Values, or the mean of each stretch."""
    lows: list[float]
    """The smallest value of each stretch; empty for a curve of all steps."""
    highs: list[float]
    """The largest value of each stretch."""


def curves(records: Sequence[Mapping[str, Any]], *, max_points: int) -> dict[str, Curve]:
    """Return the curve of every metric. One of more than `max_points` steps is divided into half as many stretches.

    A stretch has its mean, which may be smoothed, and its smallest and largest value, so that no spike is lost. The
    first and the last step are stretches of their own.
    """
    columns: dict[str, tuple[list[int], list[float]]] = {}
    for record in records:
        step = record["step"]
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float) and math.isfinite(value):
                steps, values = columns.setdefault(name, ([], []))
                steps.append(step)
                values.append(float(value))
    return {name: _thinned(*columns[name], max_points=max_points) for name in sorted(columns)}


def _thinned(steps: list[int], values: list[float], *, max_points: int) -> Curve:
    if len(steps) <= max_points:
        return Curve(steps, _shortened(values), [], [])
    inner = np.linspace(1, len(steps) - 1, max(max_points // 2 - 1, 2)).astype(int)
    stretches = [(int(a), int(b)) for a, b in pairwise([0, *inner, len(steps)]) if b > a]
    array = np.asarray(values)
    columns = ([float(reduce(array[a:b])) for a, b in stretches] for reduce in (np.mean, np.min, np.max))
    return Curve([steps[(a + b - 1) // 2] for a, b in stretches], *map(_shortened, columns))


def _shortened(values: Iterable[float]) -> list[float]:
    return [shortened(value) for value in values]


def shortened(value: float) -> float:
    """Five significant digits: a screen shows no more."""
    short = float(f"{value:.5g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
