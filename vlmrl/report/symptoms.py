"""Warnings that matter: signs in the metrics of a run that it goes wrong, and what to look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from vlmrl.observe.metrics import logged_steps
from vlmrl.observe.registry import describe
from vlmrl.report.overview import series

Records = Sequence[Mapping[str, Any]]
_RECENT = 10
"""Steps whose mean is the present state of a metric."""


class Symptom(NamedTuple):
    """A sign that something goes wrong."""

    text: str
    advice: str
    metric: str
    """The curve to look at."""


def symptoms(records: Records) -> list[Symptom]:
    """Return the warnings of a run, each metric once: what the course of a metric says, then single values."""
    found = [symptom for check in _CHECKS if (symptom := check(records)) is not None]
    named = {symptom.metric for symptom in found}
    return found + [symptom for symptom in _suspicious(records) if symptom.metric not in named]


def _suspicious(records: Records) -> Iterator[Symptom]:
    """Metrics whose present value is beyond the bounds of the registry."""
    for name in sorted({name for record in records for name in record} - {"step"}):
        info, value = describe(name), _recent(records, name)
        if info is not None and value is not None and info.is_suspicious(value):
            yield Symptom(f"{name} is {value:.3g}.", info.warning.replace("`", ""), name)


def _recent(records: Records, name: str) -> float | None:
    points = series(records, name)[-1 if name.startswith("eval/") else -_RECENT :]
    return sum(value for _, value in points) / len(points) if points else None


def _first(records: Records, name: str) -> float | None:
    points = series(records, name)[:_RECENT]
    return sum(value for _, value in points) / len(points) if points else None


def _entropy(records: Records) -> Symptom | None:
    first, now = _first(records, "policy/entropy"), _recent(records, "policy/entropy")
    reward = [value for _, value in series(records, "reward/mean")]
    if not reward or first is None or now is None or not 0.0 <= now <= 0.1 * first or first <= 0.0:
        return None
    return Symptom(
        f"Entropy fell from {first:.2g} to {now:.2g}: responses to a prompt are nearly the same.",
        "a collapsed policy explores nothing: a higher actor.eps_clip_low_high, or actor.entropy_coef",
        "policy/entropy",
    )


def _length(records: Records) -> Symptom | None:
    first, now = _first(records, "response/tokens_mean"), _recent(records, "response/tokens_mean")
    if first is None or now is None or now < 3 * first or now < 32:
        return None
    return Symptom(
        f"Responses grew from {first:.0f} to {now:.0f} tokens.",
        "look whether the reward grew with them; reward.overlong_buffer_len penalises length",
        "response/tokens_mean",
    )


def _failed(records: Records) -> Symptom | None:
    total = sum(value for _, value in series(records, "reward/failed"))
    if not total:
        return None
    num_logged, num_steps = logged_steps(records)
    where = "" if num_logged == num_steps else f" in the {num_logged:,} logged steps of {num_steps:,}"
    return Symptom(
        f"{int(total):,} responses could not be scored{where}.",
        "the filter `failed` of the rollouts shows why",
        "reward/failed",
    )


def _missing(records: Records) -> Symptom | None:
    """Metrics that are no number: NaN and infinity are null in the file."""
    names = sorted({name for record in records[-_RECENT:] for name, value in record.items() if value is None})
    if not names:
        return None
    return Symptom(
        f"Not a number in the last steps: {', '.join(names[:5])}.", "look at the step where it began", names[0]
    )


_CHECKS: tuple[Callable[[Records], Symptom | None], ...] = (_missing, _failed, _entropy, _length)
