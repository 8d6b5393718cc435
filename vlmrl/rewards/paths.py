"""Removal of paths from messages to clients: only the last part of each leaves the machine."""

from __future__ import annotations

import re

_PART = r"[^\s/'\"`:,;()\[\]{}<>|]+"
_PATH = re.compile(
    rf"file:/+(?:{_PART}/)*(?P<address>{_PART})"
    # Absolute, of home or going up: at least two parts, so that fractions do not match.
    rf"|(?<![\w:/.~])(?:~[\w.-]*|\.{{1,2}})?(?:/{_PART})*/{_PART}/(?P<last>{_PART})"
    # Relative, of a file.
    rf"|(?<![\w:/.])(?:[\w.@+-]+/)+(?P<file>[\w@+-][\w.@+-]*\.[A-Za-z]\w*)"
    # Of home or going up, one part.
    rf"|(?<![\w:/.~])(?:~[\w.-]*|\.{{1,2}})/(?P<near>{_PART})"
)
_LAST = ("address", "last", "file", "near")


def without_paths(text: str) -> str:
    """Replace each path in `text` by `.../` and its last part. URLs stay."""
    return _PATH.sub(lambda match: f".../{next(filter(None, map(match.group, _LAST)))}", text)
