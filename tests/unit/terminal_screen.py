"""A terminal for tests: a program on a pseudo-terminal, and the rows that its output leaves on the screen."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from typing import NamedTuple

_TOKEN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x1b]")


class Shown(NamedTuple):
    """What a program left on its terminal."""

    rows: list[str]
    column: int
    """The cursor's column at the end."""
    exit_code: int
    output: str


def run_on_terminal(
    script: str,
    *arguments: str,
    columns: int = 100,
    on_output: Callable[[bytes, subprocess.Popen[bytes]], None] | None = None,
) -> Shown:
    """Run a Python script on a terminal with this number of columns. `on_output` gets all output so far."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "", "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    output = b""
    while chunk := _read(ours):
        output += chunk
        if on_output is not None:
            on_output(output, process)
    os.close(ours)
    rows, column = screen(output.decode(errors="replace"), columns)
    return Shown(rows, column, process.wait(60), output.decode(errors="replace"))


def screen(output: str, columns: int) -> tuple[list[str], int]:
    """Return the rows of a terminal after this output, and the cursor's column.

    Raises:
        AssertionError: the output has another control sequence than those of a live display, or leaves the screen.
    """
    rows, row, column = [""], 0, 0
    for token in _TOKEN.findall(output):
        if token == "\r":
            column = 0
        elif token == "\n":
            row += 1
        elif token.endswith("A") and token[0] == "\x1b":
            row -= int(token[2:-1])
            assert row >= 0, "the display erases what was above it"
        elif token == "\x1b[2K":
            rows[row] = ""
        elif token[0] == "\x1b":
            assert token.endswith("m"), f"control sequence {token!r}"
        else:
            if column == columns:
                row, column = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
            rows[row] = rows[row].ljust(column)[:column] + token + rows[row][column + 1 :]
            column += 1
        rows += [""] * (row + 1 - len(rows))
    return [text.rstrip() for text in rows], column


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the program has ended
        return b""
