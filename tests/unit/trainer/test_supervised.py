"""The supervised training loop with small fakes for its parts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from scripted_loop import Notebook

from vlmrl.errors import EndOfRowsError
from vlmrl.trainer.collect import Ending
from vlmrl.trainer.supervised import fit
from vlmrl.types import Metrics, Sample


class Endless:
    """Rows that are nothing, and a learner that counts them."""

    def __init__(self) -> None:
        self.drawn = 0

    stop_reason: str | None = None

    def draw(self, count: int) -> tuple[list[Sample], Metrics]:
        self.drawn += count
        return [], {"media/bytes_moved": 0.0}

    def update(self, samples: Sequence[Sample]) -> Metrics:
        return {"policy/loss": 0.5}

    def after_step(self, step: int) -> Metrics:
        return {}


def run(*, rows_left: int) -> Notebook:
    rows, notebook, saved = Endless(), Notebook(), list[int]()
    fit(
        draw=rows.draw,
        update=rows.update,
        evaluator=rows,
        report=notebook,
        batch_size=4,
        save=saved.append,
        first_step=2,
        last_step=3,
        rows_left=rows_left,
    )
    assert saved == list(notebook.steps) == [2, 3]
    assert rows.drawn == 8
    return notebook


def test_last_rows_that_do_not_fill_a_batch_are_counted() -> None:
    notebook = run(rows_left=11)
    assert "data/left_out" not in notebook.steps[2]
    assert notebook.steps[3]["data/left_out"] == 3


def test_a_run_with_fewer_steps_leaves_no_rows_out() -> None:
    assert "data/left_out" not in run(rows_left=96).steps[3]
    assert "data/left_out" not in run(rows_left=8).steps[3]


def test_dropped_rows_end_a_run_before_the_step_that_they_do_not_fill() -> None:
    rows, notebook = Endless(), Notebook()

    def draw(count: int) -> tuple[list[Sample], Metrics]:
        if rows.drawn == 8:
            error = EndOfRowsError("no rows are left")
            error.left_out = 3
            raise error
        return Endless.draw(rows, count)

    def ending(first_step: int) -> Ending:
        return fit(
            draw=draw,
            update=rows.update,
            evaluator=rows,
            report=notebook,
            batch_size=4,
            save=lambda step: None,
            first_step=first_step,
            last_step=9,
            rows_left=36,
        )

    assert ending(1) == ending(3) == Ending(2, reason="no rows are left", left_out=3)
    assert list(notebook.steps) == [1, 2]
    with pytest.raises(EndOfRowsError):
        ending(1)


def test_a_run_ends_when_its_evaluations_no_longer_improve() -> None:
    rows, notebook = Endless(), Notebook()

    def after_step(step: int) -> Metrics:
        rows.stop_reason = "enough" if step == 3 else None
        return {"eval/toy/loss": 0.5}

    rows.after_step = after_step  # type: ignore[method-assign]
    ending = fit(
        draw=rows.draw,
        update=rows.update,
        evaluator=rows,
        report=notebook,
        batch_size=4,
        save=lambda step: None,
        first_step=1,
        last_step=9,
        rows_left=36,
    )
    assert ending == Ending(3, reason="enough")
    assert list(notebook.steps) == [1, 2, 3]
    assert "data/left_out" not in notebook.steps[3]
