"""Progress of a run: a live panel on a terminal, one line per step elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.text import Text

from vlmrl.observe import panel
from vlmrl.observe.metrics import accuracies, evaluated_sets
from vlmrl.observe.terminal import LiveDisplay, open_console
from vlmrl.system import stops
from vlmrl.system.plain_text import print_line
from vlmrl.types import Metrics

_RECENT_STEPS = 20
"""Recent steps that the remaining time is estimated from, since the first steps are slow and responses get longer."""

_SHOWN: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("reward/mean", "reward", lambda v: f"{v:.3f}"),
    ("policy/loss", "loss", lambda v: f"{v:.4f}"),
    ("rm/loss", "loss", lambda v: f"{v:.4f}"),
    ("rm/accuracy", "accuracy", lambda v: f"{v:.3f}"),
    ("response/tokens_mean", "tokens/response", lambda v: f"{v:.0f}"),
    ("sync/logprob_diff_max", "engine-trainer", lambda v: f"{v:.1e}"),
    ("kl/reference", "kl", lambda v: f"{v:.2e}"),
    ("distill/kl", "kl to teacher", lambda v: f"{v:.3f}"),
    ("throughput/tokens_per_s", "tokens/s", lambda v: f"{v:,.0f}"),
    ("time/step_s", "s/step", lambda v: f"{v:.1f}"),
)


@dataclass(slots=True)
class _Phase:
    name: str
    start: float
    inner_s: float = 0.0
    """Seconds of nested phases, which this phase does not count as its own."""
    done: int = 0
    total: int = 0


class Progress:
    """Measures and displays the phases of each step. Use as a context manager around the run.

    Its methods may be called from one thread only; a second thread redraws.
    """

    def __init__(
        self,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        title: str = "",
        place: str = "",
        is_quiet: bool = False,
    ) -> None:
        """Prepare the display.

        Args:
            console: by default standard output.
            clock: returns seconds.
            title: name of the verb.
            place: the run's folder.
            is_quiet: print only messages of text, which are warnings and results.
        """
        self._console = console or open_console()
        self._clock = clock
        self._title, self._place = title, place
        self._is_quiet = is_quiet
        self._display: LiveDisplay | None = None
        self._created = clock()
        self._total_steps = 0
        self._step = 0
        self._has_begun = False
        self._step_start = clock()
        self._phases: list[_Phase] = []
        self._spent: dict[str, float] = {}
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._metrics: Metrics = {}
        self._evaluations: dict[str, list[tuple[int, float]]] = {}
        """`math: pass@1` or `pairs: accuracy` -> step and value of each evaluation."""
        self._parts: dict[str, dict[str, float]] = {}
        self._curve: panel.Curve | None = None
        self._checks = panel.Checks()
        self._warnings: list[str] = []

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal and not self._is_quiet:
            self._display = LiveDisplay(self._console, self._render)
            self._display.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._display is not None:
            self._display.__exit__(kind, error, tb)
            self._display = None

    def say(self, message: RenderableType) -> None:
        """Print a message above the live panel; a string is one line of plain text. Quiet runs print no tables."""
        if isinstance(message, str):
            print_line(self._console, message)
        elif isinstance(message, Text) or not self._is_quiet:
            self._console.print(message, soft_wrap=isinstance(message, Text))

    def begin(self, *, total_steps: int, done: int = 0) -> None:
        """Start timing the first step; `done` steps were made by the run that this one resumes."""
        self._total_steps, self._step = total_steps, done
        self._has_begun = True
        self._step_start = self._clock()
        self._spent = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase of a step. Its time, without nested phases, is added to `time/<name>_s`."""
        phase = _Phase(name, self._clock())
        self._phases.append(phase)
        try:
            yield
        finally:
            self._phases.pop()
            duration = self._clock() - phase.start
            self._spent[name] = self._spent.get(name, 0.0) + duration - phase.inner_s
            if self._phases:
                self._phases[-1].inner_s += duration

    def advance(self, done: int, total: int) -> None:
        """Set the progress of the current phase."""
        if self._phases:
            self._phases[-1].done, self._phases[-1].total = done, total

    def take_times(self) -> Metrics:
        """Return `time/<phase>_s` of all phases since the last call, and the time since then as `time/step_s`."""
        now = self._clock()
        times = {f"time/{name}_s": spent for name, spent in self._spent.items()} | {
            "time/step_s": now - self._step_start
        }
        self._spent, self._step_start = {}, now
        return times

    def step(self, step: int, metrics: Metrics) -> None:
        """Show a finished step; `metrics` includes its times from `take_times`."""
        self._step, self._metrics = step, metrics
        if "time/step_s" in metrics:
            self._recent.append(metrics["time/step_s"])
        self._curve = self._curve or panel.curve_of(metrics)
        if self._curve is not None and self._curve.name in metrics:
            self._curve.values.append(metrics[self._curve.name])
        self._warnings = panel.warnings_of(metrics)
        self._store(step, metrics)
        if self._prints_lines:
            parts = [f"step {step}/{self._total_steps}", *self._numbers()]
            print_line(self._console, "  ".join(parts + self._remaining()))
            self._print_evaluations(metrics)

    def evaluation(self, step: int, metrics: Metrics) -> None:
        """Show an evaluation before the first step or after the last."""
        self._warnings = panel.warnings_of(self._metrics | metrics)
        self._store(step, metrics)
        # Without steps the evaluation is the result of the run.
        if self._prints_lines or (self._is_quiet and not self._total_steps):
            self._print_evaluations(metrics)

    @property
    def _prints_lines(self) -> bool:
        return self._display is None and not self._is_quiet

    def _store(self, step: int, metrics: Metrics) -> None:
        self._checks.add(metrics)
        for name, parts in evaluated_sets(metrics).items():
            self._evaluations.setdefault(f"{name}: pass@1", []).append((step, metrics[f"eval/{name}/pass@1"]))
            self._parts[f"{name}: pass@1"] = {part: metrics[f"eval/{name}/{part}/pass@1"] for part in parts}
        for name, metric in accuracies(metrics).items():
            self._evaluations.setdefault(f"{name}: accuracy", []).append((step, metrics[metric]))

    def _print_evaluations(self, metrics: Metrics) -> None:
        for name in evaluated_sets(metrics):
            print_line(self._console, self._history(f"{name}: pass@1"))
        for name in accuracies(metrics):
            print_line(self._console, self._history(f"{name}: accuracy"))

    def _history(self, name: str) -> str:
        """Format the first and latest result: `eval visual_math: pass@1 42.0% at step 0 -> 71.5% at step 50`."""
        return f"eval {name} {self._results(name)}"

    def _results(self, name: str) -> str:
        results = self._evaluations[name]
        ends = [results[0], results[-1]] if len(results) > 1 else results
        shown = [f"{value:.1%} at step {step}" for step, value in ends]
        parts = ", ".join(f"{part} {value:.1%}" for part, value in self._parts.get(name, {}).items())
        return f"{' -> '.join(shown)}{f' ({parts})' if parts else ''}"

    def _numbers(self, *, besides: Collection[str] = ()) -> list[str]:
        names = self._metrics.keys() - set(besides)
        return [f"{label} {show(self._metrics[name])}" for name, label, show in _SHOWN if name in names]

    def _remaining(self) -> list[str]:
        steps = self._total_steps - self._step
        if not self._recent or steps <= 0:
            return []
        return [f"left {_duration(steps * sum(self._recent) / len(self._recent))}"]

    def _render(self) -> RenderableType:
        """Draw the panel; called by the thread that redraws."""
        histories = {name: [value for _, value in list(results)] for name, results in list(self._evaluations.items())}
        view = panel.View(
            title=f"{self._title} is stopping" if stops.is_stopping() else self._title,
            place=self._place,
            elapsed=_duration(self._clock() - self._created),
            step=self._step,
            total_steps=self._total_steps,
            left="".join(self._remaining()),
            phase=self._current(),
            curve=self._curve,
            evaluations={name: (values, self._results(name)) for name, values in histories.items()},
            checks=self._checks.lines(),
            numbers=self._numbers(besides={self._curve.name if self._curve else ""}),
            warnings=self._warnings,
        )
        return panel.draw(view, width=self._console.width, is_unicode=self._console.encoding.startswith("utf"))

    def _current(self) -> panel.Phase | None:
        phase = next(iter(self._phases[-1:]), None)  # the main thread may end it at any moment
        if phase is None:
            return None if self._has_begun else panel.Phase("starting", 0, 0, _duration(self._clock() - self._created))
        return panel.Phase(phase.name, phase.done, phase.total, _duration(self._clock() - phase.start))


def _duration(seconds: float) -> str:
    """Format a duration: `42 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
