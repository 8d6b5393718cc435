"""Draw assets/architecture.svg, the figure in the README: `.venv/bin/python assets/architecture.py [OUT]`."""

import sys
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

INK, SOFT, LINE = "#1f2933", "#5b6875", "#8894a0"
BLUE, GREEN, AMBER, PURPLE, GREY = "#2f6fb7", "#2f8f6b", "#c07a1c", "#7a55b5", "#64727f"
TINT = {BLUE: "#eaf2fb", GREEN: "#e8f6f0", AMBER: "#fdf3e3", PURPLE: "#f2edfa", GREY: "#f1f4f6"}


def box(axes: Axes, x: float, y: float, w: float, h: float, colour: str, title: str, lines: list[str]) -> None:
    """Draw the box of a role: a coloured title and lines of text."""
    style = "round,pad=0,rounding_size=1.1"
    axes.add_patch(FancyBboxPatch((x, y), w, h, boxstyle=style, fc=TINT[colour], ec=colour, lw=1.6, zorder=3))
    axes.text(x + 1.5, y + h - 3.1, title, color=colour, size=13.5, weight="bold", va="center", zorder=4)
    for row, line in enumerate(lines):
        axes.text(x + 1.5, y + h - 6.7 - 2.9 * row, line, color=INK, size=10.3, va="center", zorder=4)


def arrow(axes: Axes, points: list[tuple[float, float]], colour: str, *, both: bool = False) -> None:
    """Draw a path through `points` with an arrowhead at its end."""
    for start, end in pairwise(points[:-1]):
        axes.plot(*zip(start, end, strict=True), color=colour, lw=2.0, solid_capstyle="round", zorder=2)
    axes.add_patch(
        FancyArrowPatch(
            points[-2],
            points[-1],
            arrowstyle="<|-|>" if both else "-|>",
            mutation_scale=15,
            color=colour,
            lw=2.0,
            shrinkA=0,
            shrinkB=0,
            zorder=2,
        )
    )


def label(axes: Axes, x: float, y: float, text: str, colour: str, *, size: float = 9.6, ha: str = "center") -> None:
    axes.text(x, y, text, color=colour, size=size, ha=ha, va="center", linespacing=1.35, zorder=5)


