"""Load the rows of a dataset from its name: a generator, a file, a folder or the Hub."""

from __future__ import annotations

import difflib
import hashlib
import inspect
import random
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from vlmrl.data.dataset_name import convert_option, parse_options, split_columns, split_names
from vlmrl.data.row_sequence import RowSequence
from vlmrl.errors import ConfigError, DataError
from vlmrl.plugins import first_line, looks_local, plugin, plugin_names
from vlmrl.types import Ints

FILE_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".tsv")
_OTHER_FILES = (".txt", ".xls", ".xlsx", ".arrow", ".feather", ".pkl", ".zip", ".tar", ".gz", ".zst")
"""Suffixes that no Hub id has."""

_SPLITS = {"train": range(80), "validation": range(80, 90), "test": range(90, 100)}
"""Hundredths of all possible questions that each generated split draws from."""
_MAX_TRIES = 20_000
_NUM_COLUMN_ROWS = 100
"""First rows, whose keys become the columns of data that do not declare them."""


@dataclass(frozen=True, slots=True)
class Rows(RowSequence):
    """One dataset: its rows, with their origin and columns."""

    name: str
    """For messages and metrics: `visual_math`."""
    rows: Sequence[Mapping[str, Any]]
    columns: tuple[str, ...]
    image_columns: tuple[str, ...] = ()
    """Columns known to hold images."""
    root: Path | None = None
    """The dataset's folder: relative image paths start there, and images must lie below it. None: the working
    directory."""
    image_folders: tuple[Path, ...] = ()
    """Further folders that images may lie in."""
    files: tuple[Path, ...] = ()
    """Files that the rows are read from, if known: a resumed run compares their content."""
    precisions: Mapping[str, str] = field(default_factory=dict)
    """Types of float columns narrower than Python's: `{"label": "float32"}`."""
    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Class names of Hugging Face's ClassLabel columns, by index."""
    has_own_columns: bool = False
    """Whether it comes from a file in `datasets/`: its columns are input, label and images, regardless of the
    settings."""
    has_questions: bool = True
    """False: the rows only number the episodes that an environment makes."""
    is_generated: bool = False
    """Whether all rows follow from a seed and a few options (`Generated`)."""
    named_columns: Mapping[str, str] = field(default_factory=dict)
    """Columns given after the dataset's name, `{"input_key": "problem"}`; they override the settings."""
    numbers: Ints | None = None
    """[len] Original row numbers of a subset, for messages; None: 0, 1, 2, ..."""

    def row_name(self, index: int) -> str:
        """Name of a row in messages: `visual_math:17`."""
        return f"{self.name}:{index if self.numbers is None else self.numbers[index]}"

    def __len__(self) -> int:
        return len(self.rows)

    def _row(self, index: int) -> dict[str, Any]:
        return dict(self.rows[index])

    def question_key(self, index: int) -> str | None:
        return self.rows.question_key(index) if isinstance(self.rows, RowSequence) else None


class GeneratedQuestion(Protocol):
    """A generated question whose picture is not drawn yet."""

    @property
    def key(self) -> str:
        """Identity of the question: questions with equal keys are equal."""

    def row(self) -> dict[str, Any]:
        """Make its row, with the picture drawn."""


class Generated(RowSequence):
    """Rows made on demand by `invent(rng, row)`. Row i depends only on seed, split and i.

    Splits share no question: a digest of its key assigns each question to a split, for every seed.
    """

    def __init__(
        self, invent: Callable[[random.Random, int], GeneratedQuestion], *, size: int, split: str, seed: int
    ) -> None:
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

    def _row(self, index: int) -> dict[str, Any]:
        return self._question(index).row()

    def question_key(self, index: int) -> str:
        return self._question(index).key

    def _question(self, index: int) -> GeneratedQuestion:
        if not -self._size <= index < self._size:
            raise IndexError(index)
        index %= self._size
        rng = random.Random(f"{self._seed}:{self._split}:{index}")
        for _ in range(_MAX_TRIES):
            question = self._invent(rng, index)
            if is_in_split(question.key, self._split):
                return question
        raise DataError(f"the generator has too few distinct questions to reserve any for split {self._split!r}")


class RowView(RowSequence):
    """Rows of another sequence: those at `indices` (None: all), each put through `convert` when it is read."""

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        indices: Sequence[int] | Ints | None = None,
        convert: Callable[[Mapping[str, Any]], dict[str, Any]] = dict,
    ) -> None:
        self._rows = rows
        self._indices: Sequence[int] | Ints = range(len(rows)) if indices is None else indices
        self._convert = convert

    def __len__(self) -> int:
        return len(self._indices)

    def _row(self, index: int) -> dict[str, Any]:
        return self._convert(self._rows[int(self._indices[index])])

    def question_key(self, index: int) -> str | None:
        rows = self._rows
        return rows.question_key(int(self._indices[index])) if isinstance(rows, RowSequence) else None


