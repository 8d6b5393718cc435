from __future__ import annotations

from pathlib import Path

from vlmrl.config.ckpt import Logger
from vlmrl.observe.folder import RunFolder
from vlmrl.observe.report import RunReport, save_table
from vlmrl.observe.sinks import read_metrics


def make_report(folder: Path, **logger: object) -> RunReport:
    return RunReport(RunFolder(folder), logger=Logger.model_validate(logger), config={}, title="test")


def test_a_step_gets_its_times_and_its_speed(tmp_path: Path) -> None:
    with make_report(tmp_path) as report:
        report.begin(total_steps=1, done=0)
        with report.phase("rollout"):
            pass
        report.step(1, {"batch/tokens": 100.0, "reward/mean": 0.5})
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert record["time/rollout_s"] >= 0
    assert record["throughput/tokens_per_s"] == 100.0 / record["time/step_s"]
    assert (tmp_path / "curves.png").stat().st_size > 0


def test_only_every_nth_step_is_written_but_no_evaluation_is_lost(tmp_path: Path) -> None:
    with make_report(tmp_path, logging_steps=2) as report:
        report.begin(total_steps=3, done=0)
        report.evaluation(0, {"eval/toy/pass@1": 0.1})
        report.step(1, {"reward/mean": 0.0})
        report.step(2, {"reward/mean": 0.0})
        report.step(3, {"reward/mean": 0.0, "eval/toy/pass@1": 0.2})
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [0, 2, 3]


def test_a_continued_run_writes_no_step_twice(tmp_path: Path) -> None:
    with make_report(tmp_path) as report:
        report.begin(total_steps=3, done=0)
        for step in (1, 2, 3):
            report.step(step, {"reward/mean": 0.0})
    with make_report(tmp_path) as report:
        report.begin(total_steps=3, done=2)
        report.step(3, {"reward/mean": 1.0})
    assert [(r["step"], r["reward/mean"]) for r in read_metrics(tmp_path / "metrics.jsonl")] == [(1, 0), (2, 0), (3, 1)]


def test_the_table_of_what_trains_is_a_file_too(tmp_path: Path) -> None:
    save_table(tmp_path / "parameters.tsv", [("vision", 0, 10), ("language", 5, 5)])
    assert (tmp_path / "parameters.tsv").read_text() == "part\ttrainable\tall\nvision\t0\t10\nlanguage\t5\t5\n"
