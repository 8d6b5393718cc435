"""The report of the self-test: a line as each check ends, for people or as JSON, and the exit code."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

import vlmrl
from vlmrl import startup
from vlmrl.commands.self_test.outcome import Outcome, Theme
from vlmrl.commands.self_test.supervision import Supervisor
from vlmrl.errors import ClusterError
from vlmrl.startup.driver import has_gpu
from vlmrl.system import machine

_STYLES = {"ok": "green", "failed": "bold red", "skipped": "yellow"}
_NAME_WIDTH = 34


def main(*, as_json: bool = False, themes: Sequence[Theme] | None = None) -> int:
    """Run every check; 1 when one has failed, else 0."""
    startup.prepare()
    if themes is None:
        from vlmrl.commands.self_test.themes import THEMES

        themes = THEMES
    started = time.monotonic()
    try:
        folder = Path(tempfile.mkdtemp(prefix="vlmrl-self-test-"))
    except OSError as error:
        raise ClusterError(f"no folder for temporary files ({error.strerror}): set TMPDIR to one of yours") from error
    report = _Report(as_json=as_json)
    is_kept = False
    try:
        with report:
            report.begin()
            for outcome in _of_the_machine():
                report.tell(outcome)
            # GPUs would be short of memory, and cores of GPU machines are many: there they take turns.
            at_once = 1 if has_gpu() else 2
            Supervisor(folder, tell=report.tell, begins=report.begins).run(themes, at_once=at_once)
        is_kept = report.has_failed
        report.end(time.monotonic() - started, logs=folder if is_kept else None)
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if report.has_failed else 0


def _of_the_machine() -> list[Outcome]:
    """The machine checks that `vlmrl doctor` and every run make too."""
    found = []
    for check in machine.CHECKS:
        started = time.monotonic()
        finding = machine.look(check)
        state: Any = "ok" if finding.ok or not finding.essential else "failed"
        warning = "" if finding.ok or finding.essential else f" (little: {finding.mend})"
        avoid = finding.mend if state == "failed" else ""
        figure = finding.detail + warning
        found.append(Outcome(finding.name, state, time.monotonic() - started, figure, avoid))
    return found


class _Report:
    """Prints outcomes as they come, and below them what is being checked."""

    def __init__(self, *, as_json: bool) -> None:
        self.has_failed = False
        self._as_json = as_json
        self._console = Console(highlight=False)
        self._status = self._console.status("starting")
        self._under_way: list[str] = []
        self._lock = threading.Lock()

    def __enter__(self) -> _Report:
        if not self._as_json:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def begin(self) -> None:
        if not self._as_json:
            where = "NVIDIA GPU" if has_gpu() else "no GPU"
            cores = len(os.sched_getaffinity(0))
            self._console.print(f"[bold]vlmrl {vlmrl.__version__}[/bold] self-test: {where}, {cores} cores")

    def begins(self, name: str) -> None:
        """A check has started."""
        with self._lock:
            if name not in self._under_way:
                self._under_way.append(name)
            self._status.update(", ".join(self._under_way))

    def tell(self, outcome: Outcome) -> None:
        """A check has ended."""
        with self._lock:
            self.has_failed |= outcome.state == "failed"
            self._under_way = [name for name in self._under_way if name != outcome.check]
            if self._as_json:
                sys.stdout.write(json.dumps(asdict(outcome) | {"seconds": round(outcome.seconds, 2)}) + "\n")
                sys.stdout.flush()
                return
            self._status.update(", ".join(self._under_way))
            line = Text(f"{outcome.state:8}", style=_STYLES[outcome.state])
            line.append(f"{outcome.check:{_NAME_WIDTH}}{outcome.seconds:6.1f} s  ", style="default")
            line.append(outcome.figure, style="default")
            if outcome.avoid:
                line.append(f"\n{'':8}do without it: {outcome.avoid}", style="default")
            # One line per finding, however narrow the terminal: reports are pasted into issues.
            self._console.print(line, soft_wrap=True)

    def end(self, seconds: float, *, logs: Path | None) -> None:
        if self._as_json:
            if logs is not None:
                sys.stderr.write(f"what failed said more in {logs}\n")
            return
        if logs is None:
            self._console.print(f"[green]Everything that can run here works[/green] ({seconds:.0f} s).")
        else:
            said = f"[red]Something does not work[/red] ({seconds:.0f} s); what it said lies in {logs}"
            self._console.print(said, soft_wrap=True)
