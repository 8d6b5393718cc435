from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_disk import small_disk

from vlmrl.config.ckpt import Logger
from vlmrl.errors import StorageError
from vlmrl.observe.facts import RunEnd
from vlmrl.observe.report import RunReport, save_table
from vlmrl.observe.run_folder import RunFolder
from vlmrl.observe.samples import Sample
from vlmrl.observe.sent import Sent
from vlmrl.observe.sinks import read_metrics
from vlmrl.observe.start_times import StartTimes
from vlmrl.observe.trackers import OnlyNew
from vlmrl.report.run_files import read_facts
from vlmrl.system import stops
from vlmrl.system.stops import Stopped
from vlmrl.types import Metrics


@contextmanager
def make_report(folder: Path, **logger: object) -> Iterator[RunReport]:
    report = RunReport(RunFolder(folder), logger=Logger.model_validate(logger), config={}, title="test")
    try:
        with report:
            yield report
    finally:
        report.finish()


def test_a_step_gets_its_times_and_throughput(tmp_path: Path) -> None:
    with make_report(tmp_path) as report:
        report.begin(total_steps=1, done=0)
        with report.phase("rollout"):
            pass
        report.step(1, {"batch/tokens": 100.0, "reward/mean": 0.5})
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert record["time/rollout_s"] >= 0
    assert record["throughput/tokens_per_s"] == 100.0 / record["time/step_s"]
    assert (tmp_path / "curves.png").stat().st_size > 0


def test_the_first_record_has_the_times_of_the_start(tmp_path: Path) -> None:
    start_times = StartTimes()
    start_times.end("checks")
    started = RunReport(RunFolder(tmp_path), logger=Logger(), config={}, title="test", start_times=start_times)
    with started as report:
        report.begin(total_steps=2, done=0)
        report.step(1, {"reward/mean": 0.0})
        report.step(2, {"reward/mean": 0.0})
    records = read_metrics(tmp_path / "metrics.jsonl")
    first, second = ({name for name in record if name.startswith("time/start/")} for record in records)
    assert (first, second) == ({"time/start/checks_s", "time/start/roles_s"}, set())


def test_every_nth_step_and_every_evaluation_is_written(tmp_path: Path) -> None:
    with make_report(tmp_path, logging_steps=3) as report:
        report.begin(total_steps=6, done=0)
        report.evaluation(0, {"eval/toy/pass@1": 0.1})
        for step in range(1, 7):
            report.step(step, {"reward/mean": 0.0} | ({"eval/toy/pass@1": 0.2} if step == 5 else {}))
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 3, 5, 6]


@pytest.mark.parametrize("error", [None, RuntimeError("the cause")])
def test_the_first_and_last_step_are_written_whatever_the_interval(tmp_path: Path, error: Exception | None) -> None:
    with suppress(RuntimeError), make_report(tmp_path, logging_steps=10) as report:
        report.begin(total_steps=25, done=0)
        for step in range(1, 26):
            report.step(step, {"reward/mean": step / 25})
        if error is not None:
            raise error
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 10, 20, 25]
    assert records[-1]["reward/mean"] == 1


def test_a_step_before_the_last_evaluation_is_written(tmp_path: Path) -> None:
    with make_report(tmp_path, logging_steps=10) as report:
        report.begin(total_steps=10, done=0)
        report.step(1, {"reward/mean": 0.0})
        report.step(2, {"reward/mean": 0.5})
        report.evaluation(2, {"eval/toy/pass@1": 0.1})
    *_, last = read_metrics(tmp_path / "metrics.jsonl")
    assert (last["step"], last["reward/mean"], last["eval/toy/pass@1"]) == (2, 0.5, 0.1)


def test_a_run_that_does_not_begin_leaves_the_facts_of_the_earlier_one(tmp_path: Path) -> None:
    with make_report(tmp_path) as report:
        report.note(unit="GPUs")
        report.begin(total_steps=3, done=0)
    facts = read_facts(tmp_path / "facts.json")
    assert facts["unit"] == "GPUs"
    with suppress(RuntimeError), make_report(tmp_path) as report:
        report.note(unit="cores")
        raise RuntimeError("the checkpoint cannot be read")
    assert read_facts(tmp_path / "facts.json") == facts


