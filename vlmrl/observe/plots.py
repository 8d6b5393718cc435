"""Plot a run's metrics file as one picture of four panels."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vlmrl.observe.metrics import accuracies, evaluated_sets
from vlmrl.observe.sinks import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curve = NDArray[np.float64]
Records = Sequence[dict[str, Any]]

_BLUE, _ORANGE, _GREEN, _RED, _PURPLE = "#2f6fde", "#e8833a", "#2a9d6f", "#d1495b", "#7b5ea7"
_PHASES = {
    "rollout": _BLUE,
    "reward": "#f2b94b",
    "logprob": "#6fb7d9",
    "update": _ORANGE,
    "sync": _GREEN,
    "eval": _PURPLE,
    "save": "#9aa3ad",
    "data": "#c9ced6",
}
_OTHERS = ("#b5838d", "#83b59a", "#8389b5", "#b5ae83")
_LOSSES = ("policy/loss", "rm/loss")
"""The loss of a trained policy, or of a trained reward model."""
_PREFERENCES = ("dpo/accuracy", "rm/accuracy")
"""The share of the step's preferences that a policy, or a reward model, has right."""
_WIDE_LEGEND = 75
"""Letters of a legend that do not fit above its panel."""
_MANY_STEPS = 60
"""Above this number of steps a moving mean is drawn over the values, and bars become areas."""


def draw_curves(metrics_file: Path, out: Path) -> None:
    """Write the picture `out` (PNG): reward and evaluation, response length, log-prob gap and KL, seconds per phase.

    A run that lacks some of these (supervised training, one step, no evaluation) has other or empty panels. The file is
    replaced atomically, so that it can be viewed during the run.
    """
    # Figure without pyplot: no window system, no global state, thread-safe.
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    records = read_metrics(metrics_file) if metrics_file.exists() else []
    figure = Figure(figsize=(12, 7.2), dpi=110, layout=ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.1))
    panels: list[tuple[str, Callable[[Axes, Records], bool]]] = [
        ("reward", _draw_reward),
        ("responses", _draw_responses),
        ("log-prob gap and KL", _draw_gaps),
        ("seconds", _draw_times),
    ]
    for axes, (title, draw) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        _prepare(axes, title, [record["step"] for record in records])
        if not draw(axes, records):
            axes.text(0.5, 0.5, "no data yet", ha="center", va="center", color="#9aa3ad", transform=axes.transAxes)
            axes.set_xticks([])
            axes.set_yticks([])
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(".tmp")
    figure.savefig(partial, format="png")
    partial.replace(out)


def _draw_reward(axes: Axes, records: Records) -> bool:
    """Draw the reward with its standard deviation; without a reward, the KL to the teacher, or the loss. With it the
    accuracy of each evaluation set: pass@1 of responses, or the share of preferences that are right, also of those
    that are trained on."""
    steps, mean = _curve(records, "reward/mean")
    if len(steps):
        spread = _lookup(records, "reward/std", steps)
        if len(steps) <= _MANY_STEPS:
            axes.fill_between(steps, mean - spread, mean + spread, color=_BLUE, alpha=0.12, linewidth=0)
        _line(axes, steps, mean, _BLUE, "training reward")
    else:
        loss = max(("distill/kl", *_LOSSES), key=lambda name: len(_curve(records, name)[0]))
        steps, mean = _curve(records, loss)
        if len(steps):
            title = "KL to the teacher" if loss == "distill/kl" else "loss"
            axes.set_title(title, loc="left", fontweight="bold")
            _line(axes, steps, mean, _BLUE, f"training {title}")
    drawn = bool(len(steps))
    names = {name for record in records for name in record}
    curves = {f"{name[:30]} pass@1": f"eval/{name}/pass@1" for name in evaluated_sets(names)}
    curves |= {f"{name[:30]} accuracy": metric for name, metric in accuracies(names).items()}
    trained = next((name for name in _PREFERENCES if name in names), None)
    if not curves and trained is None:
        _legend(axes)
        return drawn
    # Rewards and losses between 0 and 1 share the axis; others need a second axis.
    right = axes.twinx() if drawn and not _is_fraction(mean) else axes
    kinds = dict.fromkeys(label.rpartition(" ")[2] for label in (*curves, *([] if trained is None else ["accuracy"])))
    _percent(right, ", ".join(kinds) if right is not axes else "")
    if trained is not None:
        _line(right, *_curve(records, trained), _OTHERS[0], "training accuracy")
    for (label, curve), color in zip(curves.items(), _cycle(_RED, _GREEN, _PURPLE, _ORANGE), strict=False):
        _evaluations(right, *_curve(records, curve), color, label)
    _legend(axes, right)
    return True


