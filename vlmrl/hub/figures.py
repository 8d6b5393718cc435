"""Figures of a run for its model card: evaluations, and the worst figure of every check."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Records = Sequence[Mapping[str, Any]]

_PERCENT = re.compile(r"/pass@\d+$|/accuracy$|_fraction$")


class Evaluation(NamedTuple):
    """A metric of an evaluation set, in the first and in the last evaluation."""

    metric: str
    """Its name without `eval/`."""
    first: float
    first_step: int
    last: float
    last_step: int

    @property
    def is_accuracy(self) -> bool:
        """A share of right responses or pairs."""
        return self.metric.endswith("/accuracy") or "/pass@" in self.metric


class Check(NamedTuple):
    """A check of a run, with its worst figure over all steps."""

    statement: str
    metric: str
    figure: float


def evaluations(records: Records, *, until: int | None = None) -> list[Evaluation]:
    """Return all metrics of the evaluations up to the step `until`: accuracies first, then by name."""
    records = [record for record in records if until is None or record["step"] <= until]
    names = {name for record in records for name in record if name.startswith("eval/")}
    rows = []
    for name in names:
        values = [(record["step"], float(record[name])) for record in records if _is_number(record.get(name))]
        if values:
            (first_step, first), (last_step, last) = values[0], values[-1]
            rows.append(Evaluation(name.removeprefix("eval/"), first, first_step, last, last_step))
    return sorted(rows, key=lambda row: (not row.is_accuracy, row.metric.count("/"), row.metric))


def checks(records: Records) -> list[Check]:
    """Return the checks that the run made."""
    rows = []
    for pattern, statement, worst in _CHECKS:
        figures = {
            # Null stands for NaN and infinity, which JSON does not have.
            name: _worst(
                worst,
                [math.nan if record[name] is None else float(record[name]) for record in records if name in record],
            )
            for name in sorted({name for record in records for name in record if re.fullmatch(pattern, name)})
        }
        if figures:
            figure = _worst(worst, list(figures.values()))
            name = next(name for name, value in figures.items() if value == figure or math.isnan(value))
            rows.append(Check(statement, name, figure))
    return rows


def _worst(choose: Callable[[list[float]], float], values: list[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else choose(values)


def _largest(values: Iterable[float]) -> float:
    return max(values, key=abs)


_CHECKS: tuple[tuple[str, str, Callable[[list[float]], float]], ...] = (
    (r"sync/logprob_diff_max", "largest difference between the log-probs of a token in engine and trainer", max),
    (r"sync/kl_rollout_train", "KL(engine, trainer)", _largest),
    (r"sync/version", "weight syncs, each confirmed by version and fingerprint by every engine", max),
    (r"sync/readback_layers", "layers of an engine that were read back after a sync", max),
    (r"sync/readback_unread", "tensors of an engine that could not be read back", max),
    (r"verify/adapters/effect", "adapters: smallest effect on a log-prob in the trainer", min),
    (r"verify/adapters/gap", "adapters: largest mean difference of engine and trainer with the adapter on", max),
    (r"verify/images/.+_effect", "images: smallest change of an output under other images, over all models", min),
    (r"verify/images/.+_gap", "images: largest difference from the rollouts' log-probs, over all passes", max),
    (r"verify/layouts/values_gap", "layouts of the training pass: relative difference of their outputs", max),
    (r"verify/layouts/gradients_gap", "layouts of the training pass: relative difference of their gradients", max),
    (r"cluster/engine_restarts", "engines that died and were started again", max),
    (r"reward/failed", "responses that could not be scored, over all steps", sum),
    (r"data/rows_dropped", "rows of the data that could not be used", max),
)
"""Pattern of a metric, what it says, and which of its values is the worst."""


def num_steps(records: Records) -> int:
    """Return the number of the last step."""
    return max((int(record["step"]) for record in records), default=0)


def hours(records: Records) -> float:
    """Return the time of all logged steps and evaluations, in hours."""
    return sum(float(record["time/step_s"]) for record in records if _is_number(record.get("time/step_s"))) / 3600


def parameters(file: Path) -> dict[str, tuple[int, int]]:
    """Read the trainable and all parameters of each part of the model; {} where the run has not written them."""
    if not file.is_file():
        return {}
    rows = [line.split("\t") for line in file.read_text(encoding="utf-8").splitlines()[1:]]
    return {part: (int(trainable), int(total)) for part, trainable, total in rows}


def show(metric: str, value: float) -> str:
    """Format a metric's value."""
    if _PERCENT.search(metric):
        return f"{value:.1%}"
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e6 else f"{value:.3g}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
