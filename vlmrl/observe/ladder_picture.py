"""One picture of the stages of `make ladder`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BLUE, _ORANGE, _GREY = "#2f6fde", "#e8833a", "#9aa3ad"

Curve = Sequence[tuple[int, float]]
"""Steps and values."""


@dataclass(frozen=True, slots=True)
class Rung:
    """A model of the ladder."""

    name: str
    accuracy: float
    """Fraction of held-out questions that it answers correctly."""


def draw_ladder(rungs: Sequence[Rung], *, reward_model: Curve, ppo: Curve, out: Path) -> None:
    """Write the picture `out` (PNG).

    Args:
        rungs: the models, in the order of training.
        reward_model: share of held-out pairs whose right response has the higher score.
        ppo: mean score of the reward model in each step.
    """
    # Figure without pyplot: no window system, no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), dpi=110, layout="constrained")
    pairs, reward, models = figure.subplots(1, 3)
    _draw_curve(pairs, reward_model, title="reward model: held-out pairs, accuracy")
    pairs.axhline(0.5, color=_GREY, linestyle="--", linewidth=1)
    _draw_curve(reward, ppo, title="PPO: mean score of the reward model")
    bars = models.bar([rung.name for rung in rungs], [rung.accuracy for rung in rungs], color=_BLUE, width=0.6)
    models.bar_label(bars, [f"{rung.accuracy:.0%}" for rung in rungs])
    models.set_ylim(0, 1.08)
    models.set_title("held-out questions, accuracy", loc="left", fontsize=10)
    models.spines[["top", "right"]].set_visible(False)
    partial = out.with_suffix(".tmp.png")
    figure.savefig(partial)
    partial.replace(out)


def _draw_curve(axes: Axes, curve: Curve, *, title: str) -> None:
    axes.plot([step for step, _ in curve], [value for _, value in curve], color=_ORANGE, marker=".")
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel("step")
    axes.spines[["top", "right"]].set_visible(False)
