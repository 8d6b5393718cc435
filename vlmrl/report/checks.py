"""Statements on what a run verified: engine = trainer, images, adapters, weight syncs. Figures decide their state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from vlmrl.report.overview import series
from vlmrl.report.run import Run

Records = Sequence[Mapping[str, Any]]
_ROUNDING = 1e-6
"""A path that ignores the images returns the same values twice, up to rounding in fp32 (`vlmrl.verify.images`)."""


class Check(NamedTuple):
    """A plain statement on a check of the run, with its worst figure."""

    state: Literal["ok", "bad", "unknown"]
    text: str
    figure: str = ""


def checks(run: Run) -> list[Check]:
    """Return a statement for each check that the run made."""
    limit, records = run.logprob_diff_limit, run.records
    found = [*_agreement(records, limit), *_images(records), *_adapters(records, limit), *_syncs(records)]
    if run.verb == "rl" and not found:
        found.append(Check("unknown", "No check has run yet: the first step is not finished."))
    return found


def _agreement(records: Records, limit: float) -> list[Check]:
    points = series(records, "sync/logprob_diff_max")
    means = series(records, "sync/logprob_diff_mean")
    if not points and not _is_lost(records, "sync/logprob_diff_mean"):
        return []
    compared = f"compared on the sampled tokens of {_count(points, 'step')}"
    parts = [_worst("largest difference", points)] if points else []
    parts += [_worst("largest mean of a step", means)] if means else []
    if _is_lost(records, "sync/logprob_diff_mean"):
        found = [Check("bad", "The difference between the log-probs of engine and trainer is not a number.")]
    elif not means:
        found = [Check("unknown", f"Log-probs of engine and trainer, {compared}.", parts[0])]
    elif max(value for _, value in means) > limit:
        text = f"Engine and trainer compute different log-probs, {compared}."
        found = [Check("bad", text, ", ".join([*parts, f"the limit of the mean is {limit:g}"]))]
    elif limit == math.inf:
        text = f"Engine and trainer have different base weights, so that their log-probs differ; {compared}."
        found = [Check("unknown", text, ", ".join(parts))]
    else:
        text = f"Engine and trainer compute the same log-probs, {compared}."
        found = [Check("ok", text, ", ".join([*parts, f"allowed {limit:g}"]))]
    ratio = _worst_noise(records)
    if ratio is not None and ratio > 5:
        found.append(Check("bad", "Engine and trainer differ by more than rounding.", f"{ratio:.1f} times the noise"))
    return found


def _count(points: Sequence[object], word: str) -> str:
    return f"{len(points):,} {word}{'' if len(points) == 1 else 's'}"


def _worst(title: str, points: Sequence[tuple[int, float]]) -> str:
    step, worst = max(points, key=lambda point: point[1])
    return f"{title} {_number(worst)} (step {step})"


def _is_lost(records: Records, name: str) -> bool:
    """Whether a metric was NaN or infinity in a step."""
    return any(record.get(name, 0.0) is None for record in records)


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
        name: min(value for _, value in points)
        for name in sorted({name for record in records for name in record})
        if name.startswith("verify/images/") and name.endswith("_effect") and (points := series(records, name))
    }
    if not effects:
        return []
    name, least = min(effects.items(), key=lambda item: item[1])
    path = name.removeprefix("verify/images/").removesuffix("_effect").replace("_", " ")
    figure = f"other images change outputs by {_number(least)} at least ({path}), of {len(effects)} paths"
    if least > _ROUNDING:
        return [Check("ok", "All models see the images: other images give other outputs.", figure)]
    return [Check("bad", f"A model ignores the images ({path}): other images give the same outputs.", figure)]


def _adapters(records: Records, limit: float) -> list[Check]:
    gaps = series(records, "verify/adapters/gap")
    if not gaps:
        return []
    effect = max((value for _, value in series(records, "verify/adapters/effect")), default=0.0)
    figure = f"{_worst('largest gap', gaps)}, largest effect of the adapter {_number(effect)}"
    checked = f"checked after {_count(gaps, 'sync')}"
    if max(value for _, value in gaps) > limit:
        return [Check("bad", f"Engines and trainer differ with the adapter on, {checked}.", figure)]
    if effect <= _ROUNDING:
        return [
            Check("unknown", f"The adapter changes nothing yet, so that engines cannot be compared, {checked}.", figure)
        ]
    return [Check("ok", f"The engines use the trained adapter, {checked}.", figure)]


def _syncs(records: Records) -> list[Check]:
    layers = series(records, "sync/readback_layers")
    if not layers:
        return []
    unread = max((value for _, value in series(records, "sync/readback_unread")), default=0.0)
    num_layers = int(sum(value for _, value in layers))
    figure = f"{num_layers:,} layers read back, {int(unread)} could not be"
    if num_layers:
        text = f"The engines hold the weights that were sent, read back after {_count(layers, 'sync')}."
        found = [Check("ok", text, figure)]
    else:
        found = [Check("unknown", "No layer of the engines could be read back.", figure)]
    restarts = series(records, "cluster/engine_restarts")
    if restarts and restarts[-1][1]:
        found.append(Check("bad", "Engines died and were started again.", f"{int(restarts[-1][1])} times"))
    return found


def _number(value: float) -> str:
    return f"{value:.2g}"
