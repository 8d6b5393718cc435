"""The endless stream of prompts: shuffled by a seed, mixed by shares, resumable to the row."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vlmrl.config.data import Columns
from vlmrl.data.media import InlineMedia, make_media
from vlmrl.data.order import Order, Place
from vlmrl.data.rows import Rows
from vlmrl.errors import ConfigError, DataError
from vlmrl.plugins import Processor
from vlmrl.types import Ints, Media, Prompt

logger = logging.getLogger("vlmrl.data")

_OWN_COLUMNS = {"input_key": "input", "label_key": "label", "image_key": "images"}
_FEWEST_ROWS_TO_JUDGE = 1000
"""The share of unusable rows is judged over at least so many rows, or over all where there are fewer."""
_LONGEST_SHOWN = 80
"""Characters of a label in a warning."""
_DECODERS = min(8, os.cpu_count() or 1)


LabelProblems = Callable[[Sequence[str]], Sequence[str | None]]
"""Says of labels why no response can match them; None where one can."""


def _identity(media: InlineMedia) -> Media:
    return media


def _none(labels: Sequence[str]) -> list[None]:
    return [None] * len(labels)


@dataclass(frozen=True, slots=True)
class _Question:
    """What the columns of a row say."""

    text: str | Sequence[Mapping[str, Any]]
    label: str | None
    images: Sequence[Any]
    metadata: Mapping[str, Any]


class _UnusableError(Exception):
    """This row becomes no prompt. `kind` is what is counted, `detail` what is told."""

    def __init__(self, kind: str, detail: object) -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail


class PromptStream:
    """Prompts without end, each row once per episode.

    Every episode is a fresh permutation that follows from `seed`. Without `probs` the sources are one pool; with them
    the source of every prompt is drawn by these shares, and each source goes through its own episodes. A row that
    cannot be used is dropped whole, counted in `dropped` and named in a warning.

    Raises DataError when a source is empty or lacks a column, ConfigError when `probs` does not fit the sources.
    """

    def __init__(
        self,
        sources: Sequence[Rows],
        *,
        probs: Sequence[float] | None,
        processor: Processor,
        columns: Columns,
        seed: int,
        share: Callable[[InlineMedia], Media] = _identity,
        label_problems: LabelProblems = _none,
    ) -> None:
        if not sources:
            raise DataError("there is no dataset to draw prompts from")
        if probs is not None and len(probs) != len(sources):
            raise ConfigError(f"data.prompt_probs has {len(probs)} shares for {len(sources)} datasets")
        for source in sources:
            if len(source) == 0:
                raise DataError(f"dataset {source.name} has no rows")
        self._sources = tuple(sources)
        self._keys = [_find_columns(source, sources, columns) for source in sources]
        self._processor = processor
        self._columns = columns
        self._share = share
        self._label_problems = label_problems
        self._order = Order([len(source) for source in sources], probs, seed)
        self._drawn = 0
        self._position = 0
        self._bad: dict[str, str] = {}
        self._last_dropped = "before the run was resumed"

    @property
    def num_rows(self) -> int:
        """Rows of all sources: the length of an episode."""
        return sum(map(len, self._sources))

    @property
    def position(self) -> int:
        """Prompts handed out so far; the index of the next one."""
        return self._position

    @property
    def dropped(self) -> Counter[str]:
        """Why rows were dropped -> how many different rows."""
        return Counter(self._bad.values())

    def draw(self, n: int) -> list[Prompt]:
        """The next n prompts. DataError once more than `columns.max_dropped_fraction` of the rows were dropped."""
        prompts: list[Prompt] = []
        shared: dict[str, Media] = {}
        while len(prompts) < n:
            # Exactly as many rows as are still wanted: none is drawn that would have to be kept for later.
            places = [self._order.place(self._drawn + i) for i in range(n - len(prompts))]
            self._drawn += len(places)
            prompts += self._prompts(places, self._position + len(prompts), shared)
            self._check_dropped(min(self._drawn, self.num_rows))
        self._position += n
        return prompts

    def all_prompts(self, limit: int) -> list[Prompt]:
        """At most `limit` prompts in the order of the rows, for evaluation; the stream itself does not move."""
        places = [Place(s, row) for s, source in enumerate(self._sources) for row in range(len(source))][:limit]
        prompts = self._prompts(places, 0, {})
        self._check_dropped(len(places))
        return prompts

    def labels(self, limit: int, *, limit_s: float) -> dict[str, str]:
        """The labels of the first rows that the stream comes to: row -> label. At most `limit` rows, and those that can
        be read within `limit_s` seconds; the stream itself does not move."""
        found: dict[str, str] = {}
        deadline = time.monotonic() + limit_s
        for k in range(min(limit, self.num_rows)):
            place = self._order.place(self._drawn + k)
            with suppress(_UnusableError):
                label = self._read(place).label
                if label is not None:
                    found[f"{self._sources[place.source].name}:{place.row}"] = label
            if time.monotonic() > deadline:
                break
        return found

    def state(self) -> dict[str, Any]:
        """Where the stream stands, as JSON."""
        return {
            "data": self._fingerprint,
            "drawn": self._drawn,
            "position": self._position,
            "dropped": dict(self._bad),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where another stream over the same data stood. DataError when the data are not the same."""
        mine = self._fingerprint
        different = [key for key in mine if state.get("data", {}).get(key) != mine[key]]
        if different:
            raise DataError(
                f"the checkpoint was made with other data ({', '.join(different)} differ): give the same datasets, "
                "shares and seed, or start in a new output folder"
            )
        self._drawn = state["drawn"]
        self._position = state["position"]
        self._bad = dict(state["dropped"])

    def _prompts(self, places: Sequence[Place], first_index: int, shared: dict[str, Media]) -> list[Prompt]:
        """The prompts of those rows that can be used."""
        questions: list[tuple[str, Path | None, _Question]] = []
        for place in places:
            source = self._sources[place.source]
            name = f"{source.name}:{place.row}"
            if name in self._bad:
                continue
            try:
                question = self._read(place)
            except _UnusableError as error:
                self._drop(name, error)
            else:
                questions.append((name, self._root(source), question))
        questions = self._with_usable_labels(questions)
        prompts: list[Prompt] = []
        for (name, _, question), media in zip(questions, self._open_all(questions), strict=True):
            try:
                if isinstance(media, _UnusableError):
                    raise media
                text, tokens, request = self._tokenize(question, media)
            except _UnusableError as error:
                self._drop(name, error)
                continue
            prompts.append(
                Prompt(
                    index=first_index + len(prompts),
                    source=name,
                    text=text,
                    tokens=tokens,
                    request=request,
                    label=question.label,
                    media=tuple(self._shared(item, shared) for item in media),
                    metadata=question.metadata,
                    is_chat=not isinstance(question.text, str),
                )
            )
        return prompts

    def _read(self, place: Place) -> _Question:
        """The columns of a row, before any image is opened."""
        keys = self._keys[place.source]
        try:
            row = self._sources[place.source][place.row]
        except DataError as error:
            raise _UnusableError("row unreadable", error) from error
        text = row.get(keys["input_key"])
        if not text:
            raise _UnusableError("no question", f"column {keys['input_key']!r} is empty")
        images = _as_list(row.get(keys["image_key"]))
        if len(images) > self._columns.max_images_per_prompt:
            bound = self._columns.max_images_per_prompt
            raise _UnusableError("too many images", f"{len(images)} images, data.max_images_per_prompt is {bound}")
        if images and self._processor.resize_factor is None:
            raise _UnusableError("model takes no images", f"{len(images)} images, but the model takes text only")
        used = set(keys.values())
        metadata = {key: value for key, value in row.items() if key not in used and _is_json(value)}
        label = row.get(keys["label_key"])
        return _Question(text=text, label=_label(label), images=images, metadata=metadata)

    def _with_usable_labels(
        self, questions: Sequence[tuple[str, Path | None, _Question]]
    ) -> list[tuple[str, Path | None, _Question]]:
        """Those whose label some response can match, and those without one; the others are dropped."""
        labels = [question.label for _, _, question in questions if question.label is not None]
        problems = dict(zip(labels, self._label_problems(labels), strict=True))
        usable = []
        for entry in questions:
            label = entry[2].label
            problem = None if label is None else problems[label]
            if problem is None:
                usable.append(entry)
            else:
                self._drop(entry[0], _UnusableError("label unusable", f"{shown(label)}: {problem}"))
        return usable

    def _open_all(
        self, questions: Sequence[tuple[str, Path | None, _Question]]
    ) -> Iterator[tuple[InlineMedia, ...] | _UnusableError]:
        """The images of each question, or why they cannot be used. Decoding runs on several threads."""
        if sum(len(question.images) for _, _, question in questions) < 2:
            yield from (self._open(root, question) for _, root, question in questions)
            return
        with ThreadPoolExecutor(_DECODERS, thread_name_prefix="vlmrl-decode") as pool:
            yield from pool.map(lambda entry: self._open(entry[1], entry[2]), questions)

    def _open(self, root: Path | None, question: _Question) -> tuple[InlineMedia, ...] | _UnusableError:
        try:
            return tuple(
                make_media(image, processor=self._processor, columns=self._columns, root=root)
                for image in question.images
            )
        except DataError as error:
            return _UnusableError("image unusable", error)

    def _tokenize(self, question: _Question, media: Sequence[InlineMedia]) -> tuple[str, Ints, Ints]:
        try:
            rendered = self._processor.render(question.text, num_images=len(media), columns=self._columns)
            tokens, request = self._processor.encode(rendered, [item.size for item in media])
        except DataError as error:
            raise _UnusableError("question and images do not fit" if media else "question unusable", error) from error
        if len(tokens) > self._columns.max_len:
            raise _UnusableError("too long", f"{len(tokens)} tokens, data.max_len is {self._columns.max_len}")
        return self._processor.readable(rendered), tokens, request

    def _shared(self, media: InlineMedia, shared: dict[str, Media]) -> Media:
        if media.hash not in shared:
            shared[media.hash] = self._share(media)
        return shared[media.hash]

    def _root(self, source: Rows) -> Path | None:
        return source.root if self._columns.image_root is None else Path(self._columns.image_root)

    def _drop(self, name: str, error: _UnusableError) -> None:
        self._bad[name] = error.kind
        logger.warning("row %s dropped, %s: %s", name, error.kind, error.detail)
        self._last_dropped = f"{name} ({error.detail})"

    def _check_dropped(self, num_seen: int) -> None:
        judged = min(self.num_rows, max(num_seen, _FEWEST_ROWS_TO_JUDGE))
        bound = self._columns.max_dropped_fraction
        if len(self._bad) > bound * judged or len(self._bad) == self.num_rows:
            reasons = ", ".join(f"{count} {kind}" for kind, count in self.dropped.most_common())
            raise DataError(
                f"{len(self._bad)} of the first {num_seen} rows cannot be used ({reasons}; the last: "
                f"{self._last_dropped}); data.max_dropped_fraction is {bound:g}"
            )

    @cached_property
    def _fingerprint(self) -> dict[str, Any]:
        return {
            "datasets": [source.name for source in self._sources],
            "rows": [len(source) for source in self._sources],
            "content": [_digest(source, keys) for source, keys in zip(self._sources, self._keys, strict=True)],
            "shares and seed": self._order.settings(),
        }


