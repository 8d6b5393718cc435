"""Training and evaluation data of a run behind one object, which can run in a separate process."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from PIL import Image

from vlmrl.config.data import Columns, Data
from vlmrl.config.rollout import HeldOut
from vlmrl.data.columns import NO_REQUIREMENTS, RowRequirements
from vlmrl.data.duplicates import Duplicates, find_duplicates
from vlmrl.data.fingerprint import Fingerprint, fingerprint
from vlmrl.data.held_out import hold_out
from vlmrl.data.judgements import Judged, check_classes, collate_judged
from vlmrl.data.labelled_steps import LabelledSteps, StepStream, collate_steps
from vlmrl.data.labels import format_label
from vlmrl.data.media import InlineMedia, sheet
from vlmrl.data.pairs import Pairs, PairStream, collate_pairs
from vlmrl.data.prompts import PromptStream
from vlmrl.data.rows import Rows, first_rows, load_all
from vlmrl.data.targets import SupervisedPrompt
from vlmrl.plugins import Processor, processor_of
from vlmrl.system.storage import writing
from vlmrl.types import Media, Metrics, Prompt, Sample

_NUM_CHECKED_ROWS = 256
"""First rows, whose labels are parsed when a run starts."""
_LIMIT_S = 20.0
"""Seconds for reading these rows, and again for parsing their labels."""
_MAX_LABELS_SHOWN = 3


class _WarningCollector(logging.Handler):
    """Collects the warnings about dropped rows, to be printed by the driver."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class TimedLabelProblems(Protocol):
    """`LabelProblems` with a time limit."""

    def __call__(self, labels: Sequence[str], *, limit_s: float | None = None) -> Sequence[str | None]:
        """Return the reason for each label; None if a response can match it, or if `limit_s` was over before it was
        checked."""


class BadLabels(NamedTuple):
    """Labels of a run's first rows that no response can match."""

    num_rows: int
    """Rows that were checked."""
    problems: dict[str, str]
    """Row name -> its label and the reason why no response can match it."""

    def __str__(self) -> str:
        if not self.num_rows:
            return "labels: none of the first rows could be checked"
        if not self.problems:
            return f"labels: those of the first {self.num_rows} rows can be used"
        shown = "; ".join(f"{row} {problem}" for row, problem in list(self.problems.items())[:_MAX_LABELS_SHOWN])
        return (
            f"labels: {len(self.problems)} of the first {self.num_rows} rows cannot be used by reward.functions, and "
            f"their rows are dropped when they are drawn: {shown}"
        )


class Drawn(NamedTuple):
    """A batch of rows, with what a later batch would change."""

    batch: Any
    metrics: Metrics
    state: dict[str, Any]
    """State of the stream after this batch."""
    warnings: list[str]