def draw(out: Path) -> None:
    """Draw the loop of one step of reinforcement learning and the data between its parts."""
    mpl.rcParams |= {"font.family": "DejaVu Sans", "svg.hashsalt": "vlmrl"}
    figure, axes = plt.subplots(figsize=(15.2, 8.1))
    axes.set(xlim=(0, 152), ylim=(0, 81))
    axes.axis("off")
    figure.subplots_adjust(0, 0, 1, 1)
    round_ = "round,pad=0,rounding_size=1.6"
    axes.add_patch(FancyBboxPatch((0.6, 0.6), 150.8, 79.8, boxstyle=round_, fc="white", ec="#d5dbe1", lw=1.2, zorder=0))

    # the driver
    axes.add_patch(FancyBboxPatch((4, 65.5), 144, 11.5, boxstyle=round_, fc=INK, ec=INK, zorder=3))
    axes.text(6.5, 73.2, "Driver", color="white", size=15, weight="bold", va="center", zorder=4)
    axes.text(6.5, 69.0, "vlmrl rl · one loop, on a CPU, no pixels", color="#c3ccd5", size=10, va="center", zorder=4)
    stages = ["draw prompts", "generate groups", "score", "old log-probs", "advantages", "update", "weight sync"]
    x = 56.0
    for number, stage in enumerate(stages, start=1):
        width = 4.6 + 0.72 * len(stage)
        axes.add_patch(
            FancyBboxPatch(
                (x, 69.1), width, 4.6, boxstyle="round,pad=0,rounding_size=2.2", fc="#33404c", ec="none", zorder=4
            )
        )
        axes.text(
            x + width / 2, 71.4, f"{number}  {stage}", color="white", size=9.4, ha="center", va="center", zorder=5
        )
        x += width + 0.9

    # the cluster
    axes.add_patch(
        FancyBboxPatch((4, 14.5), 144, 46, boxstyle=round_, fc="#fafbfc", ec=LINE, lw=1.2, ls="--", zorder=1)
    )
    label(axes, 39.5, 57.6, "Ray: plain classes, turned into actors in one place", SOFT, size=10)

    top, height = 36.0, 18.5
    box(axes, 7, top, 27, height, AMBER, "Prompts", [
        "datasets/: a file per dataset",
        "processors/: one per family",
        "seeded, endless, resumable",
        "text, images, both, mixed",
    ])  # fmt: skip
    box(axes, 44, top, 29, height, BLUE, "Rollout engines", [
        "vLLM, token ids in and out",
        "one request, G responses: the",
        "image is prefilled once",
        "vision tokens never sampled",
    ])  # fmt: skip
    box(axes, 83, top, 24, height, GREEN, "Rewards", [
        "built-in, your own file,",
        "servers, reward models,",
        "of responses or of steps:",
        "overlaps with generation",
    ])  # fmt: skip
    box(axes, 117, top, 28, height, PURPLE, "Policy, critic", [
        "DeepSpeed ZeRO 0-3 ranks",
        "prompt and image once per G",
        "chunked log-probs, no [T, V]",
        "full, LoRA, or QLoRA",
    ])  # fmt: skip
    middle = top + height / 2
    for start, end, text in ((34, 44, "Prompt"), (73, 83, "Group"), (107, 117, "Experi-\nence")):
        arrow(axes, [(start, middle), (end, middle)], INK)
        label(axes, (start + end) / 2, middle + (2.0 if "\n" not in text else 3.0), text, INK)

    # pixels
    box(axes, 7, 16.8, 27, 12.2, GREY, "Media store", ["pixels once per node,", "by content hash"])
    arrow(axes, [(20.5, 36), (20.5, 29)], GREY)
    label(axes, 21.8, 32.6, "pixels, once", GREY, ha="left")
    arrow(axes, [(34, 20.5), (138, 20.5), (138, 36)], GREY)
    arrow(axes, [(50, 20.5), (50, 36)], GREY)
    label(axes, 94, 18.3, "fetched where they are needed; traffic between processes does not grow with G", GREY)

    # weights
    arrow(axes, [(124, 36), (124, 27.5), (61, 27.5), (61, 36)], PURPLE)
    label(
        axes,
        92.5,
        31.4,
        "weights or adapter after every update: version and fingerprint are verified,",
        PURPLE,
        size=10,
    )
    label(axes, 92.5, 25.2, "and engine and trainer log-probs are compared on every step", PURPLE, size=10)

    # driver <-> cluster
    for x in (20.5, 58.5, 95, 131):
        arrow(axes, [(x, 65.5), (x, 54.5)], LINE, both=True)

    # output of a run
    axes.text(6.5, 9.6, "Output of a run", color=INK, size=11.5, weight="bold", va="center")
    files = [
        "config.yaml",
        "metrics.jsonl",
        "tensorboard/",
        "curves.png",
        "rollouts/ with images",
        "checkpoints/",
        "model/",
    ]
    x = 31.0
    for name in files:
        width = 3.4 + 0.86 * len(name)
        axes.add_patch(
            FancyBboxPatch((x, 7.2), width, 4.8, boxstyle="round,pad=0,rounding_size=0.9", fc=TINT[GREY], ec="#cfd6dc")
        )
        axes.text(x + width / 2, 9.6, name, color=INK, size=9.6, ha="center", va="center", family="DejaVu Sans Mono")
        x += width + 1.5
    arrow(axes, [(76, 14.5), (76, 12.4)], LINE)
    label(axes, 76, 4.0, "a killed run resumes from its last checkpoint with the same numbers", SOFT)

    figure.savefig(out, dpi=110, metadata={"Date": None} if out.suffix == ".svg" else None)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("architecture.svg"))
