"""The trainer's prompts, in a separate process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vlmrl.cluster.worker_group import WorkerGroup
from vlmrl.data.fingerprint import Fingerprint
from vlmrl.data.judgements import Judged
from vlmrl.data.labelled_steps import LabelledSteps
from vlmrl.data.pairs import Pairs
from vlmrl.data.source import Drawn, Source
from vlmrl.errors import DataError
from vlmrl.types import Media, Metrics, Prompt, Sample


class _Ahead(NamedTuple):
    """A batch that is drawn while the model trains on the one before."""

    method: str
    size: int
    refs: list[Any]


class RemotePrompts:
    """The stream of prompts in a separate process: the driver gets token ids and image handles, never pixels."""

    def __init__(self, group: WorkerGroup[Source], *, say: Callable[[str], None]) -> None:
        """`say` shows users which rows were dropped, and why."""
        self._group = group
        self._say = say
        self._num_dropped = 0.0
        self._ahead: _Ahead | None = None
        self._state: dict[str, Any] = {}

    def check_labels(self) -> None:
        """Show how many labels of the first rows cannot be used, if there are any."""
        labels = self._group.call(lambda source: source.check_labels())[0]
        if labels.problems:
            self._say(str(labels))

    def find_duplicates(self) -> None:
        """Show how many rows are duplicates, or are also in an evaluation set, if there are any."""
        for line in self._group.call(lambda source: source.find_duplicates())[0].lines():
            self._say(line)

    def draw(self, count: int) -> tuple[list[Prompt], Metrics]:
        """Return the next `count` prompts."""
        prompts, metrics = self._group.call(lambda source: source.draw(count))[0]
        self._show_warnings(metrics["data/rows_dropped"])
        return prompts, metrics

    def draw_samples(self, count: int) -> tuple[list[Sample], Metrics]:
        """Return the next `count` rows with their responses, for supervised training."""
        return self._draw_ahead("draw_samples", count)

    def _draw_ahead(self, method: str, count: int) -> tuple[Any, Metrics]:
        """Call a method of `Source` that draws `count` rows, and begin the next call of it, which runs meanwhile.

        Raises EndOfRowsError if the epochs of the run have fewer rows left.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None and (ahead.method, ahead.size) != (method, count):
            self._group.call(lambda source: source.load_state(self._state))  # rows that were drawn for another batch
            ahead = None
        if ahead is None:
            ahead = self._begin(method, count)
        try:
            drawn: Drawn = self._group.wait(ahead.refs)[0]
        except DataError:  # rows that do not fill a batch, or too many that cannot be used: those that it dropped
            self._show_warnings(math.inf)
            raise
        self._state = drawn.state
        for line in drawn.warnings:
            self._say(line)
        self._ahead = self._begin(method, count)
        return drawn.batch, drawn.metrics

    def _begin(self, method: str, count: int) -> _Ahead:
        return _Ahead(method, count, self._group.submit(lambda source: source.draw_with_state(method, count)))

    def evaluation_samples(self) -> dict[str, list[Sample]]:
        """Return all rows of each evaluation set with their responses."""
        sets = self._group.call(lambda source: source.evaluation_samples())[0]
        self._show_warnings(math.inf)
        return sets

    def draw_pairs(self, count: int) -> tuple[Pairs, Metrics]:
        """Return the next `count` rows as pairs of a chosen and a rejected response."""
        return self._draw_ahead("draw_pairs", count)

    def evaluation_pairs(self) -> dict[str, Pairs]:
        """Return all rows of each evaluation set as pairs of a chosen and a rejected response."""
        sets = self._group.call(lambda source: source.evaluation_pairs())[0]
        self._show_warnings(math.inf)
        return sets

    def draw_steps(self, count: int) -> tuple[LabelledSteps, Metrics]:
        """Return the next `count` rows as responses with labelled steps."""
        return self._draw_ahead("draw_steps", count)

    def evaluation_steps(self) -> dict[str, LabelledSteps]:
        """Return all rows of each evaluation set as responses with labelled steps."""
        sets = self._group.call(lambda source: source.evaluation_steps())[0]
        self._show_warnings(math.inf)
        return sets

    def draw_judged(self, count: int) -> tuple[Judged, Metrics]:
        """Return the next `count` rows as responses that are desirable or not."""
        return self._draw_ahead("draw_judged", count)

    def evaluation_judged(self) -> dict[str, Judged]:
        """Return all rows of each evaluation set as responses that are desirable or not."""
        sets = self._group.call(lambda source: source.evaluation_judged())[0]
        self._show_warnings(math.inf)
        return sets

    def check_classes(self) -> None:
        """Raise DataError if the training rows have no desirable or no undesirable response."""
        self._group.call(lambda source: source.check_classes())

    def evaluation(self) -> dict[str, list[Prompt]]:
        """Return all prompts of each evaluation set."""
        sets = self._group.call(lambda source: source.evaluation())[0]
        self._show_warnings(math.inf)
        return sets

    def begin_evaluation_rows(self, start: int, count: int) -> Callable[[], list[Prompt]]:
        """Start to read up to `count` evaluation rows, from row `start` of all sets on.

        Returns a function that waits for their prompts.
        """
        calls = self._group.submit(lambda source: source.evaluation_rows(start, count))

        def take() -> list[Prompt]:
            prompts: list[Prompt] = self._group.wait(calls)[0]
            self._show_warnings(math.inf)
            return prompts

        return take

    def evaluation_fingerprints(self) -> tuple[int, list[Fingerprint]]:
        """Return the number of evaluation rows, and what identifies the data of each set."""
        return self._group.call(lambda source: source.evaluation_fingerprints())[0]

    @property
    def num_rows(self) -> int:
        return self._group.call(lambda source: source.num_rows())[0]

    def state(self) -> dict[str, Any]:
        """State of the stream after the rows that were returned; those drawn ahead are drawn again from it."""
        if self._ahead is not None:
            return self._state
        return self._group.call(lambda source: source.state())[0]

    def load_state(self, state: dict[str, Any]) -> None:
        self._ahead = None
        self._group.call(lambda source: source.load_state(state))

    def save_media(self, folder: Path, media: Sequence[Media]) -> None:
        """Write the images into `folder`, each named by its hash."""
        self._group.call(lambda source: source.save_media(folder, list(media)))

    def _show_warnings(self, num_dropped: float) -> None:
        if num_dropped > self._num_dropped:
            for line in self._group.call(lambda source: source.take_warnings())[0]:
                self._say(line)
            self._num_dropped = num_dropped if math.isfinite(num_dropped) else self._num_dropped
