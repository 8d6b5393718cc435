"""Convert labels of any column type to the text that responses are compared with."""

from __future__ import annotations

import datetime as dt
import json
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np

from vlmrl.errors import DataError

_DATES = (dt.date, dt.time, dt.timedelta)
"""`datetime` is a subclass of `date`."""
_MAX_CHARS = 80
"""Of a label in a message."""


def label_text(value: Any, *, precision: str | None = None) -> str | None:
    """Write a label as people would; None for null, and for NaN, which tables use for missing values.

    `precision` is the column's type if it is narrower than Python's float (`float32`), where 0.1 is stored as
    0.10000000149011612. Examples: Decimal("3.50") -> `3.50`, a date -> `2024-01-31`, True -> `true`,
    [Decimal("1.5"), "é"] -> `[1.5, "é"]`.

    Raises:
        DataError: the type of the value has no text form.
    """
    value = _plain(value, precision)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, float) and math.isnan(value):
        return None
    return json.dumps(value, ensure_ascii=False)


def class_name(value: Any, names: Sequence[str]) -> Any:
    """Replace a class index by its name, which is what a response says.

    -1 means no class, as in Hugging Face's `datasets`, and becomes None. Without `names` the value is unchanged.
    """
    if not names or not isinstance(value, int) or value >= len(names):
        return value
    return names[value] if value >= 0 else None


def _plain(value: Any, precision: str | None) -> Any:
    """Convert a value to JSON types."""
    if isinstance(value, np.generic | np.ndarray):
        precision = value.dtype.name if value.dtype.kind == "f" else None
        value = value.tolist()
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return _rounded(value, precision)
    if isinstance(value, Decimal):
        # `str` would give 0E-10 for a zero with ten decimal places.
        return format(value, "f")
    if isinstance(value, _DATES):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain_item(part, precision) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_item(part, precision) for part in value]
    raise DataError(f"a label is text, a number, a date or a list of them, not {type(value).__name__}")


def format_label(label: object) -> str:
    """Format a label for a message, shortened if it is long."""
    text = repr(label)
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."


def _plain_item(value: Any, precision: str | None) -> Any:
    """Convert an item of a list or mapping, where a decimal becomes a number if a float represents it exactly."""
    if isinstance(value, Decimal) and value.is_finite():
        number = float(value)
        if format(value, "f") == repr(number):
            return number
    return _plain(value, precision)


def _rounded(value: float, precision: str | None) -> float:
    """Return the shortest number that rounds to the same value in the given precision."""
    if precision not in ("float16", "float32") or not math.isfinite(value):
        return value
    return float(str(np.dtype(precision).type(value)))
