"""The supervised training loop, over Protocols."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from vlmrl.system import stops
from vlmrl.trainer.protocols import Report
from vlmrl.types import Metrics, Sample


class Rows(Protocol):
    """The endless stream of training rows with their responses."""

    def draw_samples(self, count: int) -> tuple[list[Sample], Metrics]:
        """Return the next `count` rows as samples, and metrics of fetching them."""


class Model(Protocol):
    """The model that is trained."""

    def fit(self, samples: Sequence[Sample]) -> Metrics:
        """Make one optimizer step on the mean negative log-likelihood of the samples' response tokens."""


def fit(
    *,
    rows: Rows,
    model: Model,
    report: Report,
    batch_size: int,
    save: Callable[[int], None],
    first_step: int,
    last_step: int,
    rows_left: int,
) -> None:
    """Run the steps `first_step..last_step`, both included.

    `rows_left` is the number of rows that these steps can draw. Those at the end that do not fill a batch are left out,
    and counted in `data/left_out`.
    """
    left_out = rows_left - (last_step + 1 - first_step) * batch_size
    for step in range(first_step, last_step + 1):
        with report.phase("data"):
            samples, metrics = rows.draw_samples(batch_size)
        with stops.uninterrupted():
            with report.phase("update"):
                metrics = metrics | model.fit(samples)
            if step == last_step and 0 < left_out < batch_size:
                metrics["data/left_out"] = float(left_out)
            report.step(step, metrics)
            save(step)
        stops.raise_if_requested()
