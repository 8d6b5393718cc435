"""Find the columns of a dataset that hold question, label, images and answer, and check them before any row is used."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

import numpy as np

from vlmrl.config.data import COLUMN_KEYS, Columns
from vlmrl.config.pairs import PAIR_KEYS
from vlmrl.data.conversations import STANDARD_ANSWER_COLUMNS, ends_with_answer, is_conversation, read_conversation
from vlmrl.data.rows import Rows
from vlmrl.data.targets import Targets
from vlmrl.errors import DataError

Keys = Mapping[str, str | None]
"""Column of each setting: `{"input_key": "problem", "label_key": "reward_model.ground_truth"}`. None: no column."""

_DEFAULTS: Keys = COLUMN_KEYS | PAIR_KEYS

_STANDARD = {"input_key": ("prompt", "messages", "conversations"), "output_key": STANDARD_ANSWER_COLUMNS}
"""Names in TRL's and ShareGPT's datasets, read when a dataset has no column of the default name."""
_STANDARD_OF_PAIRS = {"input_key": ("prompt", "conversations")}
"""The same for pairs, beside which a column `messages` holds one of the two responses once more."""
_LIKELY = {
    "input_key": ("question", "problem", "query", "instruction", "text"),
    "label_key": ("answer", "solution", "ground_truth", "target", "final_answer", "reward_model"),
    "output_key": ("output", "response", "target", "solution"),
}
"""Names suggested in error messages; never read unless configured."""
_NUM_SAMPLED_ROWS = 8
_NUM_SEARCHED_ROWS = 1000
"""Rows searched for a first image, since few rows may have one."""

logger = logging.getLogger("vlmrl.data")

_IMAGE_NAME = re.compile(
    r"(images?|imgs?|pics?|pictures?|photos?)(_?(paths?|files?|file_?names?|urls?|bytes|b64|base64))?", re.IGNORECASE
)
_IMAGE_FILE = re.compile(r"\S.*\.(png|jpe?g|webp|gif|bmp|tiff?)", re.IGNORECASE)
_VIDEO_NAME = re.compile(
    r"(videos?|clips?|movies?)(_?(paths?|files?|file_?names?|urls?|bytes|b64|base64))?", re.IGNORECASE
)
_VIDEO_FILE = re.compile(r"\S.*\.(mp4|mov|m4v|webm|mkv|avi)", re.IGNORECASE)
_IMAGE_BYTES = re.compile(rb"\x89PNG|\xff\xd8\xff|GIF8|BM|II\*\0|MM\0\*|RIFF....WEBP", re.DOTALL)


class RowRequirements(NamedTuple):
    """Columns that a run needs in every row, besides the question."""

    label_for: str | None = None
    """Setting that needs a label, for messages: `reward.functions math`. None: no label is needed."""
    answer: bool = False
    """Whether the row needs a target answer, as in `vlmrl sft`."""
    targets: Targets = Targets()
    """What supervised training learns of the row, if `is_supervised`."""
    label_substitutes: frozenset[str] = frozenset()
    """Columns that replace the label in datasets that have all of them."""
    reward_columns: frozenset[str] = frozenset()
    """Columns that a reward function takes by name; the label may be one of them."""
    pair: bool = False
    """Whether the row needs a chosen and a rejected response, as in `vlmrl dpo`; it then has no label."""
    step_separator: str | None = None
    """The text that ends a step, if the row needs a label for each step of its answer."""
    judged: bool = False
    """Whether the label says if the answer is desirable, as in `vlmrl dpo` with `dpo.loss kto`."""

    @property
    def names(self) -> tuple[str, ...]:
        """Settings of the columns that are read."""
        if self.pair:
            return "input_key", "image_key", "video_key", *PAIR_KEYS
        return tuple(name for name in COLUMN_KEYS if name != "output_key" or self.answer)

    @property
    def is_supervised(self) -> bool:
        """Rows are for supervised fine-tuning."""
        return (self.answer and self.step_separator is None) or self.targets.kind == "text"

    def label_needed_for(self, source: Rows, label_key: str | None) -> str | None:
        """Return the setting that needs a label in this dataset; None if its rows need none."""
        has_substitutes = self.label_substitutes and self.label_substitutes <= set(source.columns) - {
            top_column(label_key)
        }
        return None if has_substitutes else self.label_for


NO_REQUIREMENTS = RowRequirements()


def find_columns(
    source: Rows, sources: Sequence[Rows], columns: Columns, requirements: RowRequirements = NO_REQUIREMENTS
) -> Keys:
    """Return the column of each setting in `source`, one of `sources`; `output_key` only when answers are needed.

    Reads a few rows.

    Raises:
        DataError: a needed or configured column is missing, none of the rows read has a needed label or answer, or a
            column that is not read holds images. One line names all missing columns.
    """
    if columns.video_key is None and source.named_columns.get("video_key"):
        raise DataError(
            f"dataset {source.name} names a column of videos, which is read only with data.video_key: set it too"
        )
    search = _ColumnSearch(source, sources, columns, pairs=requirements.pair)
    keys = {name: search.column(name) for name in requirements.names}
    rows = list(_sampled_rows(source))
    missing = [f"no column {keys[name]!r} (data.{name})" for name in search.missing(keys)]
    label_for = requirements.label_needed_for(source, keys.get("label_key"))
    if requirements.pair and not missing and not _has_column(source, keys["input_key"]):
        missing += _missing_questions(keys, rows)
    if label_for is not None and not _has_column(source, keys["label_key"]):
        missing = [line for line in missing if "data.label_key" not in line]
        missing.append(f"no column {keys['label_key']!r} (data.label_key), which {label_for} needs")
    known = {*source.columns, columns.label_key, keys.get("label_key")}
    missing += [
        f"no column {name!r}, which reward.remote_url needs" for name in sorted(requirements.reward_columns - known)
    ]
    if requirements.answer and not missing and not _has_answers(source, keys, rows):
        missing.append(
            f"no column {keys['output_key']!r} (data.output_key) nor {keys['label_key']!r} (data.label_key), and its "
            "questions do not end with an assistant message: there is no answer to train on"
        )
    if missing:
        raise DataError(
            f"dataset {source.name} has {' and '.join(missing)}; it has: {', '.join(source.columns)}"
            f"{_hint(source, keys, missing)}{search.per_dataset_hint()}"
        )
    if label_for is not None:
        _check_values(source, keys, rows, "label_key", f"{label_for} needs a label")
    if columns.video_key is not None or "video_key" not in columns.model_fields_set:
        _check_videos(source, keys, rows)
    if columns.image_key is not None:
        _check_images(source, keys, rows)
    return keys


def value_at(row: Mapping[str, Any], key: str | None) -> Any:
    """Return the value of a row's column, or of a field inside it; None if it is missing.

    Example: `reward_model.ground_truth` of `{"reward_model": {"ground_truth": 4}}` is 4.
    """
    if key is None or key in row:
        return None if key is None else row[key]
    value: Any = row
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def as_list(images: Any) -> Sequence[Any]:
    """Return the images of a row's column, which holds a list or a single image, as a list."""
    if images is None or (isinstance(images, str | bytes) and not images):
        return []
    return images if isinstance(images, list | tuple) else [images]


