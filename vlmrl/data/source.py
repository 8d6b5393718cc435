"""Everything about a run's data behind one object, so that it can live in a process of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from PIL import Image

from vlmrl.config.data import Columns, Data
from vlmrl.config.rollout import Held
from vlmrl.data.answers import sft_sample
from vlmrl.data.media import InlineMedia
from vlmrl.data.prompts import PromptStream, shown
from vlmrl.data.rows import Rows, load_all
from vlmrl.errors import DataError
from vlmrl.plugins import processor_of
from vlmrl.storage import writing
from vlmrl.types import Media, Metrics, Prompt, Sample

_ROWS_LOOKED_AT = 256
"""Whose labels are parsed when a run starts."""
_LOOK_LIMIT_S = 20.0
"""For reading these rows, and again for parsing their labels."""
_LABELS_SHOWN = 3


class _Notes(logging.Handler):
    """Keeps what is said of rows that cannot be used, for whoever shows it to people."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class LabelProblems(Protocol):
    """Says of labels why no response can match them."""

    def __call__(self, labels: Sequence[str], *, limit_s: float | None = None) -> Sequence[str | None]:
        """None where one can, and where that was not known after `limit_s` seconds."""


class BadLabels(NamedTuple):
    """What is known of the labels of a run's first rows."""

    num_rows: int
    """Rows that were looked at."""
    problems: dict[str, str]
    """Row -> its label, and why no response can match it."""

    def __str__(self) -> str:
        if not self.problems:
            return f"labels: those of the first {self.num_rows} rows can be used"
        shown = "; ".join(f"{row} {problem}" for row, problem in list(self.problems.items())[:_LABELS_SHOWN])
        return (
            f"labels: {len(self.problems)} of the first {self.num_rows} rows cannot be used by reward.functions, and "
            f"are dropped when they are met: {shown}"
        )


class Source:
    """Training prompts, evaluation prompts and their images.

    Args:
        model: folder or Hub id whose processor reads the data.
        share: turns an image with its pixels into the handle that travels.
        label_problems: says which labels the run's reward functions cannot use; their rows are dropped. None: all can
            be used.
    """

    def __init__(
        self,
        *,
        model: str,
        trust_remote_code: bool,
        data: Columns,
        evaluation: Held | None,
        seed: int,
        share: Callable[[InlineMedia], Media] = lambda media: media,
        label_problems: LabelProblems | None = None,
    ) -> None:
        self._processor = processor_of(model, data, trust_remote_code=trust_remote_code)
        self._data = data
        self._evaluation = evaluation
        self._seed = seed
        self._share = share
        self._label_problems: LabelProblems = label_problems or _no_problems
        self._bytes_moved = 0
        self._notes = _Notes()
        logging.getLogger("vlmrl.data").addHandler(self._notes)
        if isinstance(data, Data):
            sources = load_all(data.prompt_dataset, split=data.prompt_split, max_samples=data.max_samples, seed=seed)
            self._training = self._stream(sources, data.prompt_probs)

    def _stream(self, sources: Sequence[Rows], probs: Sequence[float] | None = None) -> PromptStream:
        return PromptStream(
            sources,
            probs=probs,
            processor=self._processor,
            columns=self._data,
            seed=self._seed,
            share=self._count_and_share,
            label_problems=self._label_problems,
        )

    def draw(self, count: int) -> tuple[list[Prompt], Metrics]:
        """The next `count` prompts, and what they cost."""
        before = self._bytes_moved
        prompts = self._training.draw(count)
        return prompts, {
            "media/bytes_moved": float(self._bytes_moved - before),
            "data/rows_dropped": float(sum(self._training.dropped.values())),
        }

    def draw_samples(self, count: int) -> tuple[list[Sample], Metrics]:
        """The next `count` rows with their answers, ready for supervised training."""
        prompts, metrics = self.draw(count)
        return [
            sft_sample(prompt, answer_of(prompt, self._data.output_key), self._processor) for prompt in prompts
        ], metrics

    def evaluation(self) -> dict[str, list[Prompt]]:
        """Every prompt of each evaluation set, by the set's name."""
        if self._evaluation is None or self._evaluation.dataset is None:
            return {}
        sets: dict[str, list[Prompt]] = {}
        for rows in load_all(
            self._evaluation.dataset,
            split=self._evaluation.split,
            max_samples=self._evaluation.max_samples,
            seed=self._seed,
        ):
            stream = self._stream([rows])
            name, number = rows.name, 2
            while name in sets:
                name, number = f"{rows.name}-{number}", number + 1
            sets[name] = stream.all_prompts(len(rows))
        return sets

    def num_rows(self) -> int:
        """Training rows."""
        return self._training.num_rows

    def look_at_labels(self) -> BadLabels:
        """Parse the labels of the first training rows, for as long as `_LOOK_LIMIT_S` allows; nothing is drawn."""
        labels = self._training.labels(_ROWS_LOOKED_AT, limit_s=_LOOK_LIMIT_S)
        problems = self._label_problems(list(labels.values()), limit_s=_LOOK_LIMIT_S)
        told = [
            (row, f"{shown(label)} ({problem})")
            for (row, label), problem in zip(labels.items(), problems, strict=True)
            if problem is not None
        ]
        return BadLabels(len(labels), dict(told))

    def take_notes(self) -> list[str]:
        """One line for each row that was dropped since the last call: which, and why."""
        lines, self._notes.lines = self._notes.lines, []
        return lines

    def state(self) -> dict[str, Any]:
        """Where the stream stands, as JSON."""
        return self._training.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from there. Raises DataError when the data are others."""
        self._training.load_state(state)

    def save_media(self, folder: Path, media: Sequence[Media]) -> None:
        """Write each image into `folder`, named by its hash, unless it is there. Raises StorageError."""
        with writing("images of the rollouts", folder):
            folder.mkdir(parents=True, exist_ok=True)
            for item in media:
                target = folder / f"{item.hash}.png"
                if not target.exists():
                    partial = target.with_suffix(".tmp")
                    Image.fromarray(item.fetch()).save(partial, format="PNG")
                    partial.replace(target)

    def _count_and_share(self, media: InlineMedia) -> Media:
        self._bytes_moved += media.pixels.nbytes
        return self._share(media)


def _no_problems(labels: Sequence[str], *, limit_s: float | None = None) -> list[None]:
    return [None] * len(labels)


def answer_of(prompt: Prompt, column: str) -> str:
    """What a model should say to this prompt: the answer column, else the label.

    Raises:
        DataError: the row has neither.
    """
    answer = prompt.metadata.get(column, prompt.label)
    if answer is None:
        raise DataError(f"{prompt.source} has no answer: neither a column {column!r} (--data.output_key) nor a label")
    return str(answer)
