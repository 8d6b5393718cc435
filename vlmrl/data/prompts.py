"""Endless stream of prompts: shuffled by a seed, sources mixed by shares, resumable to the row."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

from vlmrl.config.data import Columns
from vlmrl.data.columns import NO_REQUIREMENTS, RowRequirements, as_list, find_columns, top_column, value_at
from vlmrl.data.conversations import check_roles, read_conversation, split_answer, with_media
from vlmrl.data.digests import RowHasher
from vlmrl.data.fingerprint import checkpoint_fingerprints, compare, fingerprint
from vlmrl.data.image_source import ImageAccess
from vlmrl.data.labels import class_name, format_label, label_text
from vlmrl.data.media import InlineMedia
from vlmrl.data.order import RowIndex, RowOrder, end_of_rows
from vlmrl.data.prompt_tokens import PromptTokens, tokenize_question
from vlmrl.data.question import Question
from vlmrl.data.row_media import MediaRules, as_videos, kind_of_problem, open_row_media
from vlmrl.data.rows import Rows
from vlmrl.data.targets import supervise
from vlmrl.data.unusable import UnusableError, check_depth, metadata_of, unusable_on_error
from vlmrl.errors import ConfigError, DataError
from vlmrl.plugins import Processor
from vlmrl.system.plain_text import one_line
from vlmrl.types import Media, Prompt

logger = logging.getLogger("vlmrl.data")

_MIN_ROWS_FOR_FRACTION = 1000
"""The fraction of dropped rows is computed over at least this many rows, or over all if there are fewer."""
_MAX_DETAIL_CHARS = 500
"""Of the reason in a warning about a dropped row."""
_NUM_DECODERS = min(8, os.cpu_count() or 1)


LabelProblems = Callable[[Sequence[str]], Sequence[str | None]]
"""Maps labels to the reasons why no response can match them; None for a label that a response can match."""


def _keep_inline(media: InlineMedia) -> Media:
    return media


def _no_problems(labels: Sequence[str]) -> list[None]:
    return [None] * len(labels)


class PromptStream:
    """Stream of prompts, endless or of some episodes, each row once per episode.

    Each episode is a new permutation that follows from `seed`. Without `probs` the sources form one pool; with `probs`
    the source of each prompt is drawn by these shares, and each source has its own episodes. A row that cannot be used
    is dropped whole, counted in `dropped` and named in a warning.

    Raises:
        DataError: a source is empty or lacks a column.
        ConfigError: `probs` does not have one share per source.
    """

    def __init__(
        self,
        sources: Sequence[Rows],
        *,
        probs: Sequence[float] | None,
        processor: Processor,
        columns: Columns,
        seed: int,
        share: Callable[[InlineMedia], Media] = _keep_inline,
        label_problems: LabelProblems = _no_problems,
        requirements: RowRequirements = NO_REQUIREMENTS,
        run_sources: Sequence[Rows] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        agent_max_images: int | None = None,
        episodes: int | None = None,
    ) -> None:
        """`run_sources`: all datasets that the settings apply to; a configured column must be in one of them. None: the
        sources. `tools`: functions that the prompts show. `agent_max_images`: images of a conversation that begins with
        the prompt; None without an environment. `episodes`: how often each row is read; None: the stream is endless."""
        if not sources:
            raise DataError("there is no dataset to draw prompts from")
        if probs is not None and len(probs) != len(sources):
            raise ConfigError(f"data.prompt_probs has {len(probs)} shares for {len(sources)} datasets")
        for source in sources:
            if len(source) == 0:
                raise DataError(f"dataset {source.name} has no rows")
        self._sources = tuple(sources)
        self._keys = [find_columns(source, run_sources or sources, columns, requirements) for source in sources]
        self._accesses = [ImageAccess.of(source.root, columns, source.image_folders) for source in sources]
        self._requirements = requirements
        self._processor = processor
        self._columns = columns
        self._share = share
        self._tools = tools
        self._media_rules = MediaRules(processor, columns, agent_max_images)
        self._label_problems = label_problems
        self._order = RowOrder([len(source) for source in sources], probs, seed, episodes)
        self._drawn = 0
        self._position = 0
        self._dropped_rows: dict[str, str] = {}
        self._named_rows: set[str] = set()
        self._last_dropped = "before the run was resumed"

    @property
    def num_rows(self) -> int:
        """Number of rows of all sources: the length of an episode."""
        return sum(map(len, self._sources))

    @property
    def hashers(self) -> list[RowHasher]:
        """For each source, an object that computes the digests of its rows."""
        return [
            RowHasher(source, keys, access)
            for source, keys, access in zip(self._sources, self._keys, self._accesses, strict=True)
        ]

    @property
    def position(self) -> int:
        """Number of prompts drawn so far: the index of the next one."""
        return self._position

    @property
    def dropped(self) -> Counter[str]:
        """Number of distinct rows dropped, by reason."""
        return Counter(self._dropped_rows.values())

    def draw(self, n: int) -> list[Prompt]:
        """Return the next n prompts.

        Raises:
            EndOfRowsError: fewer are left in the episodes of the stream, which does not advance.
            DataError: more than `columns.max_dropped_fraction` of the rows were dropped.
        """
        prompts: list[Prompt] = []
        shared: dict[str, Media] = {}
        drawn = self._drawn
        while len(prompts) < n:
            # Exactly as many rows as prompts are missing, so that no drawn row has to be kept for later.
            indices = self._order.take(self._drawn, n - len(prompts))
            if not indices:
                self._drawn = drawn
                raise end_of_rows(self.num_rows, num_dropped=len(self._dropped_rows), left_out=len(prompts), size=n)
            self._drawn += len(indices)
            prompts += self._prompts(indices, self._position + len(prompts), shared)
            self._check_dropped(min(self._drawn, self.num_rows))
        self._position += n
        return prompts

    def all_prompts(self, limit: int, *, start: int = 0, part_of: int = 0) -> list[Prompt]:
        """Return up to `limit` prompts in row order, from row `start` on; the stream does not advance.

        Held-out rows are part of a dataset of `part_of` rows: dropped rows are then counted as a fraction of all of it.
        """
        end = min(start + limit, self.num_rows)
        prompts = self._prompts([self._order.in_order(position) for position in range(start, end)], start, {})
        self._check_dropped(end, part_of=part_of)
        return prompts

    def labels(self, limit: int, *, limit_s: float) -> dict[str, str]:
        """Return the labels of the next rows of the stream, by row name; the stream does not advance.

        Reads up to `limit` rows, for up to `limit_s` seconds.
        """
        labels: dict[str, str] = {}
        deadline = time.monotonic() + limit_s
        for k in range(min(limit, self.num_rows)):
            index = self._order.at(self._drawn + k)
            with suppress(UnusableError):
                label = self._read(index).label
                if label is not None:
                    labels[self._sources[index.source].row_name(index.row)] = label
            if time.monotonic() > deadline:
                break
        return labels

    def state(self) -> dict[str, Any]:
        """Return the state of the stream as JSON."""
        return {
            "data": self._fingerprint,
            "drawn": self._drawn,
            "position": self._position,
            "dropped": dict(self._dropped_rows),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of another stream over the same data.

        Raises:
            DataError: the data differ; the message names the differences.
        """
        saved, current = state["data"], self._fingerprint
        differences = compare(checkpoint_fingerprints(saved), current["datasets"])
        certain = differences.certain + ["shares and seed"] * (saved["shares and seed"] != current["shares and seed"])
        if certain:
            raise DataError(
                f"the checkpoint was made with other data ({'; '.join(certain)}): give the same datasets, shares and "
                "seed, or start in a new output folder"
            )
        for path in differences.possible:
            logger.warning("%s was modified after the checkpoint; the blocks compared are unchanged", one_line(path))
        self._drawn = state["drawn"]
        self._position = state["position"]
        self._dropped_rows = dict(state["dropped"])

    def _prompts(self, indices: Sequence[RowIndex], first_index: int, shared: dict[str, Media]) -> list[Prompt]:
        """Make the prompts of the usable rows; drop the others."""
        questions: list[tuple[str, ImageAccess, Question]] = []
        for index in indices:
            source = self._sources[index.source]
            name = source.row_name(index.row)
            if name in self._dropped_rows:
                continue
            try:
                question = self._read(index)
            except UnusableError as error:
                self._drop(name, error)
            else:
                questions.append((name, self._accesses[index.source], question))
        questions = self._with_usable_labels(questions)
        prompts: list[Prompt] = []
        for (name, _, question), media in zip(questions, self._open_all(questions), strict=True):
            try:
                if isinstance(media, UnusableError):
                    raise media
                prompts.append(
                    self._with_samples(self._prompt(first_index + len(prompts), name, question, media, shared))
                )
            except UnusableError as error:
                self._drop(name, error)
        return prompts

    def _prompt(
        self, index: int, name: str, question: Question, media: Sequence[InlineMedia], shared: dict[str, Media]
    ) -> Prompt:
        """Make the prompt of a question. Raises UnusableError."""
        text, tokens, request = self._tokenize(question, media)
        shared_media = tuple(self._shared(item, shared) for item in media)
        messages = self._processor.messages(question.rendered, num_images=len(media), columns=self._columns)
        return Prompt(
            index=index,
            source=name,
            text=text,
            tokens=tokens,
            request=request,
            label=question.label,
            media=shared_media,
            metadata=question.metadata,
            answer=question.answer,
            is_chat=not isinstance(question.text, str),
            label_key=question.label_key,
            question=question.text if isinstance(question.text, str) else question.rendered,
            has_question=question.is_question,
            messages=with_media(messages, shared_media),
        )

    def _read(self, index: RowIndex) -> Question:
        """Read the columns of a row, without opening images."""
        with unusable_on_error("row unreadable"):
            row = self._sources[index.source][index.row]
            check_depth(row)
            return self._question(index, row)

    def _question(self, index: RowIndex, row: Mapping[str, Any]) -> Question:
        keys = self._keys[index.source]
        text, inline = read_conversation(value_at(row, keys["input_key"]))
        if not text:
            raise UnusableError("no question", f"column {keys['input_key']!r} is empty")
        label = self._label(index, row)
        answer = None
        if self._requirements.answer:
            with unusable_on_error("roles in a wrong order"):
                check_roles(text)
            with unusable_on_error("no answer"):
                # The label of a judged answer is not its text.
                spare = None if self._requirements.judged else label
                text, answer = split_answer(text, value_at(row, keys["output_key"]), spare, column=keys["output_key"])
                (answer or "").encode()
        images, videos = as_list(value_at(row, keys["image_key"])), as_videos(value_at(row, keys["video_key"]))
        placed, sources = self._media_rules.gather(text, images, inline, videos)
        source = self._sources[index.source]
        # A JSON line may omit a column, which then is None, as in a table.
        absent: Mapping[str, Any] = {} if source.has_own_columns else dict.fromkeys(source.columns)
        metadata = metadata_of({**absent, **row}, set(keys.values()))
        is_question = source.has_questions
        question = Question(text, label, sources, metadata, answer, keys["label_key"], is_question)
        return replace(question, placed=placed) if videos else question

    def _label(self, index: RowIndex, row: Mapping[str, Any]) -> str | None:
        column = self._keys[index.source]["label_key"]
        source = self._sources[index.source]
        with unusable_on_error("label unusable"):
            precision = source.precisions.get(top_column(column) or "")
            value = class_name(value_at(row, column), source.classes.get(column or "", ()))
            label = label_text(value, precision=precision)
            (label or "").encode()
        needed_for = self._requirements.label_needed_for(source, column)
        if label is None and needed_for is not None:
            raise UnusableError("no label", f"column {column!r} is empty, and {needed_for} needs it")
        return label

    def _with_usable_labels(
        self, questions: Sequence[tuple[str, ImageAccess, Question]]
    ) -> list[tuple[str, ImageAccess, Question]]:
        """Keep the questions without a label or with one that a response can match; drop the others."""
        labels = [question.label for _, _, question in questions if question.label is not None]
        problems = dict(zip(labels, self._label_problems(labels), strict=True))
        usable = []
        for entry in questions:
            label = entry[2].label
            problem = None if label is None else problems[label]
            if problem is None:
                usable.append(entry)
            else:
                self._drop(entry[0], UnusableError("label unusable", f"{format_label(label)}: {problem}"))
        return usable

    def _open_all(
        self, questions: Sequence[tuple[str, ImageAccess, Question]]
    ) -> Iterator[tuple[InlineMedia, ...] | UnusableError]:
        """Yield the images of each question, or the reason why they cannot be used. Decodes on several threads."""
        if sum(len(question.images) for _, _, question in questions) < 2:
            yield from (self._open(access, question) for _, access, question in questions)
            return
        with ThreadPoolExecutor(_NUM_DECODERS, thread_name_prefix="vlmrl-decode") as pool:
            yield from pool.map(lambda entry: self._open(entry[1], entry[2]), questions)

    def _open(self, access: ImageAccess, question: Question) -> tuple[InlineMedia, ...] | UnusableError:
        try:
            with unusable_on_error(kind_of_problem(question.images)):
                return open_row_media(
                    question.images,
                    processor=self._processor,
                    columns=self._columns,
                    access=access,
                    # Of a row that is cut, a later video may be left out.
                    max_tokens=None if self._requirements.targets.truncates else self._columns.max_len,
                )
        except UnusableError as error:  # returned, since raising would end the thread pool's iteration
            return error

    def _tokenize(self, question: Question, media: Sequence[InlineMedia]) -> PromptTokens:
        return tokenize_question(
            question.rendered,
            media,
            processor=self._processor,
            columns=self._columns,
            tools=self._tools,
            is_limited=not self._requirements.is_supervised,
        )

    def _with_samples(self, prompt: Prompt) -> Prompt:
        """Add what supervised training learns of the row."""
        if not self._requirements.is_supervised:
            return prompt
        with unusable_on_error("response unusable"):
            return supervise(prompt, self._requirements.targets, processor=self._processor, columns=self._columns)

    def _shared(self, media: InlineMedia, shared: dict[str, Media]) -> Media:
        if media.hash not in shared:
            shared[media.hash] = self._share(media)
        return shared[media.hash]

    def _drop(self, name: str, error: UnusableError) -> None:
        self._dropped_rows[name] = error.kind
        detail = one_line(error.detail, max_chars=_MAX_DETAIL_CHARS)
        if name not in self._named_rows:  # a stage may read rows, go back with `load_state`, and read them again
            logger.warning("row %s dropped, %s: %s", one_line(name), error.kind, detail)
            self._named_rows.add(name)
        self._last_dropped = one_line(f"{name} ({detail})")

    def _check_dropped(self, num_seen: int, *, part_of: int = 0) -> None:
        total = min(max(self.num_rows, part_of), max(num_seen, _MIN_ROWS_FOR_FRACTION))
        bound = self._columns.max_dropped_fraction
        if len(self._dropped_rows) > bound * total or len(self._dropped_rows) == self.num_rows:
            reasons = ", ".join(f"{count} {kind}" for kind, count in self.dropped.most_common())
            raise DataError(
                f"{len(self._dropped_rows)} of the first {num_seen} rows cannot be used ({reasons}; the last: "
                f"{self._last_dropped}); data.max_dropped_fraction is {bound:g}"
            )

    @cached_property
    def _fingerprint(self) -> dict[str, Any]:
        return {
            "datasets": [fingerprint(hasher) for hasher in self.hashers],
            "shares and seed": self._order.settings(),
        }
