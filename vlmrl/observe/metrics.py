"""A number that knows how to be joined with the same number from other ranks, micro-batches and steps."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vlmrl.types import Metrics

_NAME = re.compile(r"[a-z][a-z0-9_]*(/[A-Za-z0-9_.@+:-]+)+")
_PASS_RATE = re.compile(r"eval/(.+)/pass@1")


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean as what it is made of, so that shares of unequal size join to the mean of the whole.

    Example: Mean(6.0, 2) of one rank and Mean(1.0, 1) of another are 7 / 3, not the mean of 3 and 1.
    """

    total: float
    """Sum of the values."""
    count: float = 1.0
    """How many values, or their weight."""

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"a mean over {self.count} values: the count cannot be negative")

    @property
    def value(self) -> float | None:
        """None when nothing was counted: there is no such mean, and 0 would be a lie."""
        return self.total / self.count if self.count else None

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)


@dataclass(frozen=True, slots=True)
class Sum:
    """A count or an amount: shares add up."""

    value: float

    def merge(self, other: Sum) -> Sum:
        return Sum(self.value + other.value)


@dataclass(frozen=True, slots=True)
class Max:
    """A worst case. NaN is worse than any number, so it stays visible."""

    value: float

    def merge(self, other: Max) -> Max:
        return self if math.isnan(self.value) or self.value >= other.value else other


Metric = Mean | Sum | Max


def merge(shares: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Join the metrics of several ranks or micro-batches; a name may be missing from some of them.

    Raises ValueError when a name does not look like `area/quantity`, or is a Mean in one share and a Sum in another.
    """
    merged: dict[str, Metric] = {}
    for share in shares:
        for name, metric in share.items():
            merged[name] = _join(name, merged[name], metric) if name in merged else _checked(name, metric)
    return merged


def reduce(shares: Iterable[Mapping[str, Metric]]) -> Metrics:
    """`merge`, then the plain numbers. A mean over nothing is left out."""
    values = {name: metric.value for name, metric in merge(shares).items()}
    return {name: float(value) for name, value in values.items() if value is not None}


def check_name(name: str) -> None:
    """Raise ValueError unless `name` looks like `area/quantity`, such as `time/rollout_s` or `eval/math/pass@1`."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"metric name {name!r} does not look like area/quantity")


def evaluated_sets(names: Iterable[str]) -> dict[str, list[str]]:
    """The evaluation sets with a pass@1 among the names, and the parts that each is broken down into.

    Example: eval/toy/pass@1 and eval/toy/count/pass@1 are {"toy": ["count"]}.
    """
    sets: dict[str, list[str]] = {}
    # A set comes before its parts.
    for path in sorted(found[1] for name in names if (found := _PASS_RATE.fullmatch(name))):
        owner, _, part = path.rpartition("/")
        if owner in sets:
            sets[owner].append(part)
        else:
            sets[path] = []
    return sets


def _checked(name: str, metric: Metric) -> Metric:
    check_name(name)
    return metric


def _join(name: str, one: Metric, other: Metric) -> Metric:
    match one, other:
        case Mean(), Mean():
            return one.merge(other)
        case Sum(), Sum():
            return one.merge(other)
        case Max(), Max():
            return one.merge(other)
    raise ValueError(f"metric {name} is a {type(one).__name__} in one place and a {type(other).__name__} in another")
