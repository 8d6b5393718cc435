"""Keeps what Ray and the libraries write to the error stream out of a run's few lines, in a file of its folder."""

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
"""Loggers of libraries that report our errors once more, in words of their own."""
_STDOUT, _STDERR = 1, 2


class Log:
    """Inside `with`, what native code writes to the error stream and what libraries log goes to a file, not to people.

    Python's own `sys.stderr` still reaches people. Until `keep_in` names the file, what comes is held back. What nobody
    can read any more, since the terminal is closed or `tee` has ended by the same Ctrl-C, is dropped, and ends no run.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._begin = 0
        self._saved = -1
        self._stderr, self._stdout = sys.stderr, sys.stdout
        self._own: _Descriptor | None = None
        self._out: _Descriptor | None = None
        self._handlers: dict[str, tuple[list[logging.Handler], bool]] = {}

    def __enter__(self) -> Self:
        self._stderr, self._stdout = sys.stderr, sys.stdout
        self._saved = os.dup(_STDERR)
        with suppress(OSError, ValueError, AttributeError):  # somebody else may have replaced it, by what is no file
            if sys.stderr.fileno() == _STDERR:
                sys.stderr.flush()
                self._own = _Descriptor(self._saved)
                sys.stderr = self._own
        with suppress(OSError, ValueError, AttributeError):
            if sys.stdout.fileno() == _STDOUT:
                sys.stdout.flush()
                sys.stdout = self._out = _Descriptor(_STDOUT, encoding=sys.stdout.encoding)
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
        if self._own is not None:
            if sys.stderr is self._own:
                sys.stderr = self._stderr
            self._own.descriptor = _STDERR  # a library may have kept it
        if self._out is not None and sys.stdout is self._out:
            sys.stdout = self._stdout
        os.dup2(self._saved, _STDERR)
        os.close(self._saved)
        if self.path is None and error is not None and not isinstance(error, VlmrlError):
            # No file of the run's was there yet, and a bug is told with all that is known.
            self._file.seek(0)
            self.write(self._file.read().decode(errors="replace"), to=_STDERR)
        self._file.close()

    def keep_in(self, path: Path) -> None:
        """From now on it is this file; what came before goes there, too. What an earlier run wrote stays."""
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
        """Something of ours that would be too long for people."""
        with suppress(OSError):  # a full disk must not hide what was to be told
            os.write(self._file.fileno() if to is None else to, text.encode(errors="backslashreplace"))

    @property
    def has_grown(self) -> bool:
        """Something was written for which people may look here, and it is still there."""
        try:
            return self.path is not None and self.path.stat().st_size > self._begin
        except OSError:  # the disk fails, or the folder is gone, of which the error tells
            return False


class _Descriptor(io.TextIOBase):
    """A file descriptor as a text stream without a buffer. What cannot be written is dropped."""

    def __init__(self, descriptor: int, *, encoding: str = "utf-8") -> None:
        self.descriptor = descriptor
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def write(self, text: str) -> int:
        left = text.encode(self.encoding, errors="backslashreplace")
        with suppress(OSError):  # the reader is gone, or the disk is full: words end no run
            while left:
                left = left[os.write(self.descriptor, left) :]
        return len(text)

    def fileno(self) -> int:
        return self.descriptor

    def isatty(self) -> bool:
        return os.isatty(self.descriptor)


@contextmanager
def logged() -> Iterator[Log]:
    """A log for the length of a run; the error that ends the run names it."""
    try:
        with Log() as log:
            try:
                yield log
            finally:
                has_grown = log.has_grown
    except VlmrlError as error:
        if not has_grown:
            raise
        raise type(error)(f"{error} (what Ray and the libraries wrote: {log.path})") from None
