"""Which column of a dataset holds what, and what is wrong with its columns before any row is used."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

import numpy as np

from vlmrl.config.data import COLUMN_KEYS, Columns
from vlmrl.data.conversations import STANDARD_ANSWERS, ends_with_answer, read_conversation
from vlmrl.data.rows import Rows
from vlmrl.errors import DataError

Keys = Mapping[str, str | None]
"""Setting -> column: `{"input_key": "problem", "label_key": "reward_model.ground_truth", ...}`. None: no column."""

_STANDARD = {"input_key": ("prompt", "messages", "conversations"), "output_key": STANDARD_ANSWERS}
"""What TRL's and ShareGPT's datasets call them; read where a dataset has no column of the default name."""
_LIKELY = {
    "input_key": ("question", "problem", "query", "instruction", "text"),
    "label_key": ("answer", "solution", "ground_truth", "target", "final_answer", "reward_model"),
    "output_key": ("output", "response", "target", "solution"),
}
"""For hints alone."""
_ROWS_LOOKED_AT = 8
_ROWS_SEARCHED = 1000
"""For a first image, where few rows may have one."""

_IMAGE_NAME = re.compile(
    r"(images?|imgs?|pics?|pictures?|photos?)(_?(paths?|files?|file_?names?|urls?|bytes|b64|base64))?", re.IGNORECASE
)
_IMAGE_FILE = re.compile(r"\S.*\.(png|jpe?g|webp|gif|bmp|tiff?)", re.IGNORECASE)
_IMAGE_BYTES = re.compile(rb"\x89PNG|\xff\xd8\xff|GIF8|BM|II\*\0|MM\0\*|RIFF....WEBP", re.DOTALL)


class Wants(NamedTuple):
    """What a run needs of every row beside the question."""

    label: str | None = None
    """Who needs a label, for messages: `reward.functions math`. None: nobody."""
    answer: bool = False
    """Whether the row says what the model should say: `vlmrl sft`."""
    instead: frozenset[str] = frozenset()
    """Columns that are read in the label's place, where a dataset has all of them."""
    others: frozenset[str] = frozenset()
    """Columns by these names that a reward function asks for; the label may be one of them."""

    def label_of(self, source: Rows, label_key: str | None) -> str | None:
        """Who needs a label of this dataset's rows."""
        is_elsewhere = self.instead and self.instead <= set(source.columns) - {top(label_key)}
        return None if is_elsewhere else self.label


NOTHING = Wants()


def find_columns(source: Rows, sources: Sequence[Rows], columns: Columns, wants: Wants = NOTHING) -> Keys:
    """Which column of this source, one of `sources`, holds what; `output_key` is there when an answer is wanted.

    A few rows are read. Raises DataError, all in one line, for a column that is needed or asked for and not there, for
    labels or answers that no row has, and for images that lie in a column which is not read.
    """
    search = _Search(source, sources, columns)
    keys = {name: search.column(name) for name in COLUMN_KEYS if name != "output_key" or wants.answer}
    rows = list(_some_rows(source))
    missing = [f"no column {keys[name]!r} (data.{name})" for name in search.missing(keys)]
    needs_label = wants.label_of(source, keys["label_key"])
    if needs_label is not None and not _is_there(source, keys["label_key"]):
        missing = [line for line in missing if "data.label_key" not in line]
        missing.append(f"no column {keys['label_key']!r} (data.label_key), which {needs_label} needs")
    known = {*source.columns, columns.label_key, keys["label_key"]}
    missing += [f"no column {name!r}, for which reward.remote_url asks" for name in sorted(wants.others - known)]
    if wants.answer and not missing and not _has_answers(source, keys, rows):
        missing.append(
            f"no column {keys['output_key']!r} (data.output_key) nor {keys['label_key']!r} (data.label_key), and its "
            "questions do not end with a message of the assistant: nothing says what to learn"
        )
    if missing:
        raise DataError(
            f"dataset {source.name} has {' and '.join(missing)}; it has: {', '.join(source.columns)}"
            f"{_hint(source, keys, missing)}{search.hint_of_several()}"
        )
    if needs_label is not None:
        _check_values(source, keys, rows, "label_key", f"{needs_label} needs a label")
    if columns.image_key is not None:
        _check_images(source, keys, rows)
    return keys


def value_at(row: Mapping[str, Any], key: str | None) -> Any:
    """What a row has in a column, or inside it: `reward_model.ground_truth` of `{"reward_model": {"ground_truth": 4}}`.
    None when it has nothing there."""
    if key is None or key in row:
        return None if key is None else row[key]
    value: Any = row
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def as_list(images: Any) -> Sequence[Any]:
    """The images of a row's column: a list, or one image."""
    if images is None or (isinstance(images, str | bytes) and not images):
        return []
    return images if isinstance(images, list | tuple) else [images]


def top(key: str | None) -> str | None:
    """The column itself of a place inside it."""
    return None if key is None else key.partition(".")[0]


