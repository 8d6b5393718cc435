"""What a run shows while it runs: a few lines that stay in place on a terminal, else one line per step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vlmrl.observe.metrics import evaluated_sets
from vlmrl.system.plain_text import print_line
from vlmrl.types import Metrics

_RECENT_STEPS = 20
"""The time that is left is told from so many: the first steps are slow, and answers grow."""

_SHOWN: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("reward/mean", "reward", lambda v: f"{v:.3f}"),
    ("policy/loss", "loss", lambda v: f"{v:.4f}"),
    ("response/tokens_mean", "tokens/answer", lambda v: f"{v:.0f}"),
    ("sync/logprob_diff_max", "engine-trainer", lambda v: f"{v:.1e}"),
    ("kl/reference", "kl", lambda v: f"{v:.2e}"),
    ("throughput/tokens_per_s", "tokens/s", lambda v: f"{v:,.0f}"),
    ("time/step_s", "s/step", lambda v: f"{v:.1f}"),
)


@dataclass(slots=True)
class _Phase:
    name: str
    start: float
    inner_s: float = 0.0
    """Spent in phases that were entered inside this one; theirs, not its own."""
    done: int = 0
    total: int = 0


class Progress:
    """Measures the phases of each step and shows them. Use as a context manager around the run.

    It has no thread of its own but the one that redraws, and it may be asked from one thread only.
    """

    def __init__(
        self, *, console: Console | None = None, clock: Callable[[], float] = time.monotonic, title: str = ""
    ) -> None:
        self._console = console or Console()
        self._clock = clock
        self._title = title
        self._live: Live | None = None
        self._total_steps = 0
        self._step = 0
        self._step_start = clock()
        self._phases: list[_Phase] = []
        self._spent: dict[str, float] = {}
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._metrics: Metrics = {}
        self._evaluations: dict[str, list[tuple[int, float]]] = {}
        self._parts: dict[str, dict[str, float]] = {}

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, what: RenderableType) -> None:
        """Print something that stays, above the lines that change; text on one line, as it is."""
        if isinstance(what, str):
            print_line(self._console, what)
        else:
            self._console.print(what, soft_wrap=isinstance(what, Text))

    def begin(self, *, total_steps: int, done: int = 0) -> None:
        """The first step starts now; `done` steps were made by the run that this one continues."""
        self._total_steps, self._step = total_steps, done
        self._step_start = self._clock()
        self._spent = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of a step. Its time is added to `time/<name>_s`, without that of the phases inside it."""
        phase = _Phase(name, self._clock())
        self._phases.append(phase)
        try:
            yield
        finally:
            self._phases.pop()
            whole = self._clock() - phase.start
            self._spent[name] = self._spent.get(name, 0.0) + whole - phase.inner_s
            if self._phases:
                self._phases[-1].inner_s += whole

    def advance(self, done: int, total: int) -> None:
        """How far the current phase is."""
        if self._phases:
            self._phases[-1].done, self._phases[-1].total = done, total

    def take_times(self) -> Metrics:
        """`time/<phase>_s` of all phases since the last call, and `time/step_s`, the time since then."""
        now = self._clock()
        times = {f"time/{name}_s": spent for name, spent in self._spent.items()} | {
            "time/step_s": now - self._step_start
        }
        self._spent, self._step_start = {}, now
        return times

    def step(self, step: int, metrics: Metrics) -> None:
        """A step is done; `metrics` holds its times, from `take_times`."""
        self._step, self._metrics = step, metrics
        if "time/step_s" in metrics:
            self._recent.append(metrics["time/step_s"])
        self._remember(step, metrics)
        if self._live is None:
            parts = [f"step {step}/{self._total_steps}", *self._numbers()]
            print_line(self._console, "  ".join(parts + self._left()))
        self._print_evaluations(metrics)

    def evaluation(self, step: int, metrics: Metrics) -> None:
        """An evaluation outside of the steps: before or after them."""
        self._remember(step, metrics)
        self._print_evaluations(metrics)

    def _remember(self, step: int, metrics: Metrics) -> None:
        for name, parts in evaluated_sets(metrics).items():
            self._evaluations.setdefault(name, []).append((step, metrics[f"eval/{name}/pass@1"]))
            self._parts[name] = {part: metrics[f"eval/{name}/{part}/pass@1"] for part in parts}

    def _print_evaluations(self, metrics: Metrics) -> None:
        if self._live is None:
            for name in evaluated_sets(metrics):
                print_line(self._console, self._history(name))

    def _history(self, name: str) -> str:
        """`eval visual_math: pass@1 42.0% at step 0 -> 71.5% at step 50`: the first and the newest, and its parts."""
        seen = self._evaluations[name]
        shown = [f"{value:.1%} at step {step}" for step, value in ([seen[0], seen[-1]] if len(seen) > 1 else seen)]
        parts = ", ".join(f"{part} {value:.1%}" for part, value in self._parts[name].items())
        return f"eval {name}: pass@1 {' -> '.join(shown)}{f' ({parts})' if parts else ''}"

    def _numbers(self) -> list[str]:
        return [f"{label} {show(self._metrics[name])}" for name, label, show in _SHOWN if name in self._metrics]

    def _left(self) -> list[str]:
        steps = self._total_steps - self._step
        if not self._recent or steps <= 0:
            return []
        return [f"left {_duration(steps * sum(self._recent) / len(self._recent))}"]

    def _render(self) -> RenderableType:
        """The lines that change, as they are now; called by the thread that redraws."""
        head = Table.grid(padding=(0, 2))
        cells: list[RenderableType] = [Text(self._title, style="bold")] if self._title else []
        if self._total_steps:
            cells.append(Text(f"step {self._step}/{self._total_steps}"))
            cells.append(ProgressBar(total=self._total_steps, completed=self._step, width=30))
        cells += [Text(left, style="cyan") for left in self._left()]
        cells.append(Text(self._current(), style="yellow"))
        head.add_row(*cells)
        lines: list[RenderableType] = [head]
        if numbers := self._numbers():
            lines.append(Text("  ".join(numbers)))
        lines += [Text(self._history(name), style="green") for name in list(self._evaluations)]
        return Group(*lines)

    def _current(self) -> str:
        """`rollout 97/128, 5 s`"""
        phase = next(iter(self._phases[-1:]), None)  # the other thread may end it at any moment
        if phase is None:
            return ""
        share = f" {phase.done}/{phase.total}" if phase.total else ""
        return f"{phase.name}{share}, {_duration(self._clock() - phase.start)}"


def _duration(seconds: float) -> str:
    """`42 s`, `3 min 20 s`, `2 h 5 min`"""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
