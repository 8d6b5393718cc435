"""Redirect the error output of Ray and other libraries from the terminal to a file in the run's folder."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from vlmrl.errors import VlmrlError
from vlmrl.observe.terminal import TerminalStream

_NOISY = ("ray", "datasets", "fsspec", "huggingface_hub", "torch.distributed", "transformers")
"""Loggers of libraries that repeat our errors in other words."""
_STDOUT, _STDERR = 1, 2


class Log:
    """Context in which the error output of native code and the log records of libraries go to a file.

    Python's `sys.stdout` and `sys.stderr` still reach the terminal. The standard output of native code goes to the file
    as well if it is a terminal, where it would tear the live panel. Until `move_to` names the file, output goes to a
    temporary one. Output to a closed terminal, or to a `tee` that the same Ctrl-C has ended, is dropped and does not
    end the run.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._begin = 0
        self._saved: dict[int, int] = {}
        """A redirected descriptor -> a copy of what it was."""
        self._stderr, self._stdout = sys.stderr, sys.stdout
        self._stderr_stream: TerminalStream | None = None
        self._stdout_stream: TerminalStream | None = None
        self._handlers: dict[str, tuple[list[logging.Handler], bool]] = {}

    def __enter__(self) -> Self:
        self._stderr, self._stdout = sys.stderr, sys.stdout
        self._saved[_STDERR] = os.dup(_STDERR)
        with suppress(OSError, ValueError, AttributeError):  # it may be an object without a descriptor
            if sys.stderr.fileno() == _STDERR:
                sys.stderr.flush()
                self._stderr_stream = TerminalStream(self._saved[_STDERR])
                sys.stderr = self._stderr_stream
        with suppress(OSError, ValueError, AttributeError):
            if sys.stdout.fileno() == _STDOUT:
                sys.stdout.flush()
                if os.isatty(_STDOUT):
                    self._saved[_STDOUT] = os.dup(_STDOUT)
                descriptor = self._saved.get(_STDOUT, _STDOUT)
                sys.stdout = self._stdout_stream = TerminalStream(descriptor, encoding=sys.stdout.encoding)
        self._redirect()
        handler = logging.StreamHandler(TerminalStream(_STDERR))
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        for name in _NOISY:
            logger = logging.getLogger(name)
            self._handlers[name] = (logger.handlers[:], logger.propagate)
            logger.handlers, logger.propagate = [handler], False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, (handlers, propagate) in self._handlers.items():
            logger = logging.getLogger(name)
            logger.handlers, logger.propagate = handlers, propagate
        if self._stderr_stream is not None:
            if sys.stderr is self._stderr_stream:
                sys.stderr = self._stderr
            self._stderr_stream.descriptor = _STDERR  # a library may still hold this stream
        if self._stdout_stream is not None:
            if sys.stdout is self._stdout_stream:
                sys.stdout = self._stdout
            self._stdout_stream.descriptor = _STDOUT
        for descriptor, copy in self._saved.items():
            os.dup2(copy, descriptor)
            os.close(copy)
        if self.path is None and error is not None and not isinstance(error, VlmrlError):
            # There is no log file yet, and a bug is reported with all output.
            self._file.seek(0)
            self.write(self._file.read().decode(errors="replace"), to=_STDERR)
        self._file.close()

    def move_to(self, path: Path) -> None:
        """Append all output so far and from now on to this file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
        self._begin = file.tell()
        self._file.seek(0)
        file.write(self._file.read())
        file.flush()
        self._file.close()
        self._file, self.path = file, path
        self._redirect()

    def _redirect(self) -> None:
        for descriptor in self._saved:
            os.dup2(self._file.fileno(), descriptor)

    def write(self, text: str, *, to: int | None = None) -> None:
        """Write text that is too long for the terminal to the file, or to the descriptor `to`."""
        with suppress(OSError):  # a full disk must not hide the error to be reported
            os.write(self._file.fileno() if to is None else to, text.encode(errors="backslashreplace"))

    @property
    def has_grown(self) -> bool:
        """Whether this run has written to the file, and the file still exists."""
        try:
            return self.path is not None and self.path.stat().st_size > self._begin
        except OSError:  # the disk fails or the folder is gone; that is reported elsewhere
            return False


@contextmanager
def run_log() -> Iterator[Log]:
    """Open a log for the length of a run; an error that ends the run names its file."""
    try:
        with Log() as log:
            try:
                yield log
            finally:
                has_grown = log.has_grown
    except VlmrlError as error:
        if not has_grown:
            raise
        raise type(error)(f"{error} (output of Ray and libraries: {log.path})") from None