class Source:
    """Training prompts, evaluation prompts and their images.

    Args:
        model: folder or Hub id whose processor reads the data.
        share: converts an image with its pixels to the handle that is sent to other processes.
        label_problems: finds the labels that the run's reward functions cannot use; their rows are dropped. None: all
            can be used.
        requirements: columns needed in every row. Evaluation rows need a label if training rows do.
        tools: functions that the prompts show, in OpenAI's format.
        agent_max_images: images of a conversation that begins with a prompt; None without an environment.
        epochs: how often each training row is read; None: as often as rows are drawn.
    """

    def __init__(
        self,
        *,
        model: str,
        trust_remote_code: bool,
        data: Columns,
        evaluation: HeldOut | None,
        seed: int,
        share: Callable[[InlineMedia], Media] = lambda media: media,
        label_problems: TimedLabelProblems | None = None,
        requirements: RowRequirements = NO_REQUIREMENTS,
        tools: Sequence[Mapping[str, Any]] = (),
        agent_max_images: int | None = None,
        epochs: int | None = None,
    ) -> None:
        self._processor = processor_of(model, data, trust_remote_code=trust_remote_code)
        if requirements.targets.kind == "text":
            data = data.model_copy(update={"apply_chat_template": False, "input_template": None, "system_prompt": None})
        self._data = data
        self._evaluation = evaluation
        self._seed = seed
        self._share = share
        self._label_problems: TimedLabelProblems = label_problems or _no_problems
        self._requirements = requirements
        self._tools, self._agent_max_images = tools, agent_max_images
        self._bytes_moved = 0
        self._warnings = _WarningCollector()
        logging.getLogger("vlmrl.data").addHandler(self._warnings)
        self._training_rows: list[Rows] = []
        self._held_out: list[Rows] = []
        if isinstance(data, Data):
            sources = load_all(data.prompt_dataset, split=data.prompt_split, max_samples=data.max_samples, seed=seed)
            if data.eval_fraction:
                sources, self._held_out = hold_out(self._stream(sources).hashers, data.eval_fraction, seed=seed)
            self._training_rows = sources
            self._training = self._stream(sources, data.prompt_probs, episodes=epochs)

    def _stream(
        self,
        sources: Sequence[Rows],
        probs: Sequence[float] | None = None,
        *,
        run_sources: Sequence[Rows] | None = None,
        episodes: int | None = None,
    ) -> PromptStream:
        kind = PairStream if self._requirements.pair else PromptStream
        if self._requirements.step_separator is not None:
            kind = StepStream
        return kind(
            sources,
            probs=probs,
            processor=self._processor,
            columns=self._data,
            seed=self._seed,
            share=self._count_and_share,
            label_problems=self._label_problems,
            requirements=self._requirements,
            run_sources=run_sources,
            tools=self._tools,
            agent_max_images=self._agent_max_images,
            episodes=episodes,
        )

    def draw(self, count: int) -> tuple[list[Prompt], Metrics]:
        """Return the next `count` prompts and their metrics."""
        before = self._bytes_moved
        prompts = self._training.draw(count)
        return prompts, {
            "media/bytes_moved": float(self._bytes_moved - before),
            "data/rows_dropped": float(sum(self._training.dropped.values())),
        }

    def draw_samples(self, count: int) -> tuple[list[Sample], Metrics]:
        """Return the next `count` rows as samples for supervised training; requires `requirements.is_supervised`."""
        prompts, metrics = self.draw(count)
        num_cut = sum(isinstance(prompt, SupervisedPrompt) and prompt.is_cut for prompt in prompts)
        return _samples_of(prompts), metrics | {"data/rows_cut": float(num_cut)}

    def draw_with_state(self, method: str, count: int) -> Drawn:
        """Call a method that draws `count` rows; return its result with the state after it."""
        batch, metrics = getattr(self, method)(count)
        return Drawn(batch, metrics, self.state(), self.take_warnings())

    def evaluation_samples(self) -> dict[str, list[Sample]]:
        """Return all rows of each evaluation set as samples; requires `requirements.is_supervised`."""
        return {name: _samples_of(prompts) for name, prompts in self.evaluation().items()}

    def draw_pairs(self, count: int) -> tuple[Pairs, Metrics]:
        """Return the next `count` rows as pairs of responses; requires `requirements.pair`."""
        prompts, metrics = self.draw(count)
        return collate_pairs(prompts), metrics

    def evaluation_pairs(self) -> dict[str, Pairs]:
        """Return all rows of each evaluation set as pairs of responses; requires `requirements.pair`."""
        return {name: collate_pairs(prompts) for name, prompts in self.evaluation().items()}

    def draw_steps(self, count: int) -> tuple[LabelledSteps, Metrics]:
        """Return the next `count` rows as responses with labelled steps; requires `requirements.step_separator`."""
        prompts, metrics = self.draw(count)
        return collate_steps(prompts), metrics

    def evaluation_steps(self) -> dict[str, LabelledSteps]:
        """Return all rows of each evaluation set as responses with labelled steps; requires
        `requirements.step_separator`."""
        return {name: collate_steps(prompts) for name, prompts in self.evaluation().items()}

    def draw_judged(self, count: int) -> tuple[Judged, Metrics]:
        """Return the next `count` rows as responses that are desirable or not; requires `requirements.judged`."""
        prompts, metrics = self.draw(count)
        return collate_judged(_samples_of(prompts), prompts), metrics

    def evaluation_judged(self) -> dict[str, Judged]:
        """Return all rows of each evaluation set as such responses; requires `requirements.judged`."""
        return {name: collate_judged(_samples_of(prompts), prompts) for name, prompts in self.evaluation().items()}

    def check_classes(self) -> None:
        """Raise DataError if the training rows have no desirable or no undesirable response, as far as they can be read
        within `_LIMIT_S`; nothing is drawn. Requires `requirements.judged`."""
        labels = self._training.labels(self._training.num_rows, limit_s=_LIMIT_S)
        check_classes(list(labels.values()), column=self._data.label_key)

    def evaluation(self) -> dict[str, list[Prompt]]:
        """Return all prompts of each evaluation set, by the set's name."""
        sets: dict[str, list[Prompt]] = {}
        for rows, stream, part_of in self._evaluation_streams():
            name, number = rows.name, 2
            while name in sets:
                name, number = f"{rows.name}-{number}", number + 1
            sets[name] = stream.all_prompts(len(rows), part_of=part_of)
        return sets

    def evaluation_rows(self, start: int, count: int) -> list[Prompt]:
        """Return the prompts of up to `count` evaluation rows, from row `start` of all sets on."""
        prompts: list[Prompt] = []
        first = 0
        for rows, stream, part_of in self._streams_of_rows:
            begin, end = max(start - first, 0), min(start + count - first, len(rows))
            if begin < end:
                of_set = stream.all_prompts(end - begin, start=begin, part_of=part_of)
                prompts += [replace(prompt, index=prompt.index + first) for prompt in of_set]
            first += len(rows)
        return prompts

    def evaluation_fingerprints(self) -> tuple[int, list[Fingerprint]]:
        """Return the number of evaluation rows, and what identifies the data of each set."""
        streams = self._streams_of_rows
        fingerprints = [fingerprint(hasher) for _, stream, _ in streams for hasher in stream.hashers]
        return sum(len(rows) for rows, _, _ in streams), fingerprints

    @cached_property
    def _streams_of_rows(self) -> list[tuple[Rows, PromptStream, int]]:
        return list(self._evaluation_streams())

    def _evaluation_streams(self) -> Iterator[tuple[Rows, PromptStream, int]]:
        """Yield the rows of `eval.dataset`, then the held-out training rows, each with its prompts and the number of
        rows that it was split from.

        A configured column need only be in one dataset of the run.
        """
        held = self._evaluation
        if held is None:
            return
        loaded = []
        if held.dataset is not None:
            loaded = load_all(held.dataset, split=held.split, max_samples=held.max_samples, seed=self._seed)
        run_sources = [*self._training_rows, *loaded]
        for rows in loaded:
            yield rows, self._stream([rows], run_sources=run_sources), len(rows)
        for rows, training_rows in zip(self._held_out, self._training_rows, strict=False):
            if not rows:
                continue
            first = first_rows(rows, held.max_samples)
            yield first, self._stream([first], run_sources=run_sources), len(rows) + len(training_rows)

    @property
    def processor(self) -> Processor:
        """The processor of the model's family."""
        return self._processor

    def dropped(self) -> Counter[str]:
        """Return the number of drawn training rows that were dropped, by reason."""
        return self._training.dropped

    def num_rows(self) -> int:
        """Return the number of training rows."""
        return self._training.num_rows

    def check_labels(self) -> BadLabels:
        """Parse the labels of the first training rows within `_LIMIT_S`; nothing is drawn."""
        labels = self._training.labels(_NUM_CHECKED_ROWS, limit_s=_LIMIT_S)
        problems = self._label_problems(list(labels.values()), limit_s=_LIMIT_S)
        unusable = [
            (row, f"{format_label(label)} ({problem})")
            for (row, label), problem in zip(labels.items(), problems, strict=True)
            if problem is not None
        ]
        return BadLabels(len(labels), dict(unusable))

    def find_duplicates(self) -> Duplicates:
        """Find duplicate training rows and evaluation rows among the training rows, within the time limit of
        `vlmrl.data.duplicates`; nothing is drawn."""
        return find_duplicates(
            self._training.hashers, [stream.hashers[0] for _, stream, _ in self._evaluation_streams()]
        )

    def take_warnings(self) -> list[str]:
        """Return the warnings since the last call: one line per dropped row, with its name and the reason."""
        lines, self._warnings.lines = self._warnings.lines, []
        return lines

    def state(self) -> dict[str, Any]:
        """Return the state of the training stream as JSON."""
        return self._training.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a saved state. Raises DataError when the data differ."""
        self._training.load_state(state)

    def save_media(self, folder: Path, media: Sequence[Media]) -> None:
        """Write each image that is not in `folder` yet, named by its hash; of a video a sheet of its frames.

        Raises StorageError.
        """
        with writing("images of the rollouts", folder):
            folder.mkdir(parents=True, exist_ok=True)
            for item in media:
                target = folder / f"{item.hash}.png"
                if not target.exists():
                    partial = target.with_suffix(".tmp")
                    Image.fromarray(sheet(item.fetch())).save(partial, format="PNG")
                    partial.replace(target)

    def _count_and_share(self, media: InlineMedia) -> Media:
        self._bytes_moved += media.pixels.nbytes
        return self._share(media)


def _samples_of(prompts: Sequence[Prompt]) -> list[Sample]:
    samples: list[Sample] = []
    for prompt in prompts:
        assert isinstance(prompt, SupervisedPrompt), "samples require requirements.is_supervised"
        samples += prompt.samples
    return samples


def _no_problems(labels: Sequence[str], *, limit_s: float | None = None) -> list[None]:
    return [None] * len(labels)
