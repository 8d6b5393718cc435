"""Escape untrusted text to one line that is safe to print."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def one_line(text: object, *, max_chars: int | None = None) -> str:
    """Return `str(text)` on one line of printable characters, cut to `max_chars` characters.

    Line breaks, control sequences, marks of writing direction and lone surrogates are escaped.
    Example: `a` + newline + ESC + `[31m` -> `a\\n\\x1b[31m`.
    """
    text = str(text)
    if max_chars is not None and len(text) > max_chars:
        text = f"{text[:max_chars]}..."
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def print_line(console: Console, text: object) -> None:
    """Print one plain line, without markup, emoji codes, colours or wrapping."""
    console.print(one_line(text), markup=False, highlight=False, emoji=False, soft_wrap=True)