@pytest.mark.parametrize(
    ("error", "is_stopping", "end"),
    [
        (None, False, "finished"),
        (Stopped(signal.SIGTERM), True, "stopped"),
        (RuntimeError("a role died of the signal"), True, "stopped"),
        (RuntimeError("out of memory"), False, "failed"),
    ],
)
def test_trackers_are_closed_last_and_know_how_the_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException | None, is_stopping: bool, end: str
) -> None:
    monkeypatch.setattr(stops, "is_stopping", lambda: is_stopping)
    events: list[str] = []
    report = RunReport(RunFolder(tmp_path), logger=Logger(), config={}, title="test")
    tracker = SimpleNamespace(write=lambda *step: None, close=events.append)
    with suppress(RuntimeError, KeyboardInterrupt), report:
        report.begin(total_steps=1, done=0)
        report._trackers = [tracker]  # type: ignore[list-item]
        report.step(1, {"reward/mean": 0.5})
        if error is not None:
            raise error
    events.append("saved")
    report.finish(error)
    assert events == ["saved", end]
    assert read_facts(tmp_path / "facts.json")["end"]["state"] == end


def test_a_tracker_whose_service_does_not_answer_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vlmrl.observe.report._LIMIT_S", 0.1)
    report = RunReport(RunFolder(tmp_path), logger=Logger(), config={}, title="test")
    answer = threading.Event()
    abandoned: list[str] = []
    monkeypatch.setattr("vlmrl.system.exits.abandon", abandoned.append)
    with report:
        report.begin(total_steps=1, done=0)
        report._trackers = [OnlyNew(Silent(answer), Sent(tmp_path / "sent.json", resumes=False))]
    report.finish()
    answer.set()
    assert abandoned == ["Silent"], "the end of the process must not wait for its threads either"
    assert "Silent did not close: within 0.1 s: its last metrics may be lost" in capsys.readouterr().out


class Silent:
    """A tracker that waits for its service at its end."""

    def __init__(self, answer: threading.Event) -> None:
        self._answer = answer

    def write(self, step: int, metrics: Metrics) -> None:
        pass

    def write_samples(self, step: int, name: str, samples: Sequence[Sample]) -> None:
        pass

    def close(self, end: RunEnd) -> None:
        self._answer.wait(60)


def test_a_resumed_run_writes_no_step_twice(tmp_path: Path) -> None:
    with make_report(tmp_path) as report:
        report.begin(total_steps=3, done=0)
        for step in (1, 2, 3):
            report.step(step, {"reward/mean": 0.0})
    with make_report(tmp_path) as report:
        report.begin(total_steps=3, done=2)
        report.step(3, {"reward/mean": 1.0})
    assert [(r["step"], r["reward/mean"]) for r in read_metrics(tmp_path / "metrics.jsonl")] == [(1, 0), (2, 0), (3, 1)]


def test_the_parameter_table_is_written_to_a_file(tmp_path: Path) -> None:
    save_table(tmp_path / "parameters.tsv", [("vision", 0, 10), ("language", 5, 5)])
    assert (tmp_path / "parameters.tsv").read_text() == "part\ttrainable\tall\nvision\t0\t10\nlanguage\t5\t5\n"


class Broken:
    """A sink that cannot be closed."""

    def write(self, step: int, metrics: dict[str, float]) -> None:
        pass

    def close(self) -> None:
        raise OSError("no network")


def test_errors_at_the_end_are_printed_and_do_not_hide_the_error_that_ended_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "curves.png").mkdir()
    last = Broken()
    closed: list[int] = []
    last.close = lambda: closed.append(1)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the cause"), make_report(tmp_path) as report:  # noqa: PT012
        report.begin(total_steps=1, done=0)
        report._sinks = [Broken(), last]
        report.step(1, {"reward/mean": 0.5})
        raise RuntimeError("the cause")
    output = capsys.readouterr().out
    assert "Broken did not close: OSError: no network\n" in output
    assert "curves.png could not be drawn: IsADirectoryError: " in output
    assert closed == [1], "the other sinks are closed as well"


def test_a_plot_that_cannot_be_drawn_is_reported_once_and_does_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "curves.png").mkdir()
    with make_report(tmp_path) as report:
        report.begin(total_steps=30, done=0)
        for step in range(1, 31):
            report.step(step, {"reward/mean": 0.5})
    assert capsys.readouterr().out.count("curves.png could not be drawn") == 1
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 30


