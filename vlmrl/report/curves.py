"""The metrics of a run as curves, thinned to what a screen can show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Curve(NamedTuple):
    """A metric over the steps in which it is a finite number."""

    steps: list[int]
    values: list[float]


def curves(records: Sequence[Mapping[str, Any]], *, max_points: int) -> dict[str, Curve]:
    """Return the curve of every metric, thinned to about `max_points`.

    Thinning keeps the smallest and the largest value of each stretch of steps, and both ends: no spike is lost.
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
    if len(steps) > max_points:
        kept = _kept(np.asarray(values), max_points=max_points)
        steps, values = [steps[i] for i in kept], [values[i] for i in kept]
    return Curve(steps, [shortened(value) for value in values])


def _kept(values: NDArray[np.float64], *, max_points: int) -> list[int]:
    """Indices of the minimum and maximum of each of `max_points / 2` stretches, and of both ends, in order."""
    edges = np.linspace(0, len(values), max(max_points // 2, 1) + 1).astype(int)
    kept = {0, len(values) - 1}
    for start, end in pairwise(edges):
        if end > start:
            kept |= {int(start + values[start:end].argmin()), int(start + values[start:end].argmax())}
    return sorted(kept)


def shortened(value: float) -> float:
    """Five significant digits: a screen shows no more."""
    short = float(f"{value:.5g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
