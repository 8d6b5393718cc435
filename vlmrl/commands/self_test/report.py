"""Run the self-test, and print a line as each check ends, for users or as JSON."""

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
    """Run every check; return 1 if one failed, else 0."""
    startup.prepare()
    if themes is None:
        from vlmrl.commands.self_test.themes import THEMES

        themes = THEMES
    started = time.monotonic()
    try:
        folder = Path(tempfile.mkdtemp(prefix="vlmrl-self-test-"))
    except OSError as error:
        raise ClusterError(
            f"no folder for temporary files ({error.strerror}): set TMPDIR to a folder that you can write to"
        ) from error
    report = _Report(as_json=as_json)
    is_kept = False
    try:
        with report:
            report.begin()
            for outcome in _machine_outcomes():
                report.check_ended(outcome)
            # Themes that share a GPU would run out of its memory.
            at_once = 1 if has_gpu() else 2
            supervisor = Supervisor(folder, on_start=report.check_started, on_end=report.check_ended)
            supervisor.run(themes, at_once=at_once)
        is_kept = report.has_failed
        report.end(time.monotonic() - started, logs=folder if is_kept else None)
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if report.has_failed else 0


def _machine_outcomes() -> list[Outcome]:
    """Run the machine checks of `vlmrl doctor` and of every run."""
    outcomes = []
    for check in machine.CHECKS:
        started = time.monotonic()
        finding = machine.run_check(check)
        state: Any = "ok" if finding.ok or not finding.essential else "failed"
        warning = "" if finding.ok or finding.essential else f" (low: {finding.fix})"
        avoid = finding.fix if state == "failed" else ""
        figure = finding.detail + warning
        outcomes.append(Outcome(finding.name, state, time.monotonic() - started, figure, avoid))
    return outcomes


class _Report:
    """Prints outcomes as checks end, and below them the checks that are running."""

    def __init__(self, *, as_json: bool) -> None:
        self.has_failed = False
        self._as_json = as_json
        self._console = Console(highlight=False)
        self._status = self._console.status("starting")
        self._running: list[str] = []
        self._lock = threading.Lock()

    def __enter__(self) -> _Report:
        if not self._as_json:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def begin(self) -> None:
        if not self._as_json:
            device = "NVIDIA GPU" if has_gpu() else "no GPU"
            cores = len(os.sched_getaffinity(0))
            self._console.print(f"[bold]vlmrl {vlmrl.__version__}[/bold] self-test: {device}, {cores} cores")

    def check_started(self, name: str) -> None:
        """Show that a check is running."""
        with self._lock:
            if name not in self._running:
                self._running.append(name)
            self._status.update(", ".join(self._running))

    def check_ended(self, outcome: Outcome) -> None:
        """Print the outcome of a check."""
        with self._lock:
            self.has_failed |= outcome.state == "failed"
            self._running = [name for name in self._running if name != outcome.check]
            if self._as_json:
                sys.stdout.write(json.dumps(asdict(outcome) | {"seconds": round(outcome.seconds, 2)}) + "\n")
                sys.stdout.flush()
                return
            self._status.update(", ".join(self._running))
            line = Text(f"{outcome.state:8}", style=_STYLES[outcome.state])
            line.append(f"{outcome.check:{_NAME_WIDTH}}{outcome.seconds:6.1f} s  ", style="default")
            line.append(outcome.figure, style="default")
            if outcome.avoid:
                line.append(f"\n{'':8}to avoid it: {outcome.avoid}", style="default")
            # One line per outcome, however narrow the terminal: reports are pasted into issues.
            self._console.print(line, soft_wrap=True)

    def end(self, seconds: float, *, logs: Path | None) -> None:
        if self._as_json:
            if logs is not None:
                sys.stderr.write(f"logs of the failed checks are in {logs}\n")
            return
        if logs is None:
            self._console.print(f"[green]Everything that can run here works[/green] ({seconds:.0f} s).")
        else:
            line = f"[red]Something does not work[/red] ({seconds:.0f} s); its logs are in {logs}"
            self._console.print(line, soft_wrap=True)
