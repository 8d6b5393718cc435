"""What vLLM's processes write to the console, caught: quiet while all is well, and the cause at hand when it is not."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections import deque
from types import TracebackType
from typing import Self

_SENDER = re.compile(r"^(\([\w-]+ pid=\d+\) ?)+")
_LOG_HEAD = re.compile(r"^(ERROR|CRITICAL) \S+ \S+ \[[^\]]*\] ?")
_EXCEPTION = re.compile(r"^(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): .")
_CONSEQUENCE = re.compile(
    r"Engine ?[Cc]ore .*(failed|encountered)|WorkerProc initialization failed|cannot schedule new futures"
)
_KEPT = 1000


class Console:
    """Inside `with`, what this process and the children it starts write to stdout and stderr is kept, not shown.

    A child that was started inside keeps writing here for its whole life, so that the reason is known when it dies.
    With VLLM_LOGGING_LEVEL at INFO or DEBUG nothing is caught: everything is shown as vLLM writes it.
    """

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_KEPT)
        self._saved: tuple[int, int] | None = None

    def __enter__(self) -> Self:
        if os.environ.get("VLLM_LOGGING_LEVEL", "WARNING") not in ("WARNING", "ERROR", "CRITICAL"):
            return self
        _flush()
        reader, writer = os.pipe()
        self._saved = os.dup(1), os.dup(2)
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        os.close(writer)
        threading.Thread(target=self._keep, args=(reader,), name="vlmrl-console", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._saved is None:
            return
        _flush()
        for descriptor, saved in zip((1, 2), self._saved, strict=True):
            os.dup2(saved, descriptor)
            os.close(saved)
        self._saved = None

    def cause(self) -> str | None:
        """The last exception that was written and is not merely the consequence of another; None when none was."""
        return find_cause(list(self._lines))

    def _keep(self, reader: int) -> None:
        with os.fdopen(reader, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                self._lines.append(line.rstrip("\n"))


def find_cause(lines: list[str]) -> str | None:
    """The last line, without vLLM's prefixes, that ends a traceback and is not merely the consequence of another."""
    for line in reversed(lines):
        bare = _LOG_HEAD.sub("", _SENDER.sub("", line))
        if _EXCEPTION.match(bare) and not _CONSEQUENCE.search(bare):
            return bare.strip()
    return None


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
