"""The label of a row as the text that responses are compared with, whatever type its column has."""

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
"""A datetime is a date."""


def label_text(value: Any, *, precision: str | None = None) -> str | None:
    """What the row says, written as people write it; None where it says nothing (null, or NaN of a table).

    `precision` is the column's type where it is a float of fewer bits than Python's (`float32`): such a 0.1 is held as
    0.10000000149011612. Examples: Decimal("3.50") -> `3.50`, a date -> `2024-01-31`, True -> `true`,
    [Decimal("1.5"), "é"] -> `[1.5, "é"]`.

    Raises:
        DataError: the value has a type that no text stands for.
    """
    value = _plain(value, precision)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, float) and math.isnan(value):
        return None
    return json.dumps(value, ensure_ascii=False)


def class_name(value: Any, names: Sequence[str]) -> Any:
    """What the number of a class stands for: nobody asked for a number is answered with one. -1 is no class, as in
    Hugging Face's `datasets`; without `names` the value stays as it is."""
    if not names or not isinstance(value, int) or value >= len(names):
        return value
    return names[value] if value >= 0 else None


def _plain(value: Any, precision: str | None) -> Any:
    """The value in types of JSON."""
    if isinstance(value, np.generic | np.ndarray):
        precision = value.dtype.name if value.dtype.kind == "f" else None
        value = value.tolist()
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return _rounded(value, precision)
    if isinstance(value, Decimal):
        # Not its own `str`, which is 0E-10 of a zero with ten places.
        return format(value, "f")
    if isinstance(value, _DATES):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _inner(part, precision) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_inner(part, precision) for part in value]
    raise DataError(f"a label is text, a number, a date or a list of them, not {type(value).__name__}")


def _inner(value: Any, precision: str | None) -> Any:
    """The same inside of a list, where a decimal is a number if one can hold it."""
    if isinstance(value, Decimal) and value.is_finite():
        number = float(value)
        if format(value, "f") == repr(number):
            return number
    return _plain(value, precision)


def _rounded(value: float, precision: str | None) -> float:
    """The shortest number that is this one in fewer bits."""
    if precision not in ("float16", "float32") or not math.isfinite(value):
        return value
    return float(str(np.dtype(precision).type(value)))
