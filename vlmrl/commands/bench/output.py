"""What a benchmark says: JSON lines on stdout for programs, a table on stderr for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any


def say(**fields: Any) -> None:
    """One measurement."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The same for people: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, *rows):
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        sys.stderr.write("  ".join([row[0].ljust(len(first)), *others]) + "\n")
    sys.stderr.flush()
