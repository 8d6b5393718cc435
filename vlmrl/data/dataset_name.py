"""What stands behind a dataset's name: its options, `?size=2000&seed=1`, and its columns, `:input_key=problem`."""

from __future__ import annotations

import re
import typing
from pathlib import Path
from typing import Any

from vlmrl.config.data import COLUMN_KEYS
from vlmrl.errors import ConfigError

_COLUMNS = re.compile(r"(?::\w+=[^:=&?,]+)+\Z")
"""Behind a dataset's name: `:input_key=problem:label_key=solution`."""


def split_columns(spec: str) -> tuple[str, dict[str, str]]:
    """A dataset's name, and the columns behind it: `a.jsonl:label_key=gold` -> `a.jsonl`, `{"label_key": "gold"}`."""
    found = None if Path(spec).exists() else _COLUMNS.search(spec)
    if found is None:
        return spec, {}
    named = dict(pair.split("=") for pair in found.group()[1:].split(":"))
    for name in named:
        if name not in COLUMN_KEYS:
            raise ConfigError(f"dataset {spec}: no column setting {name!r}; there are {', '.join(COLUMN_KEYS)}")
    return spec[: found.start()], named


def split_names(spec: str, endings: tuple[str, ...]) -> list[str]:
    """The names of a comma-separated list. A comma inside of a question that is asked (`?question=`) parts nothing:
    what follows it has none of the `endings` of a dataset's name, and is no path."""
    specs: list[str] = []
    for part in spec.split(","):
        name = split_columns(part.strip())[0].partition("?")[0]
        is_dataset = "/" in name or name.endswith(endings) or Path(name).exists()
        if specs and "?question=" in specs[-1] and not is_dataset:
            specs[-1] += f",{part}"
        else:
            specs.append(part)
    return [part.strip() for part in specs if part.strip()]


def parse_options(query: str, spec: str) -> dict[str, str]:
    """`a=1&b=2` -> `{"a": "1", "b": "2"}`. `spec` is the whole name, for messages."""
    pairs = [pair.partition("=") for pair in query.split("&") if pair]
    for key, equals, value in pairs:
        if not (key and equals and value):
            raise ConfigError(f"dataset {spec}: options are written name?key=value&key=value")
    return {key: value for key, _, value in pairs}


def convert_option(text: str, kind: Any, what: str) -> Any:
    """An option's text as the type that the dataset's `rows` declares."""
    if typing.get_origin(kind) is tuple:
        return tuple(convert_option(part, typing.get_args(kind)[0], what) for part in text.split("+") if part)
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise ConfigError(f"dataset option {what}={text}: true or false is expected")
        return text.lower() in ("true", "1")
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError as error:
            raise ConfigError(f"dataset option {what}={text}: a number is expected") from error
    return text
