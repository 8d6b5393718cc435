"""Rows that cannot be used: whatever a row raises is its own fault, and ends nothing but the row."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vlmrl.errors import DataError, VlmrlError
from vlmrl.plugins import first_line

_DEEPEST = 64
"""Levels of lists and objects in a row."""


class UnusableError(Exception):
    """This row becomes no prompt. `kind` is what is counted, `detail` what is told."""

    def __init__(self, kind: str, detail: object) -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail


@contextmanager
def blamed_on_row(kind: str) -> Iterator[None]:
    """Whatever is raised inside, a reader, a decoder or a template raised it of this row; but not the mistakes in
    settings, which are the same for all rows."""
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
    """The columns of a row that are not `used` and hold plain JSON. ValueError for text that is none."""
    left = {key: value for key, value in row.items() if isinstance(key, str) and key not in used and _is_json(value)}
    # It travels to reward functions and into transcripts: half of a surrogate pair would end the run there.
    json.dumps(left, ensure_ascii=False).encode()
    return left


def _is_json(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_json(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return value is None or isinstance(value, str | int | float | bool)


def check_depth(value: object) -> None:
    """DataError for what is nested so deep that a function that follows it may run out of stack."""
    level = [value]
    for _ in range(_DEEPEST):
        level = [
            inner
            for outer in level
            if isinstance(outer, Mapping | list | tuple)
            for inner in (outer.values() if isinstance(outer, Mapping) else outer)
            if isinstance(inner, Mapping | list | tuple)
        ]
        if not level:
            return
    raise DataError(f"it is nested more than {_DEEPEST} deep")
