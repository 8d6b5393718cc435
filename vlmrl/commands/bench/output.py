"""Output of a benchmark: JSON lines on stdout for programs, a table on stderr for users."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any


def print_json(**fields: Any) -> None:
    """Print one measurement as a line of JSON."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, the first column aligned to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, *rows):
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        sys.stderr.write("  ".join([row[0].ljust(len(first)), *others]) + "\n")
    sys.stderr.flush()
