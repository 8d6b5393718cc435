"""Parse a dataset specification: name, options (`?size=2000&seed=1`) and columns (`:input_key=problem`)."""

from __future__ import annotations

import re
import typing
from pathlib import Path
from typing import Any

from vlmrl.config.data import COLUMN_KEYS
from vlmrl.config.pairs import PAIR_KEYS
from vlmrl.errors import ConfigError

_COLUMNS = re.compile(r"(?::\w+=[^:=&?,]+)+\Z")
"""Column settings after a dataset's name: `:input_key=problem:label_key=solution`."""


def split_columns(spec: str) -> tuple[str, dict[str, str]]:
    """Split off the column settings: `a.jsonl:label_key=gold` -> `a.jsonl`, `{"label_key": "gold"}`."""
    match = None if Path(spec).exists() else _COLUMNS.search(spec)
    if match is None:
        return spec, {}
    columns = dict(pair.split("=") for pair in match.group()[1:].split(":"))
    for name in columns:
        if name not in COLUMN_KEYS | PAIR_KEYS:
            names = ", ".join([*COLUMN_KEYS, *PAIR_KEYS])
            raise ConfigError(f"dataset {spec}: no column setting {name!r}; there are {names}")
    return spec[: match.start()], columns


def split_names(spec: str, suffixes: tuple[str, ...]) -> list[str]:
    """Split a comma-separated list of datasets.

    A comma inside `?question=` does not separate: the text after it has none of the `suffixes` of a dataset's name and
    is not a path.
    """
    specs: list[str] = []
    for part in spec.split(","):
        name = split_columns(part.strip())[0].partition("?")[0]
        is_dataset = "/" in name or name.endswith(suffixes) or Path(name).exists()
        if specs and "?question=" in specs[-1] and not is_dataset:
            specs[-1] += f",{part}"
        else:
            specs.append(part)
    return [part.strip() for part in specs if part.strip()]


def parse_options(query: str, spec: str) -> dict[str, str]:
    """Parse `a=1&b=2` into `{"a": "1", "b": "2"}`. `spec` is the whole specification, for messages."""
    pairs = [pair.partition("=") for pair in query.split("&") if pair]
    for key, equals, value in pairs:
        if not (key and equals and value):
            raise ConfigError(f"dataset {spec}: options are written name?key=value&key=value")
    return {key: value for key, _, value in pairs}


def convert_option(text: str, kind: Any, option: str) -> Any:
    """Convert an option to the type that the dataset's `rows` function declares."""
    if typing.get_origin(kind) is tuple:
        return tuple(convert_option(part, typing.get_args(kind)[0], option) for part in text.split("+") if part)
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise ConfigError(f"dataset option {option}={text}: true or false is expected")
        return text.lower() in ("true", "1")
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError as error:
            raise ConfigError(f"dataset option {option}={text}: a number is expected") from error
    return text
