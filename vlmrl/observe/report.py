"""Report each step's metrics to the terminal, the metrics files, the plot and the page."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from vlmrl.config.ckpt import Logger
from vlmrl.errors import StorageError
from vlmrl.observe.facts import RunEnd, RunFacts
from vlmrl.observe.plots import draw_curves
from vlmrl.observe.progress import Progress
from vlmrl.observe.run_folder import RunFolder
from vlmrl.observe.samples import samples_of_evaluations, samples_of_step
from vlmrl.observe.sinks import Sink, open_sinks
from vlmrl.observe.start_times import StartTimes
from vlmrl.observe.trackers import OnlyNew, Opening, open_trackers
from vlmrl.system import exits, stops
from vlmrl.types import Metrics

_DRAW_EVERY = 10
"""Steps between two drawings of curves.png: a drawing takes about a second."""
_LIMIT_S, _LIMIT_OF_STOP_S = 60.0, 10.0
"""Longest wait for the page, and for each tracker, at the end of a run, and of one that is stopped: its grace may be
short."""


class Page(Protocol):
    """The page of a run, which is made beside it. Failures are returned, not raised."""

    def refresh(self) -> str | None:
        """Begin to make it, unless it was made a short time ago; return why an earlier one failed."""

    def finish_soon(self) -> None:
        """Begin to make the last one, in place of any that is being made."""

    def wait(self, timeout_s: float) -> str | None:
        """Wait for the last one; return why it failed."""


class RunReport:
    """Terminal output, metrics files, plot and page of a run. Use as a context manager around the run.

    Its end only begins the last drawing of the plot and the last page: call `finish` when all else has ended.

    Args:
        start_times: those of the phases that have ended; the last one ends with `begin`.
        is_quiet: print warnings, errors and results only.
        page: None: the run writes none.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        logger: Logger,
        config: Mapping[str, Any],
        title: str,
        start_times: StartTimes | None = None,
        is_quiet: bool = False,
        page: Page | None = None,
    ) -> None:
        self._folder = folder
        self._logger = logger
        self._config = config
        self._progress = Progress(title=title, place=_short(folder.root), is_quiet=is_quiet)
        self._sinks: list[Sink] = []
        self._trackers: list[OnlyNew] = []
        self._start_times = start_times or StartTimes()
        self._page = page
        self._facts = RunFacts(folder.facts)
        self._noted: dict[str, Any] = {}
        self._first_step = 1
        self._unwritten: tuple[int, Metrics] | None = None
        """The last step, if `logger.logging_steps` passes over it: the last one of a run is written."""
        self._is_plot_current = True
        self._drawing: Future[None] | None = None
        """The last drawing of the plot, in a thread."""
        self._reported: set[str] = set()
        """Failures that were printed, each of which is printed once."""
        self._disk_failed = False
        """Whether a storage error ends the run; further write errors are then not printed."""

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._disk_failed = isinstance(error, StorageError)
        self._progress.__exit__(kind, error, tb)
        if self._unwritten is not None:
            self._try(partial(self._write, *self._unwritten), "the metrics of the last step could not be written")
        for sink in self._sinks:
            self._try(sink.close, f"{type(sink).__name__} did not close")
        if not self._is_plot_current:
            pool = ThreadPoolExecutor(max_workers=1)
            self._drawing = pool.submit(draw_curves, self._folder.metrics, self._folder.curves)
            pool.shutdown(wait=False)
        if error is None:
            self._end(None)

    def finish(self, error: BaseException | None = None) -> None:
        """Wait for the last drawing of the plot and the last page, which take seconds where nothing is imported yet.

        Then close the trackers, which may wait for their services: nothing else waits for them.

        `error` is what ends the run, when all that follows the report, such as saving on a stop, has added to it.
        """
        if error is not None:
            self._end(error)
        if self._drawing is not None:
            self._is_plot_current = self._try(self._drawing.result, self._plot_failure)
        limit_s = _LIMIT_OF_STOP_S if _end_of(error) == "stopped" else _LIMIT_S
        self._ask_page(lambda page: page.wait(limit_s))
        for tracker in self._trackers:
            self._close(tracker, _end_of(error), limit_s=limit_s)
        self._trackers.clear()

    def _close(self, tracker: OnlyNew, end: RunEnd, *, limit_s: float) -> None:
        failure = f"{_name(tracker)} did not close"
        thread = threading.Thread(target=self._try, args=(partial(tracker.close, end), failure), daemon=True)
        thread.start()
        thread.join(limit_s)
        if thread.is_alive():
            exits.abandon(_name(tracker))
            self._say_once(failure, f"within {limit_s:g} s: its last metrics may be lost")

    def _end(self, error: BaseException | None) -> None:
        """Note how the run ended, and begin the last page."""
        self._note_end(error)
        if self._sinks:
            self._ask_page(lambda page: page.finish_soon())

    def note(self, **facts: Any) -> None:
        """Keep facts of the run for its page, such as its placement. They are written when the run begins: one that
        cannot resume leaves those of the run as they are."""
        self._noted |= facts
        if self._sinks:
            self._try(lambda: self._facts.note(**self._noted), "facts.json could not be written")

    def say(self, message: RenderableType) -> None:
        """Print a message."""
        self._progress.say(message)

    def begin(self, *, total_steps: int, done: int) -> None:
        """Open the sinks and start timing. Metrics that an earlier run wrote for steps after `done` are dropped.

        Raises:
            ConfigError: a configured sink cannot be used.
        """
        # Trackers come first: if one fails, the files must not have dropped any steps yet.
        self._trackers = self._open_trackers(resumes=done > 0)
        self._sinks = open_sinks(
            self._logger,
            metrics=self._folder.metrics,
            tensorboard=self._folder.tensorboard,
            first_step=done + 1 if done else 0,
        )
        self._first_step = done + 1
        self.note(total_steps=total_steps, done=done)
        self._start_times.end("roles")
        self._progress.begin(total_steps=total_steps, done=done)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Measure a phase of the step as `time/<name>_s`."""
        return self._progress.phase(name)

    def generated(self, done: int, total: int) -> None:
        """Show how many of the step's prompts have their responses."""
        self._progress.advance(done, total)

    def step(self, step: int, metrics: Metrics) -> None:
        """Add times and throughput to the metrics of a finished step, show them and write them."""
        metrics = metrics | self._progress.take_times()
        if "batch/tokens" in metrics:
            metrics["throughput/tokens_per_s"] = metrics["batch/tokens"] / metrics["time/step_s"]
        self._progress.step(step, metrics)
        evaluated = any(name.startswith("eval/") for name in metrics)
        # The first one has what is checked once, and the times of the start.
        if step % self._logger.logging_steps == 0 or step == self._first_step or evaluated:
            self._write(step, metrics)
        else:
            self._unwritten = step, metrics
        is_sampled = self._logger.sample_steps > 0 and step % self._logger.sample_steps == 0
        if is_sampled or evaluated:
            self._write_samples(step, of_step=is_sampled and self._logger.rollouts, of_evaluations=evaluated)
        if step % _DRAW_EVERY == 0:
            self._draw()
        if self._page is not None and (step % _DRAW_EVERY == 0 or step == self._first_step or evaluated):
            self._ask_page(lambda page: page.refresh())

    def evaluation(self, step: int, metrics: Metrics) -> None:
        """Show and write an evaluation before the first step or after the last."""
        if metrics:
            if self._unwritten is not None and self._unwritten[0] == step:
                self._write(*self._unwritten)
            metrics = metrics | self._progress.take_times()
            self._progress.evaluation(step, metrics)
            self._write(step, metrics)
            self._write_samples(step, of_step=False, of_evaluations=True)

    def _write(self, step: int, metrics: Metrics) -> None:
        self._unwritten = None
        metrics = metrics | self._start_times.take()
        for sink in self._sinks:
            sink.write(step, metrics)
        # A service that cannot be reached is no reason to end a run.
        for tracker in self._trackers:
            self._try(partial(tracker.write, step, metrics), f"{_name(tracker)} did not take the metrics of a step")
        self._is_plot_current = False

    def _write_samples(self, step: int, *, of_step: bool, of_evaluations: bool) -> None:
        """Send some responses to TensorBoard and the trackers."""
        num_prompts = self._logger.num_samples
        sinks: list[Sink | OnlyNew] = [*self._sinks, *self._trackers]
        samples = {}
        if of_step:
            samples["train"] = samples_of_step(self._folder.rollouts, step, num_prompts=num_prompts)
        if of_evaluations:
            evaluated = samples_of_evaluations(self._folder.rollouts, step, num_prompts=num_prompts)
            samples |= {f"eval/{name}": rows for name, rows in evaluated.items()}
        for name, rows in samples.items():
            for sink in sinks if rows else ():
                self._try(partial(sink.write_samples, step, name, rows), f"{_name(sink)} did not take responses")

    def _open_trackers(self, *, resumes: bool) -> list[OnlyNew]:
        return open_trackers(self._logger, Opening(self._folder.root, self._config, resumes))

    def _draw(self) -> None:
        if not self._is_plot_current:
            self._is_plot_current = self._try(
                lambda: draw_curves(self._folder.metrics, self._folder.curves), self._plot_failure
            )

    def _note_end(self, error: BaseException | None) -> None:
        if self._sinks:
            reason = "" if error is None else str(error) or type(error).__name__
            self._try(lambda: self._facts.end(_end_of(error), reason), "facts.json could not be written")

    def _ask_page(self, ask: Callable[[Page], str | None]) -> None:
        """Ask for a page, if the run writes one; print once why it could not be made."""

        def asked() -> None:
            if self._page is not None and (failure := ask(self._page)) is not None:
                self._say_once(what, failure)

        what = f"{self._folder.report.name} could not be written"
        self._try(asked, what)

    @property
    def _plot_failure(self) -> str:
        return f"{self._folder.curves.name} could not be drawn"

    def _try(self, action: Callable[[], object], failure: str) -> bool:
        """Run `action` and return whether it succeeded. An error is printed once after `failure`, not raised.

        A plot is no reason to end a run, and an error during the shutdown must not hide the one that ended the run.
        """
        try:
            action()
        except Exception as error:  # matplotlib, TensorBoard and W&B raise errors of any type
            is_known = self._disk_failed and isinstance(error, OSError | StorageError)
            if not is_known:
                self._say_once(failure, f"{type(error).__name__}: {error}")
            self._reported.add(failure)
            return False
        return True

    def _say_once(self, failure: str, reason: str) -> None:
        if failure not in self._reported:
            self._progress.say(Text(f"{failure}: {' '.join(reason.split())[:300]}"))
        self._reported.add(failure)


def _end_of(error: BaseException | None) -> RunEnd:
    """Return how a run ends with this error. The signal of a stop may have ended roles first."""
    if error is None:
        return "finished"
    return "stopped" if isinstance(error, KeyboardInterrupt) or stops.is_stopping() else "failed"


def _name(sink: Sink | OnlyNew) -> str:
    return type(sink.tracker if isinstance(sink, OnlyNew) else sink).__name__


def _short(folder: Path) -> str:
    """The path relative to the working directory, where it lies below it."""
    return str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)


def parameter_table(rows: Sequence[tuple[str, int, int]]) -> Table:
    """Format trainable and total parameters per part of the model; rows are (part, trainable, all)."""
    table = Table(title="parameters")
    for column in ("part", "trainable", "all"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for part, trainable, total in rows:
        table.add_row(part, f"{trainable:,}", f"{total:,}")
    table.add_section()
    table.add_row("all", f"{sum(r[1] for r in rows):,}", f"{sum(r[2] for r in rows):,}")
    return table


def save_table(path: Path, rows: Sequence[tuple[str, int, int]]) -> None:
    """Write the rows of `parameter_table` as tab-separated values."""
    lines = ["part\ttrainable\tall", *("\t".join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