def _find_columns(source: Rows, sources: Sequence[Rows], columns: Columns) -> dict[str, str]:
    """Which column of this source holds what. DataError when one that is needed or asked for is not there."""
    keys = {}
    for setting, own in _OWN_COLUMNS.items():
        key = getattr(columns, setting)
        elsewhere = any(key in other.columns for other in sources)
        if key not in source.columns and source.has_own_columns and elsewhere:
            key = own
        is_needed = setting == "input_key" or (key != own and not elsewhere)
        if key not in source.columns and is_needed:
            near = get_close_matches(key, source.columns, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise DataError(
                f"dataset {source.name} has no column {key!r} (data.{setting}); it has: "
                f"{', '.join(source.columns)}{hint}"
            )
        keys[setting] = key
    # A model that is trained blind looks healthy: pictures that lie there unused are a mistake.
    unused = [
        column
        for column in (*source.image_columns, "image")
        if column in source.columns and column not in keys.values()
    ]
    if unused and keys["image_key"] not in source.columns:
        raise DataError(
            f"dataset {source.name} has images in column {unused[0]!r}, but data.image_key is {keys['image_key']!r}, "
            f"which it does not have: set data.image_key to {unused[0]}, or remove the column"
        )
    return keys


def _as_list(images: Any) -> Sequence[Any]:
    if images is None or (isinstance(images, str | bytes) and not images):
        return []
    if isinstance(images, list | tuple):
        return images
    return [images]


def _label(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, default=str)


def shown(label: object) -> str:
    """A label for a message, cut where it is long."""
    text = repr(label)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _is_json(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_json(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return value is None or isinstance(value, str | int | float | bool)


def _digest(source: Rows, keys: Mapping[str, str]) -> str:
    """A digest of the questions and labels of a few rows, from first to last."""
    digest = hashlib.blake2b(digest_size=8)
    for row in sorted({round(place) for place in np.linspace(0, len(source) - 1, num=8)}):
        try:
            values = source[row]
        except DataError:  # a row that cannot be read is as good a mark as any
            values = {}
        digest.update(repr((values.get(keys["input_key"]), values.get(keys["label_key"]))).encode())
    return digest.hexdigest()
