from __future__ import annotations

from pathlib import Path

import pytest
from made_runs import make_run

from vlmrl.report.overview import headlines, phases, tokens_per_s
from vlmrl.report.run import Run, read_run


def run_with(folder: Path, *lines: str, verb: str = "rl") -> Run:
    folder.mkdir()
    (folder / "config.yaml").write_text(f"# Written by vlmrl: vlmrl {verb} --config config.yaml\n")
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return read_run(folder, name="run")


def test_figures_are_before_and_now(tmp_path: Path) -> None:
    evaluated, trained = headlines(read_run(make_run(tmp_path / "run", steps=8), name="run"))
    assert (evaluated.before, evaluated.now) == (0.25, 0.75)
    assert (evaluated.before_label, evaluated.now_label) == ("before training", "after step 8")
    # The means of the first two and of the last two steps of 1/8, 2/8, ..., 8/8.
    assert (trained.before, trained.now) == (1.5 / 8, 7.5 / 8)
    assert (trained.before_label, trained.now_label) == ("steps 1 to 2", "steps 7 to 8")


@pytest.mark.parametrize(
    ("step", "verb", "label"), [(0, "rl", "before training"), (8, "rl", "after step 8"), (0, "eval", "")]
)
def test_a_single_evaluation_is_one_figure(step: int, verb: str, label: str, tmp_path: Path) -> None:
    (found,) = headlines(run_with(tmp_path / "run", f'{{"step": {step}, "eval/toy/pass@1": 0.5}}', verb=verb))
    assert (found.before, found.before_label, found.now, found.now_label) == (None, "", 0.5, label)


def test_batches_of_generation_are_no_learning(tmp_path: Path) -> None:
    # The batches score 0, 1 and 0.5 on average; over all responses it is 0.4, for the last batch is smaller.
    lines = [f'{{"step": {step}, "reward/mean": {reward}}}' for step, reward in enumerate((0.0, 1.0), start=1)]
    lines.append('{"step": 3, "reward/mean": 0.5, "generate/reward": 0.4}')
    (found,) = headlines(run_with(tmp_path / "run", *lines, verb="generate"))
    assert (found.metric, found.before, found.before_label) == ("reward/mean", None, "")
    assert (found.now, found.now_label) == (0.4, "")
    (unfinished,) = headlines(run_with(tmp_path / "unfinished", *lines[:2], verb="generate"))
    assert (unfinished.before, unfinished.before_label, unfinished.now_label) == (None, "", "")


def test_a_single_step_is_one_figure(tmp_path: Path) -> None:
    (found,) = headlines(run_with(tmp_path / "run", '{"step": 1, "reward/mean": 0.5}'))
    assert (found.before, found.now, found.now_label) == (None, 0.5, "step 1")


def test_tokens_per_second_are_all_tokens_by_all_seconds() -> None:
    # 1,000 tokens in 1 s and 1,000 in 100 s: 2000 / 101, and not the mean of 1,000 and 10.
    records = [
        {"step": 1, "batch/tokens": 1000, "time/step_s": 1.0, "throughput/tokens_per_s": 1000.0},
        {"step": 2, "batch/tokens": 1000, "time/step_s": 100.0, "throughput/tokens_per_s": 10.0},
        {"step": 3, "time/step_s": 50.0},
        {"step": 4, "batch/tokens": None, "time/step_s": 50.0},
    ]
    assert tokens_per_s(records) == pytest.approx(2000 / 101)
    assert tokens_per_s([{"step": 1}]) is None


def test_times_of_phases_are_sums() -> None:
    records = [
        {"step": 1, "time/step_s": 10.0, "time/rollout_s": 4.0, "time/update_s": None},
        {"step": 2, "time/step_s": None, "time/rollout_s": 2.0, "time/update_s": 1.0},
    ]
    assert phases(records) == [("rollout", 6.0), ("other", 3.0), ("update", 1.0)]
