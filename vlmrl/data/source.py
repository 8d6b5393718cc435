"""Everything about a run's data behind one object, so that it can live in a process of its own."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from PIL import Image

from vlmrl.config.data import Columns, Data
from vlmrl.config.rollout import Held
from vlmrl.data.columns import NOTHING, Wants
from vlmrl.data.held_out import hold_out
from vlmrl.data.media import InlineMedia
from vlmrl.data.prompts import PromptStream, shown
from vlmrl.data.repeats import Repeats, find_repeats
from vlmrl.data.responses import sft_sample
from vlmrl.data.rows import Rows, first_rows, load_all
from vlmrl.plugins import Processor, processor_of
from vlmrl.system.storage import writing
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
        if not self.num_rows:
            return "labels: none could be looked at among the first rows"
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
        wants: what every row must have beside its question. Evaluation rows need a label where training rows do.
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
        wants: Wants = NOTHING,
    ) -> None:
        self._processor = processor_of(model, data, trust_remote_code=trust_remote_code)
        self._data = data
        self._evaluation = evaluation
        self._seed = seed
        self._share = share
        self._label_problems: LabelProblems = label_problems or _no_problems
        self._wants = wants
        self._bytes_moved = 0
        self._notes = _Notes()
        logging.getLogger("vlmrl.data").addHandler(self._notes)
        self._trained: list[Rows] = []
        self._held_out: list[Rows] = []
        if isinstance(data, Data):
            sources = load_all(data.prompt_dataset, split=data.prompt_split, max_samples=data.max_samples, seed=seed)
            if data.eval_fraction:
                sources, self._held_out = hold_out(sources, data.eval_fraction, seed=seed)
            self._trained = sources
            self._training = self._stream(sources, data.prompt_probs)

    def _stream(
        self, sources: Sequence[Rows], probs: Sequence[float] | None = None, *, among: Sequence[Rows] | None = None
    ) -> PromptStream:
        return PromptStream(
            sources,
            probs=probs,
            processor=self._processor,
            columns=self._data,
            seed=self._seed,
            share=self._count_and_share,
            label_problems=self._label_problems,
            wants=self._wants,
            among=among,
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
        """The next `count` rows with their answers, ready for supervised training; `wants.answer` is to be set."""
        prompts, metrics = self.draw(count)
        samples = []
        for prompt in prompts:
            assert prompt.answer is not None, "the source was not told that its rows have answers"
            samples.append(sft_sample(prompt, prompt.answer, self._processor))
        return samples, metrics

    def evaluation(self) -> dict[str, list[Prompt]]:
        """Every prompt of each evaluation set, by the set's name."""
        sets: dict[str, list[Prompt]] = {}
        for rows, stream, part_of in self._evaluation_streams():
            name, number = rows.name, 2
            while name in sets:
                name, number = f"{rows.name}-{number}", number + 1
            sets[name] = stream.all_prompts(len(rows), part_of=part_of)
        return sets

    def _evaluation_streams(self) -> Iterator[tuple[Rows, PromptStream, int]]:
        """Those of `eval.dataset`, then what is held out of the training rows, and of how many rows each is a part. A
        column that is asked for may be in another dataset of the run."""
        held = self._evaluation
        if held is None:
            return
        loaded = []
        if held.dataset is not None:
            loaded = load_all(held.dataset, split=held.split, max_samples=held.max_samples, seed=self._seed)
        among = [*self._trained, *loaded]
        for rows in loaded:
            yield rows, self._stream([rows], among=among), len(rows)
        for rows, trained in zip(self._held_out, self._trained, strict=False):
            some = first_rows(rows, held.max_samples)
            yield some, self._stream([some], among=among), len(rows) + len(trained)

    @property
    def processor(self) -> Processor:
        """What the model's family does to text and images."""
        return self._processor

    def dropped(self) -> Counter[str]:
        """Why training rows were dropped -> how many of those that were drawn."""
        return self._training.dropped

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

    def look_at_repeats(self) -> Repeats:
        """Count rows that come twice and evaluation rows among the training rows, by their content, as far as
        there is time (`repeats`); nothing is drawn."""
        return find_repeats(self._training.marked, [stream.marked[0] for _, stream, _ in self._evaluation_streams()])

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
