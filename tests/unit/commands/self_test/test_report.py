"""The self-test survives checks that fail, crash or hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from vlmrl.commands.self_test import report, supervision
from vlmrl.commands.self_test.outcome import Check, Theme
from vlmrl.errors import ClusterError
from vlmrl.startup import driver

CHECKS = """
import multiprocessing, os, subprocess, sys, time
from contextlib import contextmanager
from pathlib import Path
from vlmrl.commands.self_test.outcome import Broken, Skipped

def works(held): print("chatter of a library"); return "0.1 off"
def fails(held): raise Broken("0.7 off")
def knows_better(held): raise Broken("0.7 off", "--ds.zero_stage 1")
def raises(held): raise ValueError("first line\\nsecond line")
def skipped(held): raise Skipped("one GPU")
def crashes(held): sys.stderr.write("Illegal instruction\\n"); os.kill(os.getpid(), 11)
def hangs(held):
    from multiprocessing.shared_memory import SharedMemory
    segment = SharedMemory(create=True, size=4096, name=os.environ["SEGMENT"])
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(os.environ["PIDS"]).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(60)

@contextmanager
def shared(folder):
    with open(folder / "starts", "a") as file: file.write("x")
    yield folder

def starts(folder): return len((folder / "starts").read_text())

@contextmanager
def broken(folder):
    raise RuntimeError("no engine")
    yield
"""


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "planted_checks.py").write_text(CHECKS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(report.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    monkeypatch.setenv("SEGMENT", f"vlmrl-test-{os.getpid()}")
    return tmp_path


def has_left_shared_memory() -> bool:
    segment = Path("/dev/shm", os.environ["SEGMENT"])
    is_left = segment.exists()
    segment.unlink(missing_ok=True)
    return is_left


def check(function: str, limit_s: float = 60.0, *, needs_gpu: bool = False) -> Check:
    return Check(function, f"planted_checks:{function}", "--train.layout padded", limit_s, needs_gpu)


def outcomes(printed: str) -> dict[str, dict[str, str]]:
    """Return the outcomes of the planted checks by name."""
    lines = [json.loads(line) for line in printed.splitlines()]
    return {line.pop("check"): line for line in lines if line["check"] not in ("memory", "disk", "driver", "loopback")}


def test_each_kind_of_failure_affects_one_check_only(planted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("works", "fails", "knows_better", "raises", "skipped", "crashes")
    checks = [*map(check, names), check("hangs", 1.5), check("starts")]
    theme = Theme("one", tuple(checks), "planted_checks:shared")
    assert report.main(as_json=True, themes=[theme]) == 1
    outcome_of = outcomes(capsys.readouterr().out)
    assert {
        name: (line["state"], line["figure"], line["avoid"]) for name, line in outcome_of.items() if name in names
    } == {
        "works": ("ok", "0.1 off", ""),
        "fails": ("failed", "0.7 off", "--train.layout padded"),
        "knows_better": ("failed", "0.7 off", "--ds.zero_stage 1"),
        "raises": ("failed", "ValueError: first line second line", "--train.layout padded"),
        "skipped": ("skipped", "one GPU", ""),
        "crashes": ("failed", "its process ended with code -11: Illegal instruction", "--train.layout padded"),
    }
    assert (outcome_of["hangs"]["state"], outcome_of["hangs"]["figure"]) == ("failed", "no result within 2 s")
    # The shared set-up ran again for the checks after the crash, and for those after the hang.
    assert (outcome_of["starts"]["state"], outcome_of["starts"]["figure"]) == ("ok", "3")
    assert float(outcome_of["hangs"]["seconds"]) >= 1.5
    for process in map(int, (planted / "pids").read_text().split()):
        assert not psutil.pid_exists(process)
    assert not has_left_shared_memory()


def test_a_failed_set_up_is_reported_for_each_check_and_not_repeated(
    planted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    themes = [Theme("broken", (check("works"), check("fails")), "planted_checks:broken")]
    assert report.main(as_json=True, themes=themes) == 1
    outcome_of = outcomes(capsys.readouterr().out)
    assert [outcome_of[name]["figure"] for name in ("works", "fails")] == ["RuntimeError: no engine"] * 2
    # A setting that avoids the check does not help if the set-up fails.
    assert {outcome_of[name]["avoid"] for name in ("works", "fails")} == {"see the message"}


def test_report_lines_have_check_duration_and_advice(planted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    themes = [Theme("two", (check("works"), check("skipped")))]
    assert report.main(themes=themes) == 0
    printed = capsys.readouterr().out
    assert "ok      works" in printed
    assert "s  0.1 off" in printed
    assert "Everything that can run here works" in printed
    assert report.main(themes=[Theme("three", (check("fails"),))]) == 1
    printed = capsys.readouterr().out
    assert "failed  fails" in printed
    assert "to avoid it: --train.layout padded" in printed
    logs = Path(printed.split()[-1])
    assert (logs / "three" / "log.txt").exists()


def test_the_logs_of_a_failure_are_named_on_stderr_with_json(planted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(as_json=True, themes=[Theme("three", (check("fails"),))]) == 1
    printed = capsys.readouterr()
    assert outcomes(printed.out).keys() >= {"fails"}
    assert (Path(printed.err.split()[-1]) / "three" / "log.txt").exists()


def test_without_a_folder_for_temporary_files_there_is_one_line(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report.tempfile, "tempdir", str(planted / "nowhere"))
    with pytest.raises(ClusterError, match="set TMPDIR"):
        report.main(themes=[])


def test_gpu_checks_are_skipped_without_a_process(
    planted: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    themes = [Theme("four", (check("hangs", needs_gpu=True),), "planted_checks:broken")]
    for there, why in ((False, "no NVIDIA device"), (True, "CUDA_VISIBLE_DEVICES hides every GPU")):
        for module in (supervision, driver):
            monkeypatch.setattr(module, "has_gpu", lambda there=there: there)
        assert report.main(as_json=True, themes=themes) == 0
        assert outcomes(capsys.readouterr().out)["hangs"]["figure"] == why


def test_an_interrupt_ends_every_process(planted: Path) -> None:
    code = f"""if True:
        import signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are born ignoring it
        sys.path.insert(0, {str(Path(report.__file__).parents[3])!r})
        from vlmrl.commands.self_test import report
        from vlmrl.commands.self_test.outcome import Check, Theme
        report.main(themes=[Theme("one", (Check("hangs", "planted_checks:hangs", ""),))])
    """
    with subprocess.Popen([sys.executable, "-c", code], env=os.environ, stdout=subprocess.DEVNULL) as tester:
        stop = time.monotonic() + 60
        while not (planted / "pids").exists() or len((planted / "pids").read_text().split()) < 2:
            assert time.monotonic() < stop
            time.sleep(0.05)
        tester.send_signal(signal.SIGINT)
        assert tester.wait(30) != 0
    for process in map(int, (planted / "pids").read_text().split()):
        assert not psutil.pid_exists(process)
    assert not has_left_shared_memory()
