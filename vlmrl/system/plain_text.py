"""Text that strangers wrote, as one line that a terminal can show."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def one_line(text: object, *, most: int | None = None) -> str:
    """`str(text)` on one line, of printable characters only; what is longer than `most` characters is cut.

    Line breaks, escape sequences, marks that turn the direction of writing and halves of surrogate pairs become their
    escapes. Example: `a` + newline + ESC + `[31m` -> `a\\n\\x1b[31m`. A line that is plain already stays as it is.
    """
    text = str(text)
    if most is not None and len(text) > most:
        text = f"{text[:most]}..."
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def print_line(console: Console, text: object) -> None:
    """Print one plain line: no markup, no emoji codes, no colours, no wrapping."""
    console.print(one_line(text), markup=False, highlight=False, emoji=False, soft_wrap=True)