class _Search:
    """Names of columns, from the dataset's own, the settings, and what is usual."""

    def __init__(self, source: Rows, sources: Sequence[Rows], columns: Columns) -> None:
        self._source = source
        self._columns = columns
        self._others = [other for other in sources if other is not source]

    def column(self, name: str) -> str | None:
        """The column of one setting, whether it is there or not."""
        if name in self._source.named_columns:
            return self._source.named_columns[name]
        key: str | None = getattr(self._columns, name)
        default = COLUMN_KEYS[name]
        if name == "input_key" and key == default and {"instruction", "input"} <= set(self._source.columns):
            raise DataError(
                f"dataset {self._source.name} has the columns instruction and input (Alpaca's form), of which one "
                "alone would be read: join them in a column of their own, and name it with data.input_key"
            )
        if _is_there(self._source, key):
            return key
        if self._source.has_own_columns and self._is_elsewhere(key):
            return default
        usual = [other for other in _STANDARD.get(name, ()) if other in self._source.columns]
        if key == default and len(usual) > 1:
            raise DataError(
                f"dataset {self._source.name} has the columns {' and '.join(usual)}: say with data.{name} which one to "
                "read"
            )
        return usual[0] if key == default and usual else key

    def missing(self, keys: Keys) -> Iterator[str]:
        """The settings whose column is needed, or was asked for, and is not there."""
        for name, key in keys.items():
            is_needed = name == "input_key" or name in self._source.named_columns
            is_asked_for = key not in (None, COLUMN_KEYS[name]) and not self._is_elsewhere(key)
            if not _is_there(self._source, key) and (is_needed or is_asked_for):
                yield name

    def hint_of_several(self) -> str:
        """How one of several datasets gets columns of its own."""
        if not self._others:
            return ""
        return "; columns of one dataset alone follow its name, NAME:input_key=COLUMN:label_key=COLUMN"

    def _is_elsewhere(self, key: str | None) -> bool:
        return any(_is_there(other, key) for other in self._others)


def _is_there(source: Rows, key: str | None) -> bool:
    return key is not None and (key in source.columns or ("." in key and top(key) in source.columns))


def _some_rows(source: Rows, count: int = _ROWS_LOOKED_AT) -> Iterator[Mapping[str, Any]]:
    """A few rows from first to last; those that cannot be read are met, and named, later."""
    for number in sorted({round(place) for place in np.linspace(0, len(source) - 1, num=count)}):
        try:
            yield source[number]
        except Exception:
            continue


def _has_answers(source: Rows, keys: Keys, rows: Sequence[Mapping[str, Any]]) -> bool:
    if any(_is_there(source, keys[name]) for name in ("output_key", "label_key")):
        return True
    return not rows or any(_tells(_ends_with_answer, row, keys) for row in rows)


def _ends_with_answer(row: Mapping[str, Any], keys: Keys) -> bool:
    return ends_with_answer(read_conversation(value_at(row, keys["input_key"])).messages)


def _check_values(source: Rows, keys: Keys, rows: Sequence[Mapping[str, Any]], name: str, reason: str) -> None:
    """DataError when a column that is needed holds nothing in any of these rows."""
    key = keys[name]
    if not rows or any(value_at(row, key) is not None for row in rows):
        return
    inner = next((found for row in rows if isinstance(found := value_at(row, top(key)), Mapping)), None)
    has = f"; {top(key)} has: {', '.join(map(str, inner))}" if inner is not None and key not in source.columns else ""
    raise DataError(
        f"dataset {source.name}: {key!r} (data.{name}) holds nothing in any of {len(rows)} rows looked at, and "
        f"{reason}{has}"
    )


def _check_images(source: Rows, keys: Keys, rows: Sequence[Mapping[str, Any]]) -> None:
    """DataError when images lie unused: a model that is trained blind looks healthy."""
    if any(_tells(_has_images, row, keys) for row in rows):
        return
    used = {top(key) for key in keys.values()}
    others = [column for column in source.columns if column not in used]
    is_read = _is_there(source, keys["image_key"])
    for column in others:
        is_known = column in source.image_columns and not is_read
        if is_known or any(_tells(_looks_like_images, column, row.get(column)) for row in rows):
            if is_read and any(_tells(_has_images, row, keys) for row in _some_rows(source, _ROWS_SEARCHED)):
                return
            has = "holds none in the rows looked at" if is_read else "it does not have"
            raise DataError(
                f"dataset {source.name} has images in column {column!r}, but data.image_key is {keys['image_key']!r}, "
                f"which {has}: set data.image_key to {column}, or to none where the text does without images"
            )


def _tells(judge: Callable[..., bool], *given: Any) -> bool:
    """What `judge` says; False where it cannot."""
    try:
        return judge(*given)
    except Exception:  # a row may hold anything: this one is met, dropped and named later
        return False


def _has_images(row: Mapping[str, Any], keys: Keys) -> bool:
    """Whether the run finds an image in this row."""
    inline = read_conversation(value_at(row, keys["input_key"])).images
    return len(inline) > 0 or len(as_list(value_at(row, keys["image_key"]))) > 0


def _looks_like_images(column: str, value: Any) -> bool:
    first = next(iter(as_list(value)), None)
    if isinstance(first, Mapping):
        first = first.get("bytes") or first.get("path") or first.get("url")
    if isinstance(first, bytes):
        return _IMAGE_BYTES.match(first) is not None
    if isinstance(first, str):
        is_named_so = bool(first) and _IMAGE_NAME.fullmatch(column) is not None
        return is_named_so or first.startswith("data:image/") or _IMAGE_FILE.fullmatch(first) is not None
    # A PIL image: `datasets` and generators hand them out.
    return hasattr(first, "getbands")


def _hint(source: Rows, keys: Keys, missing: Sequence[str]) -> str:
    """What may have been meant: a name that is usual for such a column, or one that is spelt alike."""
    hints = []
    for name, key in keys.items():
        if key is None or not any(f"data.{name})" in line for line in missing):
            continue
        likely = [column for column in _LIKELY.get(name, ()) if column in source.columns and column != key]
        near = get_close_matches(key, source.columns, n=1) or likely[:1]
        if near:
            hints.append(f"did you mean --data.{name} {near[0]}?")
    return "; " + " ".join(hints) if hints else ""
