"""The loop of supervised training, over Protocols."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from vlmrl.system import stops
from vlmrl.trainer.rl import Report
from vlmrl.types import Metrics, Sample


class Rows(Protocol):
    """The endless stream of rows with answers."""

    def draw_samples(self, count: int) -> tuple[list[Sample], Metrics]:
        """The next `count` rows, and what it took to fetch them."""


class Learner(Protocol):
    """The model that is trained."""

    def fit(self, samples: Sequence[Sample]) -> Metrics:
        """One optimizer step on these samples: the mean negative log-probability of their answer tokens."""


def fit(
    *,
    rows: Rows,
    learner: Learner,
    report: Report,
    batch_size: int,
    save: Callable[[int], None],
    first_step: int,
    last_step: int,
    rows_left: int,
) -> None:
    """Run the steps `first_step..last_step`, both included. Of the `rows_left` for them, those at the end that fill no
    batch are left out, and counted."""
    left_out = rows_left - (last_step + 1 - first_step) * batch_size
    for step in range(first_step, last_step + 1):
        with report.phase("data"):
            samples, drawing = rows.draw_samples(batch_size)
        with stops.finishing():
            with report.phase("update"):
                learning = learner.fit(samples)
            is_short = step == last_step and 0 < left_out < batch_size
            report.step(step, drawing | learning | ({"data/left_out": float(left_out)} if is_short else {}))
            save(step)
        stops.check()
