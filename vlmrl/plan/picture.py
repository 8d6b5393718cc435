"""Picture of the estimated phases of several placements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

_COLOURS = {
    "rollout": "#2f6fde",
    "logprob": "#6fb7d9",
    "value": "#7b5ea7",
    "update": "#e8833a",
    "sync": "#2a9d6f",
    "other": "#c9ced6",
}


def draw(rows: Sequence[tuple[str, Mapping[str, float]]], out: Path, *, title: str) -> None:
    """Write the picture `out` (PNG): a bar for each placement, with its phases one after the other.

    Args:
        rows: name of a placement, and its seconds by phase.
    """
    # Figure without pyplot: no window system, no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.6 + 0.5 * len(rows)), dpi=110, layout="constrained")
    axes = figure.subplots()
    places = range(len(rows))
    left = [0.0] * len(rows)
    for phase, colour in _COLOURS.items():
        seconds = [by_phase.get(phase, 0.0) for _, by_phase in rows]
        if any(seconds):
            axes.barh(places, seconds, left=left, color=colour, label=phase)
            left = [start + width for start, width in zip(left, seconds, strict=True)]
    axes.set_yticks(places, [name for name, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel("estimated seconds of a step's work (an asynchronous run overlaps the rollout with the rest)")
    axes.set_title(title)
    axes.legend(loc="lower right")
    figure.savefig(out)