def is_image_name(text: str) -> bool:
    """Whether a text is the name of an image file."""
    return text.startswith("data:image/") or _IMAGE_FILE.fullmatch(text) is not None


def has_image_bytes(content: bytes) -> bool:
    """Whether bytes begin as an image file does."""
    return _IMAGE_BYTES.match(content) is not None


def top_column(key: str | None) -> str | None:
    """Return the column of a dotted name: `reward_model` of `reward_model.ground_truth`."""
    return None if key is None else key.partition(".")[0]


class _ColumnSearch:
    """Column names of one dataset, from its own options, the settings and the standard names."""

    def __init__(self, source: Rows, sources: Sequence[Rows], columns: Columns, *, pairs: bool = False) -> None:
        self._source = source
        self._columns = columns
        self._standard = _STANDARD_OF_PAIRS if pairs else _STANDARD
        self._needed = ("chosen_key", "rejected_key") if pairs else ("input_key",)
        self._others = [other for other in sources if other is not source]

    def column(self, name: str) -> str | None:
        """Return the column of one setting, whether or not the dataset has it."""
        if name in self._source.named_columns:
            return self._source.named_columns[name]
        key: str | None = getattr(self._columns, name)
        default = _DEFAULTS[name]
        if name == "input_key" and key == default and {"instruction", "input"} <= set(self._source.columns):
            raise DataError(
                f"dataset {self._source.name} has the columns instruction and input (Alpaca's format), of which only "
                "one would be read: join them in a new column and set data.input_key to its name"
            )
        if _has_column(self._source, key):
            return key
        if self._source.has_own_columns and self._is_in_other_dataset(key):
            return default
        standard = [other for other in self._standard.get(name, ()) if other in self._source.columns]
        if key == default and len(standard) > 1:
            raise DataError(
                f"dataset {self._source.name} has the columns {' and '.join(standard)}: set data.{name} to the one to "
                "read"
            )
        return standard[0] if key == default and standard else key

    def missing(self, keys: Keys) -> Iterator[str]:
        """Yield the settings whose column is needed or configured, but missing."""
        for name, key in keys.items():
            is_needed = name in self._needed or name in self._source.named_columns
            optional = (None, _DEFAULTS[name], *(("videos",) if name == "video_key" else ()))  # messages may hold them
            is_configured = key not in optional and not self._is_in_other_dataset(key)
            if not _has_column(self._source, key) and (is_needed or is_configured):
                yield name

    def per_dataset_hint(self) -> str:
        """Explain how to set the columns of one of several datasets."""
        if not self._others:
            return ""
        return "; columns of a single dataset follow its name, NAME:input_key=COLUMN:label_key=COLUMN"

    def _is_in_other_dataset(self, key: str | None) -> bool:
        return any(_has_column(other, key) for other in self._others)


