"""Compare files of weights with their headers."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any


def damage(path: Path) -> str | None:
    """Compare a safetensors file with its header; None if it is whole."""
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            return "it has no header"
        (length,) = struct.unpack("<Q", start)
        if length > path.stat().st_size:
            return "its header is cut off"
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            wanted = 8 + length + max(ends, default=0)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):  # bytes of anything
            return "its header cannot be read"
    size = path.stat().st_size
    return None if size == wanted else f"it has {size:,} bytes of {wanted:,}"
