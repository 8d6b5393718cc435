"""Read the files of a run's folder, whatever has become of them: a report shows what can be read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

_LARGEST_STEP = 2**53
"""Larger integers are not exact in the page's script."""


def read_records(file: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run by step, in order: numbers, and None for NaN and infinity.

    Lines that are no record, and values that are no numbers, are left out.
    """
    return sorted(filter(None, map(_record, _lines(file))), key=lambda record: record["step"])


def _record(line: str) -> dict[str, Any] | None:
    record = _json(line)
    if not isinstance(record, dict) or type(record.get("step")) is not int or abs(record["step"]) > _LARGEST_STEP:
        return None
    return {name: _finite(value) for name, value in record.items() if value is None or type(value) in (int, float)}


def _finite(value: float | None) -> float | None:
    try:
        return value if value is not None and math.isfinite(value) else None
    except OverflowError:  # an integer beyond all floats
        return None


def read_parameters(file: Path) -> list[tuple[str, int, int]]:
    """Return the rows (part, trainable, all) of a run's table of parameters."""
    rows = []
    for line in list(_lines(file))[1:]:
        part, *numbers = line.split("\t")
        if len(numbers) == 2 and all(number.isdecimal() and len(number) < 16 for number in numbers):
            rows.append((part, int(numbers[0]), int(numbers[1])))
    return rows


def read_facts(file: Path) -> dict[str, Any]:
    """Return what a run wrote about itself (`observe.facts`), without facts of another form."""
    facts = _json("\n".join(_lines(file)))
    if not isinstance(facts, dict):
        return {}
    return {name: facts[name] for name, is_sound in _FACTS.items() if name in facts and is_sound(facts[name])}


def _is_placement(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(row, list) and all(map(_is_plain, row)) for row in value)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str) or (type(value) in (int, float) and _finite(value) is not None)


_FACTS: dict[str, Callable[[Any], bool]] = {
    "begun": lambda value: isinstance(value, str),
    "versions": lambda value: isinstance(value, dict) and all(map(_is_plain, value.values())),
    "total_steps": lambda value: type(value) is int and 0 <= value <= _LARGEST_STEP,
    "placement": _is_placement,
    "unit": lambda value: isinstance(value, str),
    "end": lambda value: isinstance(value, dict) and all(map(_is_plain, value.values())),
}


def read_settings(text: str) -> Mapping[Any, Any]:
    """Return the sections of a config.yaml; {} for one that was edited by hand and is no YAML."""
    try:
        loaded = yaml.safe_load(text)
        json.dumps(loaded, default=str)  # not for values that contain themselves
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def read_text(file: Path) -> str:
    """Return the text of a file, "" where there is none. Bytes that are no UTF-8 become replacement characters."""
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def _lines(file: Path) -> Iterator[str]:
    yield from read_text(file).split("\n")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # cut off when the run was killed, or of another program
        return None