def _evaluations(axes: Axes, steps: Curve, share: Curve, color: str, label: str) -> None:
    """Draw an evaluated share, with its first and its last value in numbers."""
    axes.plot(steps, share, "o--", color=color, markersize=5, linewidth=1, label=label)
    for at in {0, len(steps) - 1}:
        axes.annotate(
            f"{share[at]:.0%}",
            (steps[at], share[at]),
            xytext=(0, 7 if share[at] < 0.9 else -13),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=color,
        )


def _draw_responses(axes: Axes, records: Records) -> bool:
    """Draw tokens per response and the fractions of truncated responses and constant groups, or the gradient norm."""
    steps, tokens = _curve(records, "response/tokens_mean")
    if not len(steps):
        curves = (_curve(records, name.replace("/loss", "/grad_norm")) for name in _LOSSES)
        steps, norm = max(curves, key=lambda curve: len(curve[0]))
        axes.set_title("gradient norm", loc="left", fontweight="bold")
        _line(axes, steps, norm, _BLUE, "gradient norm")
        return bool(len(steps))
    _line(axes, steps, tokens, _BLUE, "tokens, mean")
    axes.set_ylim(bottom=0)
    right = axes.twinx()
    _percent(right, "")
    for name, color, label in (
        ("response/truncated_fraction", _RED, "truncated"),
        ("group/constant_fraction", "#9aa3ad", "constant groups"),
    ):
        steps, fraction = _curve(records, name)
        if len(steps):
            _line(right, steps, fraction, color, label)
    _legend(axes, right)
    return True


def _draw_gaps(axes: Axes, records: Records) -> bool:
    """Draw engine-trainer differences and the KL to the reference on a logarithmic scale; without them the rewards of
    preferred and other responses, or the learning rate."""
    drawn = False
    for name, color, label in (
        ("sync/logprob_diff_max", _RED, "largest log-prob difference"),
        ("sync/kl_rollout_train", _ORANGE, "KL(engine, trainer)"),
        ("kl/reference", _BLUE, "KL(policy, ref)"),
    ):
        steps, value = _curve(records, name)
        value = np.abs(value)
        positive = value > 0  # zero cannot be drawn on a logarithmic scale
        if positive.any():
            _line(axes, steps[positive], value[positive], color, label)
            drawn = True
    if drawn:
        axes.set_yscale("log")
        _legend(axes)
        return True
    for name, color, label in (("dpo/reward_chosen", _GREEN, "chosen"), ("dpo/reward_rejected", _RED, "rejected")):
        steps, reward = _curve(records, name)
        if len(steps):
            axes.set_title("rewards of responses", loc="left", fontweight="bold")
            _line(axes, steps, reward, color, label)
            drawn = True
    if drawn:
        _legend(axes)
        return True
    rates = (_curve(records, name.replace("/loss", "/lr")) for name in _LOSSES)
    steps, rate = max(rates, key=lambda curve: len(curve[0]))
    if len(steps):
        axes.set_title("learning rate", loc="left", fontweight="bold")
        _line(axes, steps, rate, _BLUE, "learning rate")
    return bool(len(steps))