def _has_column(source: Rows, key: str | None) -> bool:
    return key is not None and (key in source.columns or ("." in key and top_column(key) in source.columns))


def _sampled_rows(source: Rows, count: int = _NUM_SAMPLED_ROWS) -> Iterator[Mapping[str, Any]]:
    """Yield a few rows, evenly spaced from first to last. Unreadable rows are skipped here and reported when drawn."""
    for index in sorted({round(position) for position in np.linspace(0, len(source) - 1, num=count)}):
        try:
            yield source[index]
        except Exception:
            continue


def _has_answers(source: Rows, keys: Keys, rows: Sequence[Mapping[str, Any]]) -> bool:
    if any(_has_column(source, keys[name]) for name in ("output_key", "label_key")):
        return True
    return not rows or any(_holds(_ends_with_answer, row, keys) for row in rows)


def _missing_questions(keys: Keys, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name the column of questions as missing if the chosen responses of all rows read are texts without any."""
    if not rows or any(_holds(_begins_with_question, row, keys) for row in rows):
        return []
    return [f"no column {keys['input_key']!r} (data.input_key), and its responses are no conversations with a question"]


def _begins_with_question(row: Mapping[str, Any], keys: Keys) -> bool:
    messages = read_conversation(value_at(row, keys["chosen_key"])).messages
    return is_conversation(messages) and len(messages) > 1


def _ends_with_answer(row: Mapping[str, Any], keys: Keys) -> bool:
    return ends_with_answer(read_conversation(value_at(row, keys["input_key"])).messages)


def _check_values(source: Rows, keys: Keys, rows: Sequence[Mapping[str, Any]], name: str, reason: str) -> None:
    """Raise DataError when a needed column is empty in all of these rows."""
    key = keys[name]
    if not rows or any(value_at(row, key) is not None for row in rows):
        return
    struct = next((value for row in rows if isinstance(value := value_at(row, top_column(key)), Mapping)), None)
    fields = (
        f"; {top_column(key)} has: {', '.join(map(str, struct))}"
        if struct is not None and key not in source.columns
        else ""
    )
    raise DataError(
        f"dataset {source.name}: {key!r} (data.{name}) is empty in all of the {len(rows)} rows read, and "
        f"{reason}{fields}"
    )


def _check_images(source: Rows, keys: Keys, rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise DataError when a column with images is not read: a model trained without its images looks healthy."""
    if any(_holds(_has_images, row, keys) for row in rows):
        return
    used = {top_column(key) for key in keys.values()}
    others = [column for column in source.columns if column not in used]
    is_read = _has_column(source, keys["image_key"])
    for column in others:
        is_known = column in source.image_columns and not is_read
        if is_known or any(_holds(_looks_like_images, column, row.get(column)) for row in rows):
            if is_read and any(_holds(_has_images, row, keys) for row in _sampled_rows(source, _NUM_SEARCHED_ROWS)):
                return
            problem = "holds none in the rows read" if is_read else "it does not have"
            raise DataError(
                f"dataset {source.name} has images in column {column!r}, but data.image_key is {keys['image_key']!r}, "
                f"which {problem}: set data.image_key to {column}, or to none if the text needs no images"
            )


def _check_videos(source: Rows, keys: Keys, rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise DataError when a column with videos is not read; warn of one that may be metadata, by its name."""
    used = {top_column(key) for key in keys.values()}
    is_read = _has_column(source, keys["video_key"])
    if is_read and any(as_list(value_at(row, keys["video_key"])) for row in rows):
        return
    for column in source.columns:
        if column in used or not any(_holds(_looks_like_videos, column, row.get(column)) for row in rows):
            continue
        if _VIDEO_NAME.fullmatch(column) is None:
            logger.warning(
                "dataset %s: column %r names video files, which are not read (data.video_key)", source.name, column
            )
            continue
        if is_read and any(
            as_list(value_at(row, keys["video_key"])) for row in _sampled_rows(source, _NUM_SEARCHED_ROWS)
        ):
            return
        read = f", and data.video_key {keys['video_key']!r} holds none in the rows read" if is_read else ""
        raise DataError(
            f"dataset {source.name} has videos in column {column!r}, which is not read{read}: set data.video_key to "
            f"{column} if the model takes videos, or to none if the text needs none"
        )


def _holds(condition: Callable[..., bool], *arguments: Any) -> bool:
    """Evaluate a condition on a row; False if it raises."""
    try:
        return condition(*arguments)
    except Exception:  # a row may hold anything: a bad one is dropped and reported when it is drawn
        return False


def _has_images(row: Mapping[str, Any], keys: Keys) -> bool:
    """Whether the columns that are read give an image in this row."""
    conversations = [value_at(row, keys.get(name)) for name in ("input_key", "chosen_key", "rejected_key")]
    return (
        any(read_conversation(value).images for value in conversations)
        or len(as_list(value_at(row, keys["image_key"]))) > 0
    )


def _looks_like_images(column: str, value: Any) -> bool:
    first = next(iter(as_list(value)), None)
    if isinstance(first, Mapping):
        first = first.get("bytes") or first.get("path") or first.get("url")
    if isinstance(first, bytes):
        return has_image_bytes(first)
    if isinstance(first, str):
        has_image_name = bool(first) and _IMAGE_NAME.fullmatch(column) is not None
        return has_image_name or is_image_name(first)
    # A PIL image, as `datasets` and generators return them.
    return hasattr(first, "getbands")


def _looks_like_videos(column: str, value: Any) -> bool:
    first = next(iter(as_list(value)), None)
    if isinstance(first, Mapping):
        first = first.get("video") or first.get("bytes") or first.get("path") or first.get("url")
    if isinstance(first, bytes | list | tuple):  # a file, or a list of frames
        return bool(first) and _VIDEO_NAME.fullmatch(column) is not None
    if not isinstance(first, str) or not first:
        return False
    return _VIDEO_FILE.fullmatch(first) is not None or (
        _VIDEO_NAME.fullmatch(column) is not None
        and ("/" in first or first.startswith("data:video/") or first.lower().endswith(".gif"))
    )


def _hint(source: Rows, keys: Keys, missing: Sequence[str]) -> str:
    """Suggest a column with a similar or usual name for each missing one."""
    hints = []
    for name, key in keys.items():
        if key is None or not any(f"data.{name})" in line for line in missing):
            continue
        likely = [column for column in _LIKELY.get(name, ()) if column in source.columns and column != key]
        near = get_close_matches(key, source.columns, n=1) or likely[:1]
        if near:
            hints.append(f"did you mean --data.{name} {near[0]}?")
    return "; " + " ".join(hints) if hints else ""
