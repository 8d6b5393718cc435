"""Metrics that can be merged over ranks, micro-batches and steps, and the form of their names.

The code that computes a metric returns it; README.md lists them all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vlmrl.types import Metrics

_NAME = re.compile(r"[a-z][a-z0-9_]*(/[A-Za-z0-9_.@+:-]+)+")
_PASS_RATE = re.compile(r"eval/(.+)/pass@1")
_ACCURACY = re.compile(r"eval/(.+)/accuracy")


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean as sum and count, so that parts of unequal size merge to the mean of the whole.

    Example: Mean(6.0, 2) and Mean(1.0, 1) merge to 7 / 3, not to the mean of 3 and 1.
    """

    total: float
    """Sum of the values."""
    count: float = 1.0
    """Number of values, or their total weight."""

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"a mean over {self.count} values: the count cannot be negative")

    @property
    def value(self) -> float | None:
        """The mean; None over no values, where 0 would be wrong."""
        return self.total / self.count if self.count else None

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)


@dataclass(frozen=True, slots=True)
class Sum:
    """A count or an amount; parts add up."""

    value: float

    def merge(self, other: Sum) -> Sum:
        return Sum(self.value + other.value)


@dataclass(frozen=True, slots=True)
class Max:
    """A maximum. NaN counts as larger than any number, so that it stays visible."""

    value: float

    def merge(self, other: Max) -> Max:
        return self if math.isnan(self.value) or self.value >= other.value else other


@dataclass(frozen=True, slots=True)
class SampleSize:
    """The effective sample size of n weights, `(sum w)^2 / sum w^2`, as a fraction of n: 1 if all are equal."""

    total: float
    squares: float
    count: float

    @property
    def value(self) -> float | None:
        """None without any weight above 0."""
        return self.total**2 / (self.squares * self.count) if self.squares and self.count else None

    def merge(self, other: SampleSize) -> SampleSize:
        return SampleSize(self.total + other.total, self.squares + other.squares, self.count + other.count)


Metric = Mean | Sum | Max | SampleSize


def merge(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge the metrics of several ranks or micro-batches; a name may be missing from some of them.

    Raises:
        ValueError: a name is not of the form `area/quantity`, or has different types in two parts.
    """
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = _merge_two(name, merged[name], metric) if name in merged else _checked(name, metric)
    return merged


def reduce(parts: Iterable[Mapping[str, Metric]]) -> Metrics:
    """Merge metrics and return their values. A mean over no values is left out."""
    values = {name: metric.value for name, metric in merge(parts).items()}
    return {name: float(value) for name, value in values.items() if value is not None}


def check_name(name: str) -> None:
    """Raise ValueError unless `name` has the form `area/quantity`, such as `time/rollout_s` or `eval/math/pass@1`."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"metric name {name!r} is not of the form area/quantity")


def evaluated_sets(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the evaluation sets with a pass@1 in `names`, and the parts that each is broken down into.

    Example: eval/toy/pass@1 and eval/toy/count/pass@1 are {"toy": ["count"]}.
    """
    sets: dict[str, list[str]] = {}
    # Sorted, so that a set comes before its parts.
    for path in sorted(match[1] for name in names if (match := _PASS_RATE.fullmatch(name))):
        owner, _, part = path.rpartition("/")
        if owner in sets:
            sets[owner].append(part)
        else:
            sets[path] = []
    return sets


def accuracies(names: Iterable[str]) -> dict[str, str]:
    """Return the evaluation sets with an accuracy in `names`, and the name of its metric.

    Example: eval/toy/accuracy is {"toy": "eval/toy/accuracy"}.
    """
    return {match[1]: name for name in sorted(names) if (match := _ACCURACY.fullmatch(name))}


def logged_steps(records: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """Return the number of steps that have a record, and of all steps: `logger.logging_steps` leaves out some."""
    steps = {record["step"] for record in records if record["step"] > 0}
    return len(steps), max(steps, default=0)


def _checked(name: str, metric: Metric) -> Metric:
    check_name(name)
    return metric


def _merge_two(name: str, first: Metric, second: Metric) -> Metric:
    match first, second:
        case Mean(), Mean():
            return first.merge(second)
        case Sum(), Sum():
            return first.merge(second)
        case Max(), Max():
            return first.merge(second)
        case SampleSize(), SampleSize():
            return first.merge(second)
    raise ValueError(f"metric {name} is a {type(first).__name__} in one place and a {type(second).__name__} in another")