def _draw_times(axes: Axes, records: Records) -> bool:
    """Draw the seconds of each phase, stacked; `other` is the rest of the step."""
    # Step 0 (an evaluation, warming up) would dwarf all that follow.
    records = [record for record in records if record["step"] > 0] or records
    timed_steps, total = _curve(records, "time/step_s")
    names = {name for record in records for name in record if re.fullmatch(r"time/[^/]+_s", name)}
    names -= {"time/step_s", "time/env_s"}  # the step itself, and a part of the rollout that is no share of it
    phases = [phase for phase in _PHASES if f"time/{phase}_s" in names]
    phases += sorted(name.removeprefix("time/").removesuffix("_s") for name in names if _phase(name) not in _PHASES)
    steps = timed_steps if len(timed_steps) else np.array([float(r["step"]) for r in records if names & set(r)])
    if not len(steps):
        return False
    heights = [_lookup(records, f"time/{phase}_s", steps) for phase in phases]
    colors = [_PHASES.get(phase, color) for phase, color in zip(phases, _cycle(*_OTHERS), strict=False)]
    if len(timed_steps):
        rest = total - np.sum(heights, axis=0) if heights else total
        if (rest > 0.02 * total).any():
            heights, phases, colors = [*heights, rest.clip(0)], [*phases, "other"], [*colors, "#e6e9ee"]
    if len(steps) > _MANY_STEPS:
        axes.stackplot(steps, *heights, colors=colors, labels=phases, linewidth=0)
    else:
        bottom = np.zeros(len(steps))
        for phase, height, color in zip(phases, heights, colors, strict=True):
            axes.bar(steps, height, bottom=bottom, color=color, label=phase, width=0.85)
            bottom += height
    axes.margins(x=0.02)
    _legend(axes)
    return True


def _curve(records: Records, name: str) -> tuple[Curve, Curve]:
    """Return (steps, values) of the records in which the metric is a finite number."""
    points = [(r["step"], r[name]) for r in records if isinstance(r.get(name), int | float) and math.isfinite(r[name])]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return np.array(steps, float), np.array(values, float)


def _lookup(records: Records, name: str, steps: Curve) -> Curve:
    """Return the metric's values at these steps, 0 where it is missing."""
    value_by_step = dict(zip(*_curve(records, name), strict=True))
    return np.array([value_by_step.get(step, 0.0) for step in steps])


def _phase(name: str) -> str:
    return name.removeprefix("time/").removesuffix("_s")


def _line(axes: Axes, steps: Curve, values: Curve, color: str, label: str) -> None:
    if len(steps) <= _MANY_STEPS:
        marker = "o" if len(steps) == 1 else None
        axes.plot(steps, values, color=color, linewidth=1.6, marker=marker, label=label)
        return
    axes.plot(steps, values, color=color, linewidth=0.7, alpha=0.25)
    width = max(len(steps) // 25, 3)
    # The window is cut off at the ends, not padded with zeros.
    window_sizes = np.convolve(np.ones(len(values)), np.ones(width), mode="same")
    means = np.convolve(values, np.ones(width), mode="same") / window_sizes
    axes.plot(steps, means, color=color, linewidth=1.8, label=label)


def _is_fraction(values: Curve) -> bool:
    return bool(((values > -0.05) & (values < 1.05)).all())


def _percent(axes: Axes, label: str) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.set_ylim(-0.03, 1.05)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylabel(label)
    axes.spines["top"].set_visible(False)


def _prepare(axes: Axes, title: str, steps: Sequence[int]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if steps:
        margin = 0.5 + 0.025 * (max(steps) - min(steps))
        axes.set_xlim(min(steps) - margin, max(steps) + margin)
    axes.grid(axis="y", color="#e6e9ee", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(*overlaid: Axes) -> None:
    """Draw one legend for overlaid axes: next to the title, where it covers no curve, or, if it is too long for that,
    within."""
    handles, labels = [], []
    for axes in dict.fromkeys(overlaid):
        more_handles, more_labels = axes.get_legend_handles_labels()
        handles += more_handles
        labels += more_labels
    if len(labels) < 8 and sum(map(len, labels)) > _WIDE_LEGEND:
        overlaid[-1].legend(handles, labels, loc="best", fontsize=7, framealpha=0.7, edgecolor="none")
    elif handles:
        overlaid[-1].legend(
            handles,
            labels,
            loc="lower right",
            bbox_to_anchor=(1.01, 0.99),
            ncols=len(handles),
            frameon=False,
            fontsize=8 if len(handles) < 8 else 6.5,
            handlelength=1.2 if len(handles) < 5 else 0.7,
            handletextpad=0.4,
            columnspacing=1.0 if len(handles) < 5 else 0.6,
        )


def _cycle(*colors: str) -> Iterable[str]:
    while True:
        yield from colors
