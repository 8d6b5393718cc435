"""What a dataset's name stands for: a sequence of rows, whatever they come from."""

from __future__ import annotations

import difflib
import hashlib
import inspect
import random
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, overload

from vlmrl.errors import ConfigError, DataError
from vlmrl.plugins import first_line, looks_local, plugin, plugin_names

FILE_SUFFIXES = (".jsonl", ".json", ".parquet")
_OTHER_FILES = (
    ".csv",
    ".tsv",
    ".txt",
    ".xls",
    ".xlsx",
    ".arrow",
    ".feather",
    ".pkl",
    ".zip",
    ".tar",
    ".gz",
    ".zst",
)
"""Endings that no Hub id has."""

_SPLITS = {"train": range(80), "validation": range(80, 90), "test": range(90, 100)}
"""Which hundredths of all possible questions a generated split draws from."""
_MAX_TRIES = 20_000


@dataclass(frozen=True, slots=True)
class Rows(Sequence[dict[str, Any]]):
    """One dataset: its rows, and what is needed to name and to read them."""

    name: str
    """For messages and metrics: `visual_math`."""
    rows: Sequence[Mapping[str, Any]]
    columns: tuple[str, ...]
    image_columns: tuple[str, ...] = ()
    """The columns that are known to hold images."""
    root: Path | None = None
    """Where relative image paths start; None: the working directory."""
    has_own_columns: bool = False
    """It comes from a file in `datasets/`: its columns are input, label and images whatever the settings say."""

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [dict(self.rows[i]) for i in range(*index.indices(len(self)))]
        return dict(self.rows[index])


class Question(Protocol):
    """A question that a generator has thought of, not yet drawn."""

    @property
    def key(self) -> str:
        """All that makes it this question: two questions of the same key are the same."""

    def row(self) -> dict[str, Any]:
        """Its row, with the picture drawn."""


class Generated(Sequence[dict[str, Any]]):
    """Rows made on demand by `invent(rng, row)`. Row i depends on seed, split and i alone.

    The splits share no question: a question belongs to the split that a digest of its key says, whatever the seed.
    """

    def __init__(self, invent: Callable[[random.Random, int], Question], *, size: int, split: str, seed: int) -> None:
        if split not in _SPLITS:
            raise DataError(f"no split {split!r} of generated data; there are: {', '.join(_SPLITS)}")
        if size < 1:
            raise ConfigError(f"size={size}: a generated dataset has at least one row")
        self._invent = invent
        self._size = size
        self._split = split
        self._seed = seed

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._size))]
        if not -self._size <= index < self._size:
            raise IndexError(index)
        index %= self._size
        rng = random.Random(f"{self._seed}:{self._split}:{index}")
        for _ in range(_MAX_TRIES):
            question = self._invent(rng, index)
            if _hundredth(question.key) in _SPLITS[self._split]:
                return question.row()
        raise DataError(f"the generator knows too few different questions to keep some apart for split {self._split!r}")


class Converted(Sequence[dict[str, Any]]):
    """The rows of another sequence, each put through `convert` when asked for."""

    def __init__(
        self, rows: Sequence[Mapping[str, Any]], convert: Callable[[Mapping[str, Any]], dict[str, Any]]
    ) -> None:
        self._rows = rows
        self._convert = convert

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._convert(self._rows[index])