def load_all(spec: str, *, split: str, max_samples: int, seed: int) -> list[Rows]:
    """Load the datasets of a comma-separated list and give them unique names. Raises the errors of `load_rows`."""
    specs = [spec] if Path(spec).exists() else split_names(spec, (*plugin_names("datasets"), *FILE_SUFFIXES))
    if not specs:
        raise ConfigError("data.prompt_dataset is empty: name a dataset, a file, a folder or a Hub id")
    loaded = [load_rows(part, split=split, max_samples=max_samples, seed=seed) for part in specs]
    counts: dict[str, int] = {}
    unique = []
    for rows in loaded:
        counts[rows.name] = counts.get(rows.name, 0) + 1
        unique.append(rows if counts[rows.name] == 1 else replace(rows, name=f"{rows.name}_{counts[rows.name]}"))
    return unique


def load_rows(spec: str, *, split: str, max_samples: int, seed: int) -> Rows:
    """Load the rows of one dataset.

    `spec` is a file in `datasets/` with options (`visual_math?families=count+clock&size=2000`), a file with one of
    `FILE_SUFFIXES`, a `save_to_disk` folder, a folder of images, or a Hub id (`owner/name?name=config`).
    Column settings may follow: `:input_key=problem:label_key=solution`.

    `seed` is for generated data; an option `seed=` overrides it. The first `max_samples` rows are kept.

    Raises:
        ConfigError: unknown name or option.
        DataError: the data is missing, empty or unreadable.
    """
    plain, named_columns = split_columns(spec)
    name, _, query = plain.partition("?")
    options = parse_options(query, spec)
    if name in plugin_names("datasets"):
        rows = _load_plugin(name, options, split=split, seed=seed)
    elif name.endswith(FILE_SUFFIXES):
        rows = _load_plugin("jsonl", options | {"path": name}, split=split, seed=seed)
    elif Path(name).expanduser().is_dir():
        rows = _load_folder(Path(name).expanduser(), options, split)
    elif looks_local(name):
        raise DataError(f"dataset {name}: there is no such file or folder")
    else:
        _refuse_file(name)
        rows = load_hub(name, split=split, config=_hub_config(name, options), hint=f"; {_hint(name)}")
    if len(rows) == 0:
        raise DataError(f"dataset {spec}: split {split!r} has no rows")
    rows = replace(rows, named_columns=named_columns)
    return first_rows(rows, max_samples)


def first_rows(rows: Rows, limit: int) -> Rows:
    """Keep at most the first `limit` rows."""
    return rows if len(rows) <= limit else replace(rows, rows=RowView(rows.rows, indices=range(limit)))


def load_hub(name: str, *, split: str, config: str | None = None, hint: str = "") -> Rows:
    """Load a dataset from the Hub, with images left encoded. Raises DataError, which ends with `hint`, when that
    fails."""
    import datasets

    try:
        data = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the library raises its own errors, the Hub client's and the network's
        reason = first_line(error)
        raise DataError(f"dataset {name} ({split}) cannot be loaded from the Hub: {reason}{hint}") from error
    # Images may only come from what the library downloaded, not from the working directory.
    repository, *others = hub_folders(name)
    return replace(from_hugging_face(name, data), root=repository, image_folders=tuple(others))


def _hint(name: str) -> str:
    """What to do if the Hub has no dataset of this name. Raises ConfigError if it is a file's in `datasets/`,
    misspelled."""
    near = difflib.get_close_matches(name, plugin_names("datasets"), n=1)
    hint = f"did you mean {near[0]}?" if near else f"the files in datasets/ are {', '.join(plugin_names('datasets'))}"
    if near and "/" not in name:
        raise ConfigError(f"no dataset {name!r}; {hint}")
    return hint


def hub_folders(name: str | None = None) -> tuple[Path, ...]:
    """Return the download folders of the Hub's libraries, for one dataset or for all."""
    import datasets
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    downloads = Path(datasets.config.HF_DATASETS_CACHE), Path(datasets.config.DOWNLOADED_DATASETS_PATH)
    hub = Path(constants.HF_HUB_CACHE)
    return hub if name is None else hub / repo_folder_name(repo_id=name, repo_type="dataset"), *downloads


def _refuse_file(name: str) -> None:
    """Raise DataError for a name that can only be a file's: the Hub client would retry it for half a minute."""
    exists = Path(name).expanduser().is_file()
    if exists or Path(name).suffix.lower() in _OTHER_FILES:
        problem = "unsupported file type" if exists else "there is no such file"
        raise DataError(f"dataset {name}: {problem}; vlmrl reads {', '.join(FILE_SUFFIXES)}")


def from_hugging_face(name: str, data: Any) -> Rows:
    """Convert a `datasets.Dataset` to rows.

    Images stay encoded, also inside lists and structs, so that they are opened by `vlmrl.data.media` within its limits.
    """
    import datasets

    encoded = datasets.Features({column: _encoded(feature) for column, feature in data.features.items()})
    if encoded != data.features:
        # The same tables with other features: `cast` would copy all nested images.
        info = data.info.copy()
        info.features = encoded
        data = datasets.Dataset(data.data, info=info, indices_table=data._indices, fingerprint="vlmrl")
    return Rows(
        name=name,
        rows=data,
        columns=tuple(data.column_names),
        image_columns=tuple(column for column, feature in encoded.items() if _is_image(feature)),
        files=tuple(Path(file["filename"]) for file in data.cache_files),
        precisions={column: bits for column, feature in encoded.items() if (bits := _precision(feature))},
        classes={name: feature.names for name, feature in encoded.items() if isinstance(feature, datasets.ClassLabel)},
    )


