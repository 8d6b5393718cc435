"""The live panel of a run on a terminal: phase, learning curves, checks, time left."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from rich.console import RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vlmrl.observe.registry import describe
from vlmrl.types import Metrics

_MAX_WIDTH = 110
_BAR_WIDTH = 36
_MAX_LABEL = 24
_FRAME = 6
"""Columns of the frame, and between the columns of labels and contents."""
_LEVELS = "▁▂▃▄▅▆▇█"
_ASCII_LEVELS = "_.-=+*#"
_CURVES = {
    "reward/mean": "reward",
    "rm/accuracy": "accuracy",
    "dpo/accuracy": "accuracy",
    "distill/kl": "kl to teacher",
    "policy/loss": "loss",
    "rm/loss": "loss",
}
"""The curve of a run is the first of these metrics that it has."""
_MAX_WARNINGS = 3


class Phase(NamedTuple):
    """The part of a step that runs now."""

    name: str
    done: int
    total: int
    """0 where nothing is counted."""
    seconds: str


@dataclass(slots=True)
class Curve:
    """A metric of all steps so far."""

    name: str
    label: str
    values: list[float] = field(default_factory=list)


class View(NamedTuple):
    """What the panel shows. Strings are formatted; those of users are plain text."""

    title: str
    place: str
    """The run's folder."""
    elapsed: str
    step: int
    total_steps: int
    """0 where there are no steps."""
    left: str
    phase: Phase | None
    curve: Curve | None
    evaluations: Mapping[str, tuple[Sequence[float], str]]
    """Name -> results so far, and the first and the last of them in words."""
    checks: Sequence[str]
    numbers: Sequence[str]
    warnings: Sequence[str]


def draw(view: View, *, width: int, is_unicode: bool) -> RenderableType:
    """Return the panel for a terminal of this width in columns."""
    width = min(width, _MAX_WIDTH)
    levels = _LEVELS if is_unicode else _ASCII_LEVELS
    lines = list(_rows(view, levels, bar_width=min(_BAR_WIDTH, width // 3)))
    label_width = min(max((len(label) for label, _ in lines), default=0), _MAX_LABEL, width // 3)
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True, overflow="ellipsis", width=label_width)
    rows.add_column(overflow="fold", width=max(width - label_width - _FRAME, 1))
    for label, content in lines:
        rows.add_row(Text(label), content)
    title = Text.assemble((view.title, "bold"), "  ", (view.place, "dim"), overflow="ellipsis", no_wrap=True)
    return Panel(rows, title=title, title_align="left", subtitle=view.elapsed, subtitle_align="right", width=width)


def sparkline(values: Sequence[float], *, width: int, levels: str = _LEVELS) -> str:
    """Return the curve as one line of at most `width` characters, from the smallest to the largest value.

    More values than characters are averaged. Example: 0, 1, 0.5 is `▁█▅`. NaN and infinity are left out.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    columns = min(width, len(finite))
    edges = [len(finite) * column // columns for column in range(columns + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    top = len(levels) - 1
    if high == low:
        return levels[top // 2] * columns
    return "".join(levels[round((mean - low) / (high - low) * top)] for mean in means)


def curve_of(metrics: Metrics) -> Curve | None:
    """Return the empty curve of a run with these metrics; None if it has none to show."""
    return next((Curve(name, label) for name, label in _CURVES.items() if name in metrics), None)


def warnings_of(metrics: Metrics) -> list[str]:
    """Return the metrics whose values deserve attention, with the reason."""
    lines = []
    for name in sorted(metrics):
        info = describe(name)
        if info is not None and info.is_suspicious(metrics[name]):
            lines.append(f"{name} {metrics[name]:.3g}: {info.warning.replace('`', '')}")
    hidden = len(lines) - _MAX_WARNINGS
    return lines if hidden <= 0 else [*lines[:_MAX_WARNINGS], f"and {hidden} more in metrics.jsonl"]


class Checks:
    """The checks of a run that have passed, with their worst figure. A check that fails ends the run."""

    def __init__(self) -> None:
        self._worst: dict[str, float] = {}

    def add(self, metrics: Metrics) -> None:
        """Take the checks among the metrics of a step."""
        worst = dict(self._worst)  # another thread may be drawing the old one
        for name, value in metrics.items():
            for check in _checks_of(name):
                worst[check] = max(worst.get(check, value), value)
        self._worst = worst

    def lines(self) -> list[str]:
        """Return the checks in words."""
        worst = self._worst
        return [
            text.format(worst[check])
            for check, (text, limit) in _CHECKS.items()
            if check in worst and worst[check] <= limit
        ]


_CHECKS = {
    "sync/logprob_diff_mean": ("engine = trainer (mean gap {:.1e})", 0.1),
    "images": ("images are seen", math.inf),
    "adapters": ("adapters arrived (gap {:.1e})", math.inf),
    "layouts": ("layouts agree", math.inf),
    "sync/readback_layers": ("weights read back", math.inf),
}
"""Check -> its words, and the figure above which nothing is said: where the base weights of engine and trainer differ
(`vllm.qlora_base original`), or the user allows more, the run goes on and they are not equal."""


def _checks_of(name: str) -> Iterator[str]:
    if name in _CHECKS:
        yield name
    elif name.startswith("verify/images/"):
        yield "images"
    elif name == "verify/adapters/gap":
        yield "adapters"
    elif name.startswith("verify/layouts/"):
        yield "layouts"


def _rows(view: View, levels: str, *, bar_width: int) -> Iterator[tuple[str, RenderableType]]:
    if view.total_steps:
        bar = ProgressBar(total=view.total_steps, completed=view.step, width=bar_width)
        yield "step", _beside(bar, f"{view.step}/{view.total_steps}", view.left)
    if (phase := view.phase) is not None:
        if phase.total:
            bar = ProgressBar(total=phase.total, completed=phase.done, width=bar_width)
            yield phase.name, _beside(bar, f"{phase.done}/{phase.total}", phase.seconds)
        else:
            yield phase.name, Text(phase.seconds, style="yellow")
    if view.curve is not None and (values := list(view.curve.values)):
        ends = f"{values[0]:.3f} -> {values[-1]:.3f}" if len(values) > 1 else f"{values[0]:.3f}"
        yield view.curve.label, _line(sparkline(values, width=bar_width, levels=levels), ends, "cyan", bar_width)
    for name, (results, words) in view.evaluations.items():
        yield name, _line(sparkline(results, width=bar_width, levels=levels), words, "green", bar_width)
    if view.checks:
        sign = "✓" if levels is _LEVELS else "ok:"
        yield "checks", Text("   ".join(f"{sign} {check}" for check in view.checks), style="green")
    if view.numbers:
        yield "now", Text("   ".join(view.numbers))
    if view.warnings:
        yield "look at", Text("\n".join(view.warnings), style="yellow")


def _beside(bar: ProgressBar, *words: str) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_row(bar, *(Text(word) for word in words if word))
    return grid


def _line(curve: str, words: str, style: str, width: int) -> Text:
    # Padded, so that the words of all curves stand below each other.
    return Text.assemble((curve.ljust(width), style), "  ", words, no_wrap=True, overflow="ellipsis")
