"""The terminal of a run: one live display at its end, and all other output above it, line by line."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, Any, cast

from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.live import Live
from rich.text import Text

from vlmrl.system import stops
from vlmrl.system.plain_text import print_line

_REFRESHES_PER_S = 4
_MAX_LINE = 1 << 16
"""Characters of an unfinished line that are kept; progress bars of libraries may never end theirs."""


class TerminalStream(io.TextIOBase):
    """Unbuffered text stream over a file descriptor, which drops text that cannot be written.

    While a live display is at the end of the terminal, `divert` hands the text to it.
    """

    def __init__(self, descriptor: int, *, encoding: str = "utf-8") -> None:
        self.descriptor = descriptor
        self._encoding = encoding
        self._diverted: Callable[[str], None] | None = None

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def write(self, text: str) -> int:
        if self._diverted is not None:
            self._diverted(text)
            return len(text)
        left = text.encode(self.encoding, errors="backslashreplace")
        with suppress(OSError):  # a closed terminal or a full disk does not end a run
            while left:
                left = left[os.write(self.descriptor, left) :]
        return len(text)

    def fileno(self) -> int:
        return self.descriptor

    def isatty(self) -> bool:
        # Beside a live display libraries must not move the cursor.
        return self._diverted is None and os.isatty(self.descriptor)

    @contextmanager
    def divert(self, write: Callable[[str], None]) -> Iterator[None]:
        """Hand the text to `write` within the context, also what holders of this stream write."""
        self._diverted = write
        try:
            yield
        finally:
            self._diverted = None


class Lines:
    """Collects text to lines, a line of each thread by itself, and hands complete lines to `show`."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._partial: dict[int, str] = {}
        self._lock = threading.RLock()  # a signal handler may write while its thread writes

    def write(self, text: str) -> None:
        thread = threading.get_ident()
        with self._lock:
            *lines, rest = (self._partial.pop(thread, "") + text).split("\n")
            if len(rest) > _MAX_LINE:
                rest = rest[rest.rfind("\r") + 1 :][-_MAX_LINE:]
            if rest:
                self._partial[thread] = rest
        for line in lines:
            self._show(_visible(line))

    def finish(self) -> None:
        """Show lines that were not ended."""
        with self._lock:
            lines, self._partial = list(self._partial.values()), {}
        for line in lines:
            self._show(_visible(line))


def _visible(line: str) -> str:
    """Return what a terminal would show of a line: without colours, and the text after the last carriage return."""
    return Text.from_ansi(line.rstrip("\r").rsplit("\r", 1)[-1]).plain


class Terminal(Console):
    """A console on a terminal, which it leaves usable however the process ends: the cursor is never hidden."""

    def __init__(self, descriptor: int, *, encoding: str) -> None:
        file = cast("IO[str]", TerminalStream(descriptor, encoding=encoding))
        super().__init__(file=file, force_terminal=True)
        self.drawing = threading.RLock()
        """Held while something is printed. rich locks the steps of a print separately: between where a display begins
        and the output of its new lines, another thread could print, and lines would be lost."""

    def print(self, *objects: Any, **options: Any) -> None:
        with self.drawing:
            super().print(*objects, **options)

    @property  # type: ignore[misc]  # rich lets others set it
    def size(self) -> ConsoleDimensions:
        """Size of the terminal that is written to; rich asks descriptors 0 to 2, which may be files."""
        with suppress(OSError):  # it was closed
            columns, lines = os.get_terminal_size(self.file.fileno())
            if columns and lines:
                return ConsoleDimensions(columns, lines)
        return super().size

    def show_cursor(self, show: bool = True) -> bool:
        return False


def open_console() -> Console:
    """Return a console on standard output: a `Terminal` where a live display can be, else plain text."""
    stream = sys.stdout
    if isinstance(stream, TerminalStream) and stream.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        return Terminal(stream.fileno(), encoding=stream.encoding)
    return Console(force_terminal=False)


class LiveDisplay:
    """Draws `render()` at the end of the terminal, four times a second. Use as a context manager.

    The last line of the terminal stays empty, for what the shell or a killed process writes there.
    """

    def __init__(self, console: Console, render: Callable[[], RenderableType]) -> None:
        self._console = console
        self._live = _Live(render=render, console=console)
        self._contexts = ExitStack()

    def __enter__(self) -> None:
        self._contexts.enter_context(stops.before_kill(self._live.freeze))
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TerminalStream) and stream.isatty():
                lines = Lines(lambda line: print_line(self._console, line))
                self._contexts.callback(lines.finish)
                self._contexts.enter_context(stream.divert(lines.write))
        self._live.start()
        self._contexts.callback(self._live.stop)

    def __exit__(self, *error: object) -> None:
        self._contexts.close()


class _Live(Live):
    def __init__(self, *, render: Callable[[], RenderableType], console: Console) -> None:
        self._is_frozen = False
        super().__init__(
            get_renderable=render,
            console=console,
            refresh_per_second=_REFRESHES_PER_S,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        if isinstance(console, Terminal):
            self._lock = console.drawing  # one lock for both, else each could wait for the other

    def get_renderable(self) -> RenderableType:
        display = super().get_renderable()
        return Group(display, Text()) if self.is_started else display

    def refresh(self) -> None:
        if not self._is_frozen:
            super().refresh()

    def freeze(self) -> None:
        """Draw nothing more. Takes no lock: a thread may be waiting for a blocked terminal."""
        self._is_frozen = True
