"""The supervised training loop with small fakes for its parts."""

from __future__ import annotations

from collections.abc import Sequence

from scripted_loop import Notebook

from vlmrl.trainer.sft import fit
from vlmrl.types import Metrics, Sample


class Endless:
    """Rows that are nothing, and a learner that counts them."""

    def __init__(self) -> None:
        self.drawn = 0

    def draw_samples(self, count: int) -> tuple[list[Sample], Metrics]:
        self.drawn += count
        return [], {"media/bytes_moved": 0.0}

    def fit(self, samples: Sequence[Sample]) -> Metrics:
        return {"policy/loss": 0.5}


def run(*, rows_left: int) -> Notebook:
    rows, notebook, saved = Endless(), Notebook(), list[int]()
    fit(
        rows=rows,
        model=rows,
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