class _First(Sequence[Mapping[str, Any]]):
    """The first `size` rows of a sequence."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], size: int) -> None:
        self._rows = rows
        self._size = size

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[Mapping[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> Mapping[str, Any] | list[Mapping[str, Any]]:
        if isinstance(index, slice):
            return [self._rows[i] for i in range(*index.indices(self._size))]
        if not 0 <= index < self._size:
            raise IndexError(index)
        return self._rows[index]


def load_all(spec: str, *, split: str, max_samples: int, seed: int) -> list[Rows]:
    """The datasets of a comma-separated list, each under a name of its own. Errors as in `load_rows`."""
    specs = [spec] if Path(spec).exists() else [part.strip() for part in spec.split(",") if part.strip()]
    if not specs:
        raise ConfigError("data.prompt_dataset is empty: name a dataset, a file, a folder or a Hub id")
    loaded = [load_rows(part, split=split, max_samples=max_samples, seed=seed) for part in specs]
    counts: dict[str, int] = {}
    named = []
    for rows in loaded:
        counts[rows.name] = counts.get(rows.name, 0) + 1
        named.append(rows if counts[rows.name] == 1 else replace(rows, name=f"{rows.name}_{counts[rows.name]}"))
    return named


def load_rows(spec: str, *, split: str, max_samples: int, seed: int) -> Rows:
    """The rows that `spec` names: `visual_math?families=count+clock&size=2000` (a file in `datasets/` and its options),
    a .jsonl, .json or .parquet file, a `save_to_disk` folder, or a Hub id (`owner/name?name=config`).

    `seed` is for generated data; an option `seed=` wins over it. At most `max_samples` rows are kept, the first ones.
    Raises ConfigError for an unknown name or option, DataError for data that is missing, empty or unreadable.
    """
    name, _, query = spec.partition("?")
    options = _parse_options(query, spec)
    if name in plugin_names("datasets"):
        rows = _load_plugin(name, options, split=split, seed=seed)
    elif name.endswith(FILE_SUFFIXES):
        rows = _load_plugin("jsonl", options | {"path": name}, split=split, seed=seed)
    elif Path(name).expanduser().is_dir():
        rows = _load_folder(Path(name).expanduser(), options, split)
    elif looks_local(name):
        raise DataError(f"dataset {name}: there is no such file or folder")
    else:
        rows = load_hub(name, split=split, config=_hub_config(name, options))
    if len(rows) == 0:
        raise DataError(f"dataset {spec}: split {split!r} has no rows")
    return rows if len(rows) <= max_samples else replace(rows, rows=_First(rows.rows, max_samples))


def load_hub(name: str, *, split: str, config: str | None = None) -> Rows:
    """A dataset from the Hub, images left encoded. DataError when it cannot be had."""
    import datasets

    _refuse_file(name)
    near = difflib.get_close_matches(name, plugin_names("datasets"), n=1)
    hint = f"did you mean {near[0]}?" if near else f"the files in datasets/ are {', '.join(plugin_names('datasets'))}"
    if near and "/" not in name:
        raise ConfigError(f"no dataset {name!r}; {hint}")
    try:
        data = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the library raises its own errors, the Hub client's and the network's
        reason = first_line(error)
        raise DataError(f"dataset {name} ({split}) cannot be loaded from the Hub: {reason}; {hint}") from error
    return from_hugging_face(name, data)


def _refuse_file(name: str) -> None:
    """Raise DataError for what only a file is called like: the Hub would be asked for it again and again, for half a
    minute."""
    is_there = Path(name).expanduser().is_file()
    if is_there or Path(name).suffix.lower() in _OTHER_FILES:
        what = "is a file of another kind" if is_there else "there is no such file"
        raise DataError(f"dataset {name}: {what}; vlmrl reads {', '.join(FILE_SUFFIXES)}")


def from_hugging_face(name: str, data: Any) -> Rows:
    """A `datasets.Dataset` as rows. Images stay encoded, so that they are opened by us, within our bounds."""
    import datasets

    image_columns = []
    for column, feature in data.features.items():
        inner = getattr(feature, "feature", feature)
        if isinstance(inner, datasets.Image):
            image_columns.append(column)
            encoded: Any = datasets.Image(decode=False)
            data = data.cast_column(column, encoded if inner is feature else datasets.List(encoded))
    return Rows(name=name, rows=data, columns=tuple(data.column_names), image_columns=tuple(image_columns))


def _load_plugin(name: str, options: Mapping[str, str], *, split: str, seed: int) -> Rows:
    make = plugin("datasets", name).rows
    known = {key: kind for key, kind in typing.get_type_hints(make).items() if key not in ("split", "seed", "return")}
    values = {}
    for key, text in options.items():
        if key == "seed":
            seed = _convert(text, int, f"{name}?seed")
        elif key not in known:
            raise ConfigError(f"dataset {name} has no option {key!r}; it has: {', '.join(sorted(known)) or 'none'}")
        else:
            values[key] = _convert(text, known[key], f"{name}?{key}")
    required = [p.name for p in inspect.signature(make).parameters.values() if p.default is p.empty and p.name in known]
    missing = [key for key in required if key not in values]
    if missing:
        raise ConfigError(f"dataset {name} needs {', '.join(missing)}: write {name}?{missing[0]}=...")
    found = make(split=split, seed=seed, **values)
    if isinstance(found, Rows):
        return found
    if len(found) == 0:
        raise DataError(f"dataset {name}: split {split!r} has no rows")
    columns = tuple(found[0])
    images = tuple(column for column in columns if column == "images")
    return Rows(name=name, rows=found, columns=columns, image_columns=images, has_own_columns=True)


def _load_folder(folder: Path, options: Mapping[str, str], split: str) -> Rows:
    import datasets

    _refuse(options, str(folder))
    if not any((folder / mark).is_file() for mark in ("dataset_info.json", "dataset_dict.json")):
        raise DataError(
            f"folder {folder} was not written by save_to_disk: it has no dataset_info.json or dataset_dict.json"
        )
    try:
        data: Any = datasets.load_from_disk(str(folder))
    except Exception as error:  # whatever the library and Arrow raise on files that are damaged
        raise DataError(f"folder {folder} cannot be loaded: {first_line(error)}") from error
    if isinstance(data, datasets.DatasetDict):
        if split not in data:
            raise DataError(f"folder {folder} has no split {split!r}; it has: {', '.join(map(str, data))}")
        data = data[split]
    return replace(from_hugging_face(folder.name, data), root=folder)


def _parse_options(query: str, spec: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in query.split("&") if pair]
    for key, equals, value in pairs:
        if not (key and equals and value):
            raise ConfigError(f"dataset {spec}: options are written name?key=value&key=value")
    return {key: value for key, _, value in pairs}


def _hub_config(name: str, options: Mapping[str, str]) -> str | None:
    _refuse({key: value for key, value in options.items() if key != "name"}, name)
    return options.get("name")


def _refuse(options: Iterable[str], name: str) -> None:
    for key in options:
        raise ConfigError(f"dataset {name} has no option {key!r}")


def _convert(text: str, kind: Any, what: str) -> Any:
    """An option's text as the type that the dataset's `rows` declares."""
    if typing.get_origin(kind) is tuple:
        return tuple(_convert(part, typing.get_args(kind)[0], what) for part in text.split("+") if part)
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


def _hundredth(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") % 100
