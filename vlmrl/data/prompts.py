"""The endless stream of prompts: shuffled by a seed, mixed by shares, resumable to the row."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vlmrl.config.data import Columns
from vlmrl.data.columns import NOTHING, Wants, as_list, find_columns, top, value_at
from vlmrl.data.conversations import read_conversation, split_answer
from vlmrl.data.fingerprint import differences, fingerprint, saved_in
from vlmrl.data.image_source import Reach
from vlmrl.data.labels import class_name, label_text
from vlmrl.data.marks import Marked
from vlmrl.data.media import InlineMedia, make_row_media
from vlmrl.data.order import Order, Place
from vlmrl.data.rows import Rows
from vlmrl.data.unusable import UnusableError, blamed_on_row, check_depth, metadata_of
from vlmrl.errors import ConfigError, DataError
from vlmrl.plugins import Processor
from vlmrl.system.plain_text import one_line
from vlmrl.types import Ints, Media, Prompt

logger = logging.getLogger("vlmrl.data")

_FEWEST_ROWS_TO_JUDGE = 1000
"""The share of unusable rows is judged over at least so many rows, or over all where there are fewer."""
_LONGEST_SHOWN = 80
"""Characters of a label in a warning."""
_LONGEST_DETAIL = 500
"""Characters of what is said of a dropped row."""
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
    answer: str | None
    label_key: str | None


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
        wants: Wants = NOTHING,
        among: Sequence[Rows] | None = None,
    ) -> None:
        """`among` are the datasets that the settings' columns are of, one of which has to have what they name; None:
        the sources."""
        if not sources:
            raise DataError("there is no dataset to draw prompts from")
        if probs is not None and len(probs) != len(sources):
            raise ConfigError(f"data.prompt_probs has {len(probs)} shares for {len(sources)} datasets")
        for source in sources:
            if len(source) == 0:
                raise DataError(f"dataset {source.name} has no rows")
        self._sources = tuple(sources)
        self._keys = [find_columns(source, among or sources, columns, wants) for source in sources]
        self._reaches = [Reach.of(source.root, columns, source.image_folders) for source in sources]
        self._wants = wants
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
    def marked(self) -> list[Marked]:
        """What marks are made from: each source with its columns and the reach of its images."""
        return [
            Marked(source, keys, reach)
            for source, keys, reach in zip(self._sources, self._keys, self._reaches, strict=True)
        ]

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

    def all_prompts(self, limit: int, *, part_of: int = 0) -> list[Prompt]:
        """At most `limit` prompts in the order of the rows, for evaluation; the stream itself does not move.

        Where the rows are a part of so many, those that cannot be used are judged as a share of them all.
        """
        places = [Place(s, row) for s, source in enumerate(self._sources) for row in range(len(source))][:limit]
        prompts = self._prompts(places, 0, {})
        self._check_dropped(len(places), part_of=part_of)
        return prompts

    def labels(self, limit: int, *, limit_s: float) -> dict[str, str]:
        """The labels of the first rows that the stream comes to: row -> label. At most `limit` rows, and those that can
        be read within `limit_s` seconds; the stream itself does not move."""
        found: dict[str, str] = {}
        deadline = time.monotonic() + limit_s
        for k in range(min(limit, self.num_rows)):
            place = self._order.place(self._drawn + k)
            with suppress(UnusableError):
                label = self._read(place).label
                if label is not None:
                    found[self._sources[place.source].row_name(place.row)] = label
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
        """Continue where another stream over the same data stood. DataError, with names, when the data are others."""
        saved, mine = state["data"], self._fingerprint
        found = differences(saved_in(saved), mine["datasets"])
        different = found.sure + ["shares and seed"] * (saved["shares and seed"] != mine["shares and seed"])
        if different:
            raise DataError(
                f"the checkpoint was made with other data ({'; '.join(different)}): give the same datasets, shares and "
                "seed, or start in a new output folder"
            )
        for path in found.doubtful:
            logger.warning("%s was written since the checkpoint; what was read of it is as before", one_line(path))
        self._drawn = state["drawn"]
        self._position = state["position"]
        self._bad = dict(state["dropped"])

    def _prompts(self, places: Sequence[Place], first_index: int, shared: dict[str, Media]) -> list[Prompt]:
        """The prompts of those rows that can be used."""
        questions: list[tuple[str, Reach, _Question]] = []
        for place in places:
            source = self._sources[place.source]
            name = source.row_name(place.row)
            if name in self._bad:
                continue
            try:
                question = self._read(place)
            except UnusableError as error:
                self._drop(name, error)
            else:
                questions.append((name, self._reaches[place.source], question))
        questions = self._with_usable_labels(questions)
        prompts: list[Prompt] = []
        for (name, _, question), media in zip(questions, self._open_all(questions), strict=True):
            try:
                if isinstance(media, UnusableError):
                    raise media
                text, tokens, request = self._tokenize(question, media)
            except UnusableError as error:
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
                    answer=question.answer,
                    is_chat=not isinstance(question.text, str),
                    label_key=question.label_key,
                )
            )
        return prompts

    def _read(self, place: Place) -> _Question:
        """The columns of a row, before any image is opened."""
        with blamed_on_row("row unreadable"):
            row = self._sources[place.source][place.row]
            check_depth(row)
            return self._question(place, row)

    def _question(self, place: Place, row: Mapping[str, Any]) -> _Question:
        keys = self._keys[place.source]
        text, inline = read_conversation(value_at(row, keys["input_key"]))
        if not text:
            raise UnusableError("no question", f"column {keys['input_key']!r} is empty")
        label = self._label(place, row)
        answer = None
        if self._wants.answer:
            with blamed_on_row("no answer"):
                text, answer = split_answer(text, value_at(row, keys["output_key"]), label, column=keys["output_key"])
                (answer or "").encode()
        images = self._images(as_list(value_at(row, keys["image_key"])), inline)
        source = self._sources[place.source]
        # A line of JSON may leave out what it has not; whoever asks for the column gets None, as from a table.
        absent: Mapping[str, Any] = {} if source.has_own_columns else dict.fromkeys(source.columns)
        metadata = metadata_of({**absent, **row}, set(keys.values()))
        return _Question(
            text=text, label=label, images=images, metadata=metadata, answer=answer, label_key=keys["label_key"]
        )

    def _label(self, place: Place, row: Mapping[str, Any]) -> str | None:
        column = self._keys[place.source]["label_key"]
        source = self._sources[place.source]
        with blamed_on_row("label unusable"):
            precision = source.precisions.get(top(column) or "")
            value = class_name(value_at(row, column), source.classes.get(column or "", ()))
            label = label_text(value, precision=precision)
            (label or "").encode()
        needed_by = self._wants.label_of(source, column)
        if label is None and needed_by is not None:
            raise UnusableError("no label", f"column {column!r} is empty, and {needed_by} needs it")
        return label

    def _images(self, images: Sequence[Any], inline: Sequence[Any]) -> Sequence[Any]:
        """Those of the row's column, or those inside its messages."""
        if images and inline:
            raise UnusableError(
                "question and images do not fit",
                f"{len(inline)} images inside the messages and {len(images)} in data.image_key: give one of them",
            )
        images = inline or images
        if len(images) > self._columns.max_images_per_prompt:
            bound = self._columns.max_images_per_prompt
            raise UnusableError("too many images", f"{len(images)} images, data.max_images_per_prompt is {bound}")
        if images and self._processor.resize_factor is None:
            raise UnusableError("model takes no images", f"{len(images)} images, but the model takes text only")
        return images

    def _with_usable_labels(
        self, questions: Sequence[tuple[str, Reach, _Question]]
    ) -> list[tuple[str, Reach, _Question]]:
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
                self._drop(entry[0], UnusableError("label unusable", f"{shown(label)}: {problem}"))
        return usable

    def _open_all(
        self, questions: Sequence[tuple[str, Reach, _Question]]
    ) -> Iterator[tuple[InlineMedia, ...] | UnusableError]:
        """The images of each question, or why they cannot be used. Decoding runs on several threads."""
        if sum(len(question.images) for _, _, question in questions) < 2:
            yield from (self._open(reach, question) for _, reach, question in questions)
            return
        with ThreadPoolExecutor(_DECODERS, thread_name_prefix="vlmrl-decode") as pool:
            yield from pool.map(lambda entry: self._open(entry[1], entry[2]), questions)

    def _open(self, reach: Reach, question: _Question) -> tuple[InlineMedia, ...] | UnusableError:
        try:
            with blamed_on_row("image unusable"):
                return make_row_media(question.images, processor=self._processor, columns=self._columns, reach=reach)
        except UnusableError as error:  # a result, since one thread of several ends here
            return error

    def _tokenize(self, question: _Question, media: Sequence[InlineMedia]) -> tuple[str, Ints, Ints]:
        with blamed_on_row("question and images do not fit" if media else "question unusable"):
            rendered = self._processor.render(question.text, num_images=len(media), columns=self._columns)
            rendered.encode()  # half of a surrogate pair is no text
            tokens, request = self._processor.encode(rendered, [item.size for item in media])
        if not len(tokens):
            raise UnusableError("question unusable", "it is no token long")
        if len(tokens) > self._columns.max_len:
            raise UnusableError("too long", f"{len(tokens)} tokens, data.max_len is {self._columns.max_len}")
        return self._processor.readable(rendered), tokens, request

    def _shared(self, media: InlineMedia, shared: dict[str, Media]) -> Media:
        if media.hash not in shared:
            shared[media.hash] = self._share(media)
        return shared[media.hash]

    def _drop(self, name: str, error: UnusableError) -> None:
        self._bad[name] = error.kind
        detail = one_line(error.detail, most=_LONGEST_DETAIL)
        logger.warning("row %s dropped, %s: %s", one_line(name), error.kind, detail)
        self._last_dropped = one_line(f"{name} ({detail})")

    def _check_dropped(self, num_seen: int, *, part_of: int = 0) -> None:
        judged = min(max(self.num_rows, part_of), max(num_seen, _FEWEST_ROWS_TO_JUDGE))
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
            "datasets": [fingerprint(marked) for marked in self.marked],
            "shares and seed": self._order.settings(),
        }


def shown(label: object) -> str:
    """A label for a message, cut where it is long."""
    text = repr(label)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
