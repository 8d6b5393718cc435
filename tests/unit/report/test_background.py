from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from made_runs import make_run

from vlmrl.config.ckpt import Logger
from vlmrl.observe.report import RunReport
from vlmrl.observe.run_folder import RunFolder
from vlmrl.report.background import BackgroundReport


def script(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_the_page_is_written_beside_the_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    report = BackgroundReport(folder)
    assert report.refresh() is None
    assert report.wait(60) is None
    assert "question 1" in (folder / "report.html").read_text()


def test_files_where_the_run_was_started_are_no_modules_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run")
    for name in ("json", "jinja2", "vlmrl"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the user')\n")
    monkeypatch.chdir(tmp_path)
    report = BackgroundReport(folder)
    report.finish_soon()
    assert report.wait(60) is None
    assert (folder / "report.html").exists()


def test_a_failure_is_returned_once_and_names_the_error(tmp_path: Path) -> None:
    report = BackgroundReport(tmp_path)
    report.finish_soon()
    failure = report.wait(60)
    assert failure is not None
    assert failure.startswith(f"ConfigError: {tmp_path} holds no run")
    assert report.wait(60) is None


def test_a_report_that_hangs_is_ended(tmp_path: Path) -> None:
    report = BackgroundReport(tmp_path, command=script("import time; time.sleep(100)"))
    started = time.monotonic()
    report.refresh()
    assert report.wait(0.2) == "it took more than 0.2 s"
    assert time.monotonic() - started < 10


def test_a_process_that_cannot_start_is_a_failure_and_the_next_one_may_start(tmp_path: Path) -> None:
    missing = tmp_path / "python"
    report = BackgroundReport(tmp_path, command=(str(missing), "-c", ""))
    reason = f"its process could not start: [Errno 2] No such file or directory: '{missing}'"
    assert report.refresh() == reason
    assert report.wait(1) == reason
    missing.symlink_to(sys.executable)
    assert report.refresh() is None
    assert report.wait(30) is None


def test_a_report_takes_a_small_share_of_the_time(tmp_path: Path) -> None:
    code = f"import time; time.sleep(0.2); open({str(tmp_path / 'count')!r}, 'a').write('x')"
    report = BackgroundReport(tmp_path, command=script(code))
    report.refresh()
    report.refresh()  # the first still runs
    assert report.wait(30) is None
    report.refresh()  # 0.2 s and more at a share of 2 %: not within the next ten seconds
    assert report.wait(30) is None
    assert (tmp_path / "count").read_text() == "x"
    report.finish_soon()  # the last one is always written
    report.wait(30)
    assert (tmp_path / "count").read_text() == "xx"


def test_a_run_ends_with_a_page_that_says_so(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=1)
    (folder / "metrics.jsonl").unlink()
    page = BackgroundReport(folder)
    with RunReport(RunFolder(folder), logger=Logger(), config={}, title="test", page=page) as report:
        report.begin(total_steps=2, done=0)
        report.step(1, {"reward/mean": 0.25})
        report.step(2, {"reward/mean": 0.75})
    report.finish()
    text = (folder / "report.html").read_text()
    assert '"state":"finished"' in text
    assert '"total_steps":2' in text
    assert '"reward/mean":[[1,2],[0.25,0.75],' in text
    assert not list(folder.glob(".report*"))
