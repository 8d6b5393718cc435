"""Write a run's report during the run, in a process of its own that takes time only when others do not need it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

MAX_MIB = 15.0
_SHARE = 0.02
"""Largest share of a core, over the run, that the report takes."""


class BackgroundReport:
    """The report of a run that goes on. Its failures are returned, never raised."""

    def __init__(
        self, folder: Path, *, command: tuple[str, ...] = (sys.executable, "-P", "-m", "vlmrl.report")
    ) -> None:
        self._folder = folder
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._begun_at = 0.0
        self._next_at = 0.0
        self._failure: str | None = None
        """Why the last process could not start."""

    def refresh(self) -> str | None:
        """Begin to write the report, unless it is being written or was a short time ago.

        Returns at once: why an earlier one failed, or None.
        """
        failure = self._collect()
        if self._process is None and time.monotonic() >= self._next_at:
            self._begin()
        return failure or self._failure

    def finish_soon(self) -> None:
        """Begin the last report. One that is being written is older than the run's last lines, and ends."""
        self._end()
        self._begin()

    def wait(self, timeout_s: float) -> str | None:
        """Wait for the last report. Returns why it failed, or None."""
        if self._process is None:
            return self._failure
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        if self._process.poll() is None:
            self._end()
            return f"it took more than {timeout_s:g} s"
        return self._collect()

    def _begin(self) -> None:
        self._begun_at = time.monotonic()
        self._failure = None
        try:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (the process outlives this call)
            self._process = subprocess.Popen(
                [*self._command, str(os.getpid()), str(self._folder), str(MAX_MIB)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C is for the run, which then has the last report written
            )
        except OSError as error:  # no process, memory or temporary folder left: the next one may succeed
            self._failure = f"its process could not start: {error}"
            self._close()

    def _collect(self) -> str | None:
        """Take note of a process that has ended; return its error."""
        if self._process is None or self._process.poll() is None:
            return None
        self._next_at = time.monotonic() + (time.monotonic() - self._begun_at) / _SHARE
        code, failure = self._process.returncode, None
        if code and self._errors is not None:
            self._errors.seek(0)
            lines = self._errors.read()[-2000:].decode(errors="replace").strip().splitlines()
            failure = lines[-1] if lines else f"its process ended with {code}"
        self._close()
        return failure

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._close()

    def _close(self) -> None:
        self._process = None
        if self._errors is not None:
            self._errors.close()
            self._errors = None
