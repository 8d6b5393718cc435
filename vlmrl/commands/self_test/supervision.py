"""Run each theme in its own process, so that a check that crashes or hangs does not affect other themes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

import vlmrl
from vlmrl import startup
from vlmrl.commands.self_test.outcome import Check, Outcome, Theme
from vlmrl.startup.driver import has_gpu, shows_gpu

_GRACE_S = 10.0
"""For a process to end, and the processes that it started."""
_NO_GPU = {False: "no NVIDIA device", True: "CUDA_VISIBLE_DEVICES hides every GPU"}
"""Whether there is a GPU -> why checks that need one are skipped."""


class Supervisor:
    """Runs themes, some of them in parallel."""

    def __init__(
        self,
        folder: Path,
        *,
        on_end: Callable[[Outcome], None],
        on_start: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Themes get folders below `folder`.

        `on_start` is called with the name of each check that starts, `on_end` with each outcome, from several threads.
        """
        self._folder, self._on_end, self._on_start = folder, on_end, on_start
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._is_stopped = threading.Event()

    def run(self, themes: Sequence[Theme], *, at_once: int) -> None:
        """Run all themes. No process is left at the end, even after Ctrl-C."""
        pool = ThreadPoolExecutor(max_workers=at_once)
        try:
            for future in [pool.submit(self._run_theme, theme) for theme in themes]:
                future.result()
        finally:
            self._is_stopped.set()
            for process in list(self._processes):
                _end(process)
            pool.shutdown(cancel_futures=True)

    def _run_theme(self, theme: Theme) -> None:
        remaining = list(theme.checks)
        if not shows_gpu():
            for check in [check for check in remaining if check.needs_gpu]:
                remaining.remove(check)
                self._on_end(Outcome(check.name, "skipped", 0.0, _NO_GPU[has_gpu()]))
        while remaining and not self._is_stopped.is_set():
            remaining = self._run_checks(theme, remaining)

    def _run_checks(self, theme: Theme, checks: Sequence[Check]) -> list[Check]:
        """Run checks in one process until it dies; return the checks that are left."""
        folder = self._folder / theme.name.replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "log.txt"
        self._on_start(checks[0].name)
        started = time.monotonic()
        ours, process = self._launch(theme, checks, folder, log)
        try:
            ready = _message(ours, process, theme.limit_s, log)
            if ready["state"] != "ok":
                ready |= {"avoid": ready.get("avoid") or theme.avoid}
                for check in checks:
                    self._conclude(check, ready, time.monotonic() - started)
                    started = time.monotonic()
                return []
            for number, check in enumerate(checks):
                self._on_start(check.name)
                message = _message(ours, process, check.limit_s, log)
                self._conclude(check, message, time.monotonic() - started)
                started = time.monotonic()
                if "is_gone" in message:
                    return list(checks[number + 1 :])
            _wait(process)
            return []
        finally:
            _end(process)
            self._processes.discard(process)
            ours.close()

    def _launch(
        self, theme: Theme, checks: Sequence[Check], folder: Path, log: Path
    ) -> tuple[Connection, subprocess.Popen[bytes]]:
        ours, theirs = Pipe(duplex=False)
        task = {
            "setup": theme.setup,
            "functions": [check.function for check in checks],
            "folder": str(folder),
            "parent": os.getpid(),
            "pipe": theirs.fileno(),
        }
        # Sockets of killed engines are removed with the folder.
        environment = os.environ | startup.environment() | {"TMPDIR": str(self._folder)}
        environment["PYTHONPATH"] += f"{os.pathsep}{Path(vlmrl.__file__).parents[1]}"
        # The test is of this machine, not of a cluster that the user has joined.
        environment.pop("RAY_ADDRESS", None)
        with log.open("ab") as file:
            process = subprocess.Popen(
                # -P: a folder called `ray` in the working directory is not Ray.
                [sys.executable, "-P", "-m", "vlmrl.commands.self_test.child", json.dumps(task)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=(theirs.fileno(),),
                # Ctrl-C reaches only this process, which ends the others in order.
                start_new_session=True,
            )
        theirs.close()
        self._processes.add(process)
        if self._is_stopped.is_set():
            _end(process)
        return ours, process

    def _conclude(self, check: Check, message: dict[str, str], seconds: float) -> None:
        if self._is_stopped.is_set():
            return
        state = message["state"]
        avoid = (message.get("avoid") or check.avoid) if state == "failed" else ""
        self._on_end(Outcome(check.name, state, seconds, message["figure"], avoid))  # type: ignore[arg-type]


def _message(pipe: Connection, process: subprocess.Popen[bytes], limit_s: float, log: Path) -> dict[str, str]:
    """Return the next message of the process; a failure with `is_gone` when it died, or sent nothing within the
    limit."""
    gone = {"state": "failed", "is_gone": "yes"}
    try:
        if not pipe.poll(limit_s):
            return gone | {"figure": f"no result within {limit_s:.0f} s"}
        message: dict[str, str] = json.loads(pipe.recv_bytes())
        return message
    except (EOFError, OSError):
        code = _wait(process)
        return gone | {"figure": f"its process ended with code {code}: {_last_line(log)}"}


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its descendants. Idempotent."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.Error:
        family = []
    if process.poll() is None:
        process.kill()
    # Descendants would be adopted by init and go on. Python's resource trackers end last, and by themselves: they
    # remove what the others left in shared memory.
    trackers = [member for member in family if _tracks_resources(member)]
    _kill([member for member in family if member not in trackers])
    _kill(psutil.wait_procs(trackers, timeout=_GRACE_S)[1])
    _wait(process)


def _kill(family: Sequence[psutil.Process]) -> None:
    for member in family:
        try:
            member.kill()
        except psutil.Error:  # it has ended by itself
            continue
    psutil.wait_procs(family, timeout=_GRACE_S)


def _tracks_resources(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.Error:  # it has ended by itself
        return False
