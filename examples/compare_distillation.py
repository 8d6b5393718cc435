"""Compare on-policy distillation with GRPO from the same warm start, as a plot and a table.

    .venv/bin/python examples/compare_distillation.py

A tiny Qwen2.5-VL counts circles in images, correctly in about four of ten, as at the start of `make quickstart`. GRPO
trains it by reward, as in `make quickstart`; its result is the teacher. Then distillation starts where GRPO did, and
the teacher grades each token that it samples. Both learn from 256 responses per step. The last line is one JSON object:
the first evaluated step at which each is within five points of the teacher. Each run has its own folder under `--out`;
a run that is finished there is not repeated, and one that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from compare_algorithms import CONSOLE, HERE, read_curve, vlmrl, warm_start

NEAR = 0.05
"""Distance from the teacher's accuracy at which it counts as reached."""
HELD_OUT = "visual_math?families=count&difficulty=1&pixels=112&size=512"
LABELS = {"grpo": "GRPO, by reward", "distillation": "on-policy distillation, no reward"}
COLOURS = {"grpo": "#2f6fde", "distillation": "#d1495b"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/compare_distillation"), help="folder for all output")
    parser.add_argument("--steps", type=int, default=115, help="steps of GRPO")
    parser.add_argument("--distill-steps", type=int, default=70, help="steps of distillation")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    start = warm_start(out)
    train("quickstart", out / "grpo", start, arguments.steps)
    teacher = ("--algo.distill.teacher_model_name_or_path", str(out / "grpo" / "model"))
    train("distill", out / "distillation", start, arguments.distill_steps, *teacher)
    curves = {name: read_curve(out / name / "metrics.jsonl") for name in LABELS}
    target = curves["grpo"]["accuracy"][-1]
    reached = {name: first_step(curve, target - NEAR) for name, curve in curves.items()}
    draw(curves, target, out / "curves.png")
    CONSOLE.print(f"plot: {out / 'curves.png'}", highlight=False)
    before, after = curves["distillation"]["accuracy"][0], curves["distillation"]["accuracy"][-1]
    summary = {"before": before, "teacher": target, "distilled": after, "steps_to_the_teacher": reached}
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    sys.stdout.write(json.dumps(summary) + "\n")
    steps = reached["distillation"], reached["grpo"]
    return int(steps[0] is None or steps[1] is None or steps[0] >= steps[1])


def train(recipe: str, folder: Path, start: Path, steps: int, *more: str) -> None:
    """Train from `start` with a recipe of `counting_tiny/`, unless that is done."""
    if (folder / "model").is_dir():
        return
    CONSOLE.print(f"{LABELS[folder.name]}: {steps} steps", highlight=False)
    vlmrl(
        *(
            "rl",
            "--config",
            str(HERE / "counting_tiny.yaml"),
            "--config",
            str(HERE / "counting_tiny" / f"{recipe}.yaml"),
        ),
        *("--actor.model_name_or_path", str(start), "--train.max_steps", str(steps), "--ckpt.save_steps", "20"),
        *("--eval.dataset", HELD_OUT, "--eval.steps", "5", *more),
        folder=folder,
    )


def first_step(curve: dict[str, list[float]], accuracy: float) -> float | None:
    """Return the first evaluated step with at least this accuracy; None if there is none."""
    reached = (step for step, rate in zip(curve["step"], curve["accuracy"], strict=True) if rate >= accuracy)
    return next(reached, None)


def draw(curves: dict[str, dict[str, list[float]]], teacher: float, out: Path) -> None:
    """Plot held-out accuracy over steps, with the teacher's."""
    # Figure without pyplot, which may need a display.
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(9, 5), dpi=110, layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        axes.plot(curve["step"], curve["accuracy"], marker="o", markersize=3.5, color=COLOURS[name], label=LABELS[name])
    axes.axhline(teacher, color="#2a9d6f", linestyle="--", label="the teacher: GRPO's last model")
    axes.axhspan(teacher - NEAR, teacher, color="#2a9d6f", alpha=0.12)
    axes.set_title("held-out accuracy from the same warm start", loc="left")
    axes.set_xlabel("step of 256 responses")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(out)


if __name__ == "__main__":
    sys.exit(main())