def columns_of(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[str, ...]:
    """Collect the keys of the first rows, for data that do not declare their columns. `name` is for messages.

    Raises:
        DataError: none of these rows can be read.
    """
    columns: dict[Any, None] = {}
    reason: Exception | None = None
    for i in range(min(_NUM_COLUMN_ROWS, len(rows))):
        try:
            columns |= dict.fromkeys(dict(rows[i]))
        except Exception as error:  # a bad row may raise anything; it is dropped when it is drawn
            reason = reason or error
    if not columns and reason is not None:
        if isinstance(reason, DataError):
            raise DataError(first_line(reason)) from reason
        raise DataError(f"{name}, row 0: {type(reason).__name__}: {first_line(reason)}") from reason
    return tuple(column for column in columns if isinstance(column, str))


def _encoded(feature: Any) -> Any:
    """Disable decoding in a feature, also in nested ones."""
    import datasets

    if isinstance(feature, Mapping):
        return {key: _encoded(inner) for key, inner in feature.items()}
    if isinstance(feature, datasets.List | datasets.LargeList):
        return replace(feature, feature=_encoded(feature.feature))
    return replace(feature, decode=False) if getattr(feature, "decode", False) else feature


def _is_image(feature: Any) -> bool:
    """Whether a feature is an image or a list of images."""
    import datasets

    return isinstance(getattr(feature, "feature", feature), datasets.Image)


def _precision(feature: Any) -> str | None:
    """Return `float32` or `float16` if the column holds such numbers, else None."""
    import datasets

    if isinstance(feature, Mapping):
        return next((bits for inner in feature.values() if (bits := _precision(inner))), None)
    if isinstance(feature, datasets.Value):
        return feature.dtype if feature.dtype in ("float16", "float32") else None
    inner = getattr(feature, "feature", None)
    return None if inner is None else _precision(inner)


def _load_plugin(name: str, options: Mapping[str, str], *, split: str, seed: int) -> Rows:
    make = plugin("datasets", name).rows
    known = {key: kind for key, kind in typing.get_type_hints(make).items() if key not in ("split", "seed", "return")}
    values = {}
    for key, text in options.items():
        if key == "seed":
            seed = convert_option(text, int, f"{name}?seed")
        elif key not in known:
            raise ConfigError(f"dataset {name} has no option {key!r}; it has: {', '.join(sorted(known)) or 'none'}")
        else:
            values[key] = convert_option(text, known[key], f"{name}?{key}")
    required = [p.name for p in inspect.signature(make).parameters.values() if p.default is p.empty and p.name in known]
    missing = [key for key in required if key not in values]
    if missing:
        raise ConfigError(f"dataset {name} needs {', '.join(missing)}: write {name}?{missing[0]}=...")
    rows = make(split=split, seed=seed, **values)
    if isinstance(rows, Rows):
        return rows
    if len(rows) == 0:
        raise DataError(f"dataset {name}: split {split!r} has no rows")
    columns = columns_of(rows, f"dataset {name}")
    images = tuple(column for column in columns if column == "images")
    # The file may load its rows from the Hub, with images in the Hub's folders.
    return Rows(
        name=name,
        rows=rows,
        columns=columns,
        image_columns=images,
        image_folders=hub_folders(),
        has_own_columns=True,
        is_generated=isinstance(rows, Generated),
    )


def _load_folder(folder: Path, options: Mapping[str, str], split: str) -> Rows:
    import datasets

    if not any((folder / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
        # Not written by save_to_disk.
        return _load_plugin("image_folder", {**options, "path": str(folder)}, split=split, seed=0)
    _refuse(options, str(folder))
    try:
        data: Any = datasets.load_from_disk(str(folder))
    except Exception as error:  # the library and Arrow raise many types on damaged files
        raise DataError(f"folder {folder} cannot be loaded: {first_line(error)}") from error
    if isinstance(data, datasets.DatasetDict):
        if split not in data:
            raise DataError(f"folder {folder} has no split {split!r}; it has: {', '.join(map(str, data))}")
        data = data[split]
    return replace(from_hugging_face(folder.name, data), root=folder)


def _hub_config(name: str, options: Mapping[str, str]) -> str | None:
    _refuse({key: value for key, value in options.items() if key != "name"}, name)
    return options.get("name")


def _refuse(options: Iterable[str], name: str) -> None:
    for key in options:
        raise ConfigError(f"dataset {name} has no option {key!r}")


def is_in_split(key: str, split: str) -> bool:
    """Whether generated questions with this key belong to a split, for every seed."""
    hundredth = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") % 100
    return hundredth in _SPLITS[split]
