"""What a reader should see first: where a run stands, whether it learnt, whether its checks hold, what is wrong."""

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
    """A figure before and now."""

    title: str
    metric: str
    before: float
    now: float
    before_label: str
    now_label: str
    better: Literal["higher", "lower"]
    is_fraction: bool
    is_held_out: bool


class Check(NamedTuple):
    """A plain statement on a check of the run, with its worst figure."""

    state: Literal["ok", "bad", "unknown"]
    text: str
    figure: str = ""


def headlines(run: Run) -> list[Headline]:
    """The figures that say whether the run learns, the most important first."""
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
    labels = [f"after step {first_step}" if first_step else "before training", f"after step {last_step}"]
    is_fraction = better == "higher"
    return [Headline(title, metric, first, last, labels[0], labels[1], better, is_fraction, is_held_out=True)]


def _trained(records: Records, metric: str, title: str, better: Literal["higher", "lower"]) -> list[Headline]:
    """Before and now as means over a few steps: a single step is noise."""
    points = series(records, metric)
    if not points:
        return []
    width = max(min(_RECENT, len(points) // 4), 1)
    first, last = points[:width], points[-width:]
    values = [value for _, value in points]
    is_fraction = metric == "reward/mean" and all(0.0 <= value <= 1.0 for value in values)
    return [
        Headline(
            title, metric, _mean(first), _mean(last), _span(first), _span(last), better, is_fraction, is_held_out=False
        )
    ]


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


def checks(run: Run) -> list[Check]:
    """Statements on what the run verified: engine = trainer, images, adapters, weight syncs."""
    found = [*_agreement(run.records), *_images(run.records), *_adapters(run.records), *_syncs(run.records)]
    if run.verb == "rl" and not found:
        found.append(Check("unknown", "No check has run yet: the first step is not finished."))
    return found


def _agreement(records: Records) -> list[Check]:
    points = series(records, "sync/logprob_diff_max")
    if not points:
        return []
    step, worst = max(points, key=lambda point: point[1])
    means = [value for _, value in series(records, "sync/logprob_diff_mean")]
    mean = f", on average {_number(max(means))} at most" if means else ""
    text = f"Engine and trainer compute the same log-probs, compared on the sampled tokens of {len(points):,} steps."
    found = [Check("ok", text, f"largest difference {_number(worst)} (step {step}){mean}")]
    ratios = _worst_noise(records)
    if ratios is not None and ratios > 5:
        found.append(Check("bad", "Engine and trainer differ by more than rounding.", f"{ratios:.1f} times the noise"))
    return found


def _worst_noise(records: Records) -> float | None:
    """The largest gap as a multiple of the noise that was measured last before it."""
    worst, level = None, None
    for record in records:
        level = record.get("verify/noise/level") or level
        gap = record.get("verify/noise/gap")
        if level and gap is not None:
            worst = max(worst or 0.0, gap / level)
    return worst


def _images(records: Records) -> list[Check]:
    effects = {
        name: points[0][1]
        for name in sorted({name for record in records for name in record})
        if name.startswith("verify/images/") and name.endswith("_effect") and (points := series(records, name))
    }
    if not effects:
        return []
    name, least = min(effects.items(), key=lambda item: item[1])
    path = name.removeprefix("verify/images/").removesuffix("_effect").replace("_", " ")
    figure = f"other images change outputs by {_number(least)} at least ({path}), of {len(effects)} paths"
    return [Check("ok", "All models see the images: other images give other outputs.", figure)]


def _adapters(records: Records) -> list[Check]:
    gaps = series(records, "verify/adapters/gap")
    if not gaps:
        return []
    step, worst = max(gaps, key=lambda point: point[1])
    effects = series(records, "verify/adapters/effect")
    effect = f", effect of the adapter {_number(effects[-1][1])}" if effects else ""
    text = f"The engines use the trained adapter, checked after {len(gaps):,} syncs."
    return [Check("ok", text, f"largest gap {_number(worst)} (step {step}){effect}")]


def _syncs(records: Records) -> list[Check]:
    layers = series(records, "sync/readback_layers")
    if not layers:
        return []
    unread = max((value for _, value in series(records, "sync/readback_unread")), default=0.0)
    figure = f"{int(sum(value for _, value in layers)):,} layers read back, {int(unread)} could not be"
    text = f"The engines hold the weights that were sent, read back after {len(layers):,} syncs."
    found = [Check("ok", text, figure)]
    restarts = series(records, "cluster/engine_restarts")
    if restarts and restarts[-1][1]:
        found.append(Check("bad", "Engines died and were started again.", f"{int(restarts[-1][1])} times"))
    return found


def phases(records: Records) -> list[tuple[str, float]]:
    """Seconds of each phase over the whole run, the longest first; `other` is the rest of the steps."""
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


def _number(value: float) -> str:
    return f"{value:.2g}"
