"""Errors of single rows: any error drops its row and never ends the run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vlmrl.errors import DataError, VlmrlError
from vlmrl.plugins import first_line

_MAX_DEPTH = 64
"""Levels of lists and objects in a row."""


class UnusableError(Exception):
    """The row cannot become a prompt. `kind` is counted, `detail` is for the message."""

    def __init__(self, kind: str, detail: object) -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail


@contextmanager
def unusable_on_error(kind: str) -> Iterator[None]:
    """Convert any error of a reader, decoder or template to UnusableError, except errors in settings, which concern all
    rows."""
    try:
        yield
    except UnusableError:
        raise
    except DataError as error:
        raise UnusableError(kind, error) from error
    except VlmrlError:
        raise
    except Exception as error:
        raise UnusableError(kind, f"{type(error).__name__}: {first_line(error)}") from error


def metadata_of(row: Mapping[Any, Any], used: Iterable[str | None]) -> dict[str, Any]:
    """Return the columns of a row that are not in `used` and hold plain JSON. Raises ValueError for lone surrogates."""
    metadata = {
        key: value for key, value in row.items() if isinstance(key, str) and key not in used and _is_json(value)
    }
    # Raised here, since a lone surrogate would end the run in a reward function or a transcript.
    json.dumps(metadata, ensure_ascii=False).encode()
    return metadata


def _is_json(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_json(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return value is None or isinstance(value, str | int | float | bool)


def check_depth(value: object) -> None:
    """Raise DataError for a value nested so deeply that a recursive function may exhaust the stack."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, Mapping | list | tuple)
            for inner in (outer.values() if isinstance(outer, Mapping) else outer)
            if isinstance(inner, Mapping | list | tuple)
        ]
        if not level:
            return
    raise DataError(f"it is nested more than {_MAX_DEPTH} levels deep")
