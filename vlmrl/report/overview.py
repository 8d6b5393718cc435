"""What a reader should see first: where a run stands, whether it learnt, and where its time went."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from vlmrl.observe.metrics import accuracies, evaluated_sets
from vlmrl.report.run import Run

Records = Sequence[Mapping[str, Any]]
_RECENT = 10
"""Steps over which the state of a noisy metric is averaged: the first ones for before, the last ones for now."""


class Headline(NamedTuple):
    """A figure before and now, or now alone."""

    title: str
    metric: str
    before: float | None
    """None: it was measured once."""
    now: float
    before_label: str
    now_label: str
    better: Literal["higher", "lower"]
    is_fraction: bool
    is_held_out: bool


def headlines(run: Run) -> list[Headline]:
    """The figures that say whether the run learns, the most important first.

    A run that does not train has them once, and without a step: its steps are batches, whose order means nothing.
    """
    found = _headlines(run)
    if run.trains:
        return found
    over_all = series(run.records, "generate/reward")
    if over_all:
        _, reward = over_all[-1]
        found = [head._replace(now=reward) if head.metric == "reward/mean" else head for head in found]
    return [head._replace(before=None, before_label="", now_label="") for head in found]


def _headlines(run: Run) -> list[Headline]:
    names = {name for record in run.records for name in record}
    found: list[Headline] = []
    for name, parts in evaluated_sets(names).items():
        found += _evaluated(run.records, f"eval/{name}/pass@1", f"Right answers, {name}", "higher")
        ks = sorted(
            (n for n in names if n.startswith(f"eval/{name}/pass@") and n != f"eval/{name}/pass@1"), key=_k_of_name
        )
        if ks and not parts:
            found += _evaluated(run.records, ks[-1], f"Right in {_k_of_name(ks[-1])} tries, {name}", "higher")
    for name, metric in accuracies(names).items():
        found += _evaluated(run.records, metric, f"Accuracy, {name}", "higher")
    found += _trained(run.records, "reward/mean", "Reward", "higher")
    if not any(headline.metric == "reward/mean" for headline in found):
        for metric, title in _LOSSES.items():
            found += _trained(run.records, metric, title, "lower")
    for name in sorted(names):
        if name.startswith("eval/") and name.endswith("/loss"):
            title = f"Loss on held-out rows, {name.removeprefix('eval/').removesuffix('/loss')}"
            found += _evaluated(run.records, name, title, "lower")
    return found


_LOSSES = {"distill/kl": "KL to the teacher", "policy/loss": "Training loss", "rm/loss": "Training loss"}


def _k_of_name(name: str) -> int:
    last = name.rpartition("@")[2]
    return int(last) if last.isdigit() else 0


def _evaluated(records: Records, metric: str, title: str, better: Literal["higher", "lower"]) -> list[Headline]:
    points = series(records, metric)
    if not points:
        return []
    (first_step, first), (last_step, last) = points[0], points[-1]
    if first_step == last_step:
        labels, before = ("", _after(last_step)), None
    else:
        labels, before = (_after(first_step), _after(last_step)), first
    is_fraction = better == "higher"
    return [Headline(title, metric, before, last, *labels, better, is_fraction, is_held_out=True)]


def _after(step: int) -> str:
    return f"after step {step}" if step else "before training"


def _trained(records: Records, metric: str, title: str, better: Literal["higher", "lower"]) -> list[Headline]:
    """Before and now as means over a few steps: a single step is noise."""
    points = series(records, metric)
    if not points:
        return []
    width = max(min(_RECENT, len(points) // 4), 1)
    first, last = points[:width], points[-width:]
    values = [value for _, value in points]
    is_fraction = metric == "reward/mean" and all(0.0 <= value <= 1.0 for value in values)
    before, before_label = (_mean(first), _span(first)) if len(points) > 1 else (None, "")
    now, now_label = _mean(last), _span(last)
    return [Headline(title, metric, before, now, before_label, now_label, better, is_fraction, is_held_out=False)]


def _mean(points: Sequence[tuple[int, float]]) -> float:
    return sum(value for _, value in points) / len(points)


def _span(points: Sequence[tuple[int, float]]) -> str:
    first, last = points[0][0], points[-1][0]
    return f"step {first}" if first == last else f"steps {first} to {last}"


def series(records: Records, name: str) -> list[tuple[int, float]]:
    """(step, value) of the records in which the metric is a finite number."""
    return [
        (r["step"], float(r[name])) for r in records if isinstance(r.get(name), int | float) and math.isfinite(r[name])
    ]


def phases(records: Records) -> list[tuple[str, float]]:
    """Seconds of each phase over all logged steps, the longest first; `other` is the rest of the steps."""
    sums: dict[str, float] = {}
    total = 0.0
    for record in records:
        total += record.get("time/step_s") or 0.0
        for name, value in record.items():
            if name.startswith("time/") and name.count("/") == 1 and name not in ("time/step_s", "time/env_s"):
                sums[name] = sums.get(name, 0.0) + (value or 0.0)
    rows = [(name.removeprefix("time/").removesuffix("_s"), seconds) for name, seconds in sums.items()]
    rows.append(("other", max(total - sum(sums.values()), 0.0)))
    return sorted(((name, seconds) for name, seconds in rows if seconds > 0.0), key=lambda row: -row[1])


def tokens_per_s(records: Records) -> float | None:
    """Tokens of all samples per second of the steps; None for a run that does not count them."""
    known = [(r["batch/tokens"], r["time/step_s"]) for r in records if r.get("batch/tokens") and r.get("time/step_s")]
    return sum(tokens for tokens, _ in known) / sum(seconds for _, seconds in known) if known else None
