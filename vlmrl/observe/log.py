"""Redirect the error output of Ray and other libraries from the terminal to a file in the run's folder."""

from __future__ import annotations

import io
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

_NOISY = ("ray", "datasets", "fsspec", "huggingface_hub", "torch.distributed", "transformers")
"""Loggers of libraries that repeat our errors in other words."""
_STDOUT, _STDERR = 1, 2


class Log:
    """Context in which the error output of native code and the log records of libraries go to a file.

    Python's `sys.stderr` still reaches the terminal. Until `move_to` names the file, output goes to a temporary one.
    Output to a closed terminal, or to a `tee` that the same Ctrl-C has ended, is dropped and does not end the run.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._begin = 0
        self._saved = -1
        self._stderr, self._stdout = sys.stderr, sys.stdout
        self._stderr_stream: _Descriptor | None = None
        self._stdout_stream: _Descriptor | None = None
        self._handlers: dict[str, tuple[list[logging.Handler], bool]] = {}

    def __enter__(self) -> Self:
        self._stderr, self._stdout = sys.stderr, sys.stdout
        self._saved = os.dup(_STDERR)
        with suppress(OSError, ValueError, AttributeError):  # it may be an object without a descriptor
            if sys.stderr.fileno() == _STDERR:
                sys.stderr.flush()
                self._stderr_stream = _Descriptor(self._saved)
                sys.stderr = self._stderr_stream
        with suppress(OSError, ValueError, AttributeError):
            if sys.stdout.fileno() == _STDOUT:
                sys.stdout.flush()
                sys.stdout = self._stdout_stream = _Descriptor(_STDOUT, encoding=sys.stdout.encoding)
        os.dup2(self._file.fileno(), _STDERR)
        handler = logging.StreamHandler(_Descriptor(_STDERR))
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
        if self._stdout_stream is not None and sys.stdout is self._stdout_stream:
            sys.stdout = self._stdout
        os.dup2(self._saved, _STDERR)
        os.close(self._saved)
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
        os.dup2(file.fileno(), _STDERR)
        self._file.close()
        self._file, self.path = file, path

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


class _Descriptor(io.TextIOBase):
    """Unbuffered text stream over a file descriptor, which drops text that cannot be written."""

    def __init__(self, descriptor: int, *, encoding: str = "utf-8") -> None:
        self.descriptor = descriptor
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def write(self, text: str) -> int:
        left = text.encode(self.encoding, errors="backslashreplace")
        with suppress(OSError):  # a closed terminal or a full disk does not end a run
            while left:
                left = left[os.write(self.descriptor, left) :]
        return len(text)

    def fileno(self) -> int:
        return self.descriptor

    def isatty(self) -> bool:
        return os.isatty(self.descriptor)


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
