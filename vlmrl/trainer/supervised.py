"""The loop of training on the rows of a dataset, over Protocols. A step is one optimizer step on one batch of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from vlmrl.errors import EndOfRowsError
from vlmrl.system import stops
from vlmrl.trainer.collect import Ending
from vlmrl.trainer.protocols import Report
from vlmrl.types import Metrics

Batch = TypeVar("Batch")


class Evaluator(Protocol):
    """Evaluates the model between steps."""

    def after_step(self, step: int) -> Metrics:
        """Evaluate if this step is due; return the metrics."""

    @property
    def stop_reason(self) -> str | None:
        """Why the run ends before its last step; None if it goes on."""


def fit(
    *,
    draw: Callable[[int], tuple[Batch, Metrics]],
    update: Callable[[Batch], Metrics],
    evaluator: Evaluator,
    report: Report,
    batch_size: int,
    save: Callable[[int], None],
    first_step: int,
    last_step: int,
    rows_left: int,
) -> Ending:
    """Run the steps `first_step..last_step`, both included, as far as `evaluator` lets them.

    Args:
        draw: returns the next rows as one batch, and metrics of fetching them. It may prepare them ahead: the time that
            a step waits for them is `time/data_wait_s`. It raises EndOfRowsError if dropped rows leave fewer than a
            batch.
        update: makes one optimizer step on a batch.
        rows_left: number of rows that these steps can draw. Those at the end that do not fill a batch are left out, and
            counted in `data/left_out`.

    Raises EndOfRowsError if the rows do not fill the first batch of a run.
    """
    left_out = rows_left - (last_step + 1 - first_step) * batch_size
    for step in range(first_step, last_step + 1):
        try:
            with report.phase("data_wait"):
                batch, metrics = draw(batch_size)
        except EndOfRowsError as error:  # `last_step` counts dropped rows: which these are is known once they are read
            if step == 1:
                raise
            return Ending(step - 1, reason=str(error), left_out=error.left_out)
        with stops.uninterrupted():
            with report.phase("update"):
                metrics = metrics | update(batch)
            metrics |= evaluator.after_step(step)
            if step == last_step and 0 < left_out < batch_size:
                metrics["data/left_out"] = float(left_out)
            report.step(step, metrics)
            save(step)
        stops.raise_if_requested()
        if evaluator.stop_reason is not None:
            return Ending(step, evaluator.stop_reason)
    return Ending(max(last_step, first_step - 1))