def fill(disk: Path) -> None:
    """Fill the disk to the last byte."""
    with suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_a_full_disk_is_one_error_that_names_the_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def run(disk: Path) -> None:
        with make_report(disk) as report:
            report.begin(total_steps=1000, done=0)
            report.step(1, {"reward/mean": 0.5})
            fill(disk)
            for step in range(2, 1000):
                report.step(step, {"reward/mean": 0.5, "reward/std": 0.5, "policy/loss": 0.5})

    with small_disk(tmp_path / "disk", mib=1) as disk, pytest.raises(StorageError) as caught:
        run(disk)
    output, errors = capfd.readouterr()
    assert re.fullmatch(
        rf"(metrics\.jsonl|TensorBoard's curves) cannot be written to {disk}(/tensorboard)?: "
        r"No space left on device \(0\.0 MiB of 1\.0 MiB free\): free some space there",
        str(caught.value),
    )
    assert "cannot" not in output + errors, "the caller reports it"
    assert "Traceback" not in output + errors


class RecordedPage:
    """Counts what is asked of a page, and fails each time."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def refresh(self) -> str | None:
        self.calls.append("refresh")
        return "no room"

    def finish_soon(self) -> None:
        self.calls.append("finish")

    def wait(self, timeout_s: float) -> str | None:
        self.calls.append("wait")
        return None


def test_the_page_is_made_every_few_steps_and_at_the_end_and_a_failure_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = RecordedPage()
    with RunReport(RunFolder(tmp_path), logger=Logger(), config={}, title="test", page=page) as report:
        report.begin(total_steps=12, done=0)
        for step in range(1, 13):
            report.step(step, {"reward/mean": 0.0} | ({"eval/toy/pass@1": 0.5} if step == 7 else {}))
    report.finish()
    assert page.calls == ["refresh", "refresh", "refresh", "finish", "wait"]  # after steps 1, 7 and 10
    assert capsys.readouterr().out.count("report.html could not be written: no room") == 1


def test_the_facts_have_what_was_added_to_an_error_after_the_report_ended(tmp_path: Path) -> None:
    report = RunReport(RunFolder(tmp_path), logger=Logger(), config={}, title="test")
    with suppress(KeyboardInterrupt), report:
        report.begin(total_steps=3, done=0)
        raise Stopped(signal.SIGINT)
    report.finish(Stopped(signal.SIGINT, "after step 2; resume from checkpoints/step_000002 with --ckpt.load_enable"))
    end = json.loads((tmp_path / "facts.json").read_text())["end"]
    assert end["state"] == "stopped"
    assert end["reason"].startswith("stopped by SIGINT: after step 2; resume from")


def test_a_page_that_raises_neither_ends_the_run_nor_hides_why_it_ends(tmp_path: Path) -> None:
    class BrokenPage(RecordedPage):
        def refresh(self) -> str | None:
            raise FileNotFoundError("/tmp")

        def finish_soon(self) -> None:
            raise FileNotFoundError("/tmp")

        wait = refresh  # type: ignore[assignment]

    report = RunReport(RunFolder(tmp_path), logger=Logger(), config={}, title="test", page=BrokenPage())
    reason = ValueError("the reason")
    with suppress(ValueError), report:
        report.begin(total_steps=2, done=0)
        report.step(1, {"reward/mean": 0.0})
        raise reason
    report.finish(reason)
    assert json.loads((tmp_path / "facts.json").read_text())["end"]["reason"] == "the reason"


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (None, ("finished", "")),
        (KeyboardInterrupt(), ("stopped", "KeyboardInterrupt")),
        (ValueError("a\nb"), ("failed", "a\\nb")),
    ],
)
def test_the_facts_say_how_the_run_ended(tmp_path: Path, error: BaseException | None, end: tuple[str, str]) -> None:
    report = RunReport(RunFolder(tmp_path), logger=Logger(), config={}, title="test")
    with suppress(KeyboardInterrupt, ValueError), report:
        report.note(placement=[("actor", "1", "0:0")])
        report.begin(total_steps=3, done=1)
        if error is not None:
            raise error
    report.finish(error)
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert (facts["total_steps"], facts["done"], facts["placement"]) == (3, 1, [["actor", "1", "0:0"]])
    assert (facts["end"]["state"], facts["end"]["reason"]) == end
    assert "torch" in facts["versions"]
