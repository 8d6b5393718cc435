"""Warnings that matter: signs in the metrics of a run that it goes wrong, and what to look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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
    """Return the warnings of a run."""
    found = [check(records) for check in _CHECKS]
    return [symptom for symptom in found if symptom is not None]


def _recent(records: Records, name: str) -> float | None:
    points = series(records, name)[-_RECENT:]
    return sum(value for _, value in points) / len(points) if points else None


def _first(records: Records, name: str) -> float | None:
    points = series(records, name)[:_RECENT]
    return sum(value for _, value in points) / len(points) if points else None


def _entropy(records: Records) -> Symptom | None:
    first, now = _first(records, "policy/entropy"), _recent(records, "policy/entropy")
    reward = [value for _, value in series(records, "reward/mean")]
    if not reward or first is None or now is None or now > 0.1 * first:
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


def _constant(records: Records) -> Symptom | None:
    now = _recent(records, "group/constant_fraction")
    if now is None or now < 0.7:
        return None
    return Symptom(
        f"{now:.0%} of the groups have equal rewards: there is little to learn from.",
        "prompts are too easy or too hard: other data, more responses per prompt, or algo.dynamic_filtering_enable",
        "group/constant_fraction",
    )


def _truncated(records: Records) -> Symptom | None:
    now = _recent(records, "response/truncated_fraction")
    if now is None or now < 0.25:
        return None
    return Symptom(
        f"{now:.0%} of the responses are cut off.", "raise rollout.max_new_tokens", "response/truncated_fraction"
    )


def _failed(records: Records) -> Symptom | None:
    total = sum(value for _, value in series(records, "reward/failed"))
    if not total:
        return None
    return Symptom(
        f"{int(total):,} responses could not be scored.",
        "the filter `failed` of the rollouts shows why",
        "reward/failed",
    )


def _dropped(records: Records) -> Symptom | None:
    points = series(records, "data/rows_dropped")
    if not points or not points[-1][1]:
        return None
    return Symptom(
        f"{int(points[-1][1]):,} rows of the data could not be used.", "logs/run.log names them", "data/rows_dropped"
    )


def _kl(records: Records) -> Symptom | None:
    now = _recent(records, "policy/kl_old")
    if now is None or now < 0.2:
        return None
    return Symptom(
        f"The policy moves far in a step: KL to the policy that sampled is {now:.2g}.",
        "a lower actor.adam.lr, or algo.kl.early_stop",
        "policy/kl_old",
    )


def _episodes(records: Records) -> Symptom | None:
    now = _recent(records, "agent/failed")
    if not now:
        return None
    return Symptom(f"{now:.1f} episodes of a step fail.", "logs/agents.log has their errors", "agent/failed")


def _missing(records: Records) -> Symptom | None:
    """Metrics that are no number: NaN and infinity are null in the file."""
    names = sorted({name for record in records[-_RECENT:] for name, value in record.items() if value is None})
    if not names:
        return None
    return Symptom(
        f"Not a number in the last steps: {', '.join(names[:5])}.", "look at the step where it began", names[0]
    )


_CHECKS: tuple[Callable[[Records], Symptom | None], ...] = (
    *(_missing, _failed, _episodes, _entropy, _length, _truncated, _constant, _kl, _dropped),
)
