"""Compare the learning curves of all algorithms from the same warm start on the same prompts, as a plot and a table.

    .venv/bin/python examples/compare_algorithms.py
    .venv/bin/python examples/compare_algorithms.py --only ppo group_norm --steps 40

Supervised training teaches a tiny Qwen2.5-VL to count circles in images, correctly in about four of ten. From there
each algorithm trains it with `vlmrl rl` and its recipe in `counting_tiny/`. Each run has its own folder under `--out`;
a run that is finished there is not repeated. On two CPU cores all eight take about a quarter of an hour.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
RECIPES = {
    "ppo": "PPO with a critic",
    "reinforce": "REINFORCE++",
    "reinforce_baseline": "REINFORCE++-baseline",
    "rloo": "RLOO",
    "group_norm": "GRPO",
    "dr_grpo": "Dr. GRPO",
    "gspo": "GSPO",
    "cispo": "CISPO",
}
"""Name of the recipe, `counting_tiny/<name>.yaml` in this folder -> label of its curve."""
COLOURS = ("#d1495b", "#e8833a", "#f2b94b", "#2a9d6f", "#2f6fde", "#6fb7d9", "#7b5ea7", "#8a5a44")
METRIC = "eval/visual_math/pass@1"
CONSOLE = Console()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/compare_algorithms"), help="folder for all output")
    parser.add_argument("--steps", type=int, default=60, help="steps of each run")
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES), help="algorithms to run")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    start = warm_start(arguments.out)
    for number, name in enumerate(arguments.only, start=1):
        folder = arguments.out / name
        CONSOLE.print(f"{number}/{len(arguments.only)}  {RECIPES[name]}", highlight=False)
        if not (folder / "model").is_dir():
            vlmrl(
                *("rl", "--config", str(HERE / "counting_tiny.yaml")),
                *("--config", str(HERE / "counting_tiny" / f"{name}.yaml"), "--actor.model_name_or_path", str(start)),
                *(
                    "--train.max_steps",
                    str(arguments.steps),
                    "--eval.steps",
                    str(max(1, arguments.steps // 6)),
                    "--eval.temperature",
                    "1.0",
                ),
                folder=folder,
            )
    curves = {name: read_curve(arguments.out / name / "metrics.jsonl") for name in arguments.only}
    draw(curves, arguments.out / "curves.png")
    unlearnt = show(curves, arguments.out)
    CONSOLE.print(f"plot: {arguments.out / 'curves.png'}", highlight=False)
    if unlearnt:
        CONSOLE.print(f"accuracy did not rise with: {', '.join(unlearnt)}", style="red", highlight=False)
    return bool(unlearnt)


def warm_start(out: Path) -> Path:
    """Return the warmed-up model of `make quickstart` if it exists, else train one."""
    quickstart = Path("runs/quickstart/sft/model")
    if quickstart.is_dir():
        return quickstart
    fresh, folder = out / "start", out / "sft"
    if not (folder / "model").is_dir():
        CONSOLE.print("supervised warm-up")
        python("-m", "vlmrl.models.tiny", "--family", "qwen2_5_vl", "--out", str(fresh), log=out / "start.log")
        vlmrl(
            *("sft", "--config", str(HERE / "quickstart_sft.yaml"), "--actor.model_name_or_path", str(fresh)),
            folder=folder,
        )
    return folder / "model"


def vlmrl(*words: str, folder: Path) -> None:
    """Run vlmrl with the output folder `folder`, resuming an interrupted run."""
    resume = ("--ckpt.load_enable", "true") if folder.exists() else ()
    log = folder.with_name(f"{folder.name}.log")
    python("-m", "vlmrl", *words, "--ckpt.output_dir", str(folder), *resume, log=log)


def python(*words: str, log: Path) -> None:
    """Run a Python command with its output in `log`; exit with the end of the log if it fails."""
    with log.open("w") as file:
        code = subprocess.run([sys.executable, *words], stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        tail = "".join(log.read_text().splitlines(keepends=True)[-20:])
        sys.exit(f"{tail}\n`{' '.join(words)}` ended with exit code {code}; full output: {log}")


def read_curve(metrics: Path, metric: str = METRIC) -> dict[str, list[float]]:
    """Read the steps and accuracies of a run's evaluations, and the seconds of its steps."""
    records: list[dict[str, Any]] = [json.loads(line) for line in metrics.read_text().splitlines()]
    evaluated = [record for record in records if metric in record]
    return {
        "step": [record["step"] for record in evaluated],
        "accuracy": [record[metric] for record in evaluated],
        "seconds": [record["time/step_s"] for record in records if "time/step_s" in record],
    }


def draw(curves: dict[str, dict[str, list[float]]], out: Path) -> None:
    """Plot held-out accuracy over steps, one line per algorithm."""
    # Figure without pyplot, which may need a display.
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(9, 5), dpi=110, layout="constrained")
    axes = figure.subplots()
    for (name, curve), colour in zip(curves.items(), COLOURS, strict=False):
        axes.plot(curve["step"], curve["accuracy"], marker="o", markersize=3.5, color=colour, label=RECIPES[name])
    axes.set_title("held-out accuracy from the same warm start", loc="left")
    axes.set_xlabel("step")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(out)


def show(curves: dict[str, dict[str, list[float]]], out: Path) -> list[str]:
    """Print the table, write `summary.json`, and return the algorithms without any gain."""
    table = Table("algorithm", "before", "after", "seconds per step")
    summary = {}
    for name, curve in curves.items():
        seconds = sorted(curve["seconds"])[len(curve["seconds"]) // 2]
        before, after = curve["accuracy"][0], curve["accuracy"][-1]
        table.add_row(RECIPES[name], f"{before:.1%}", f"{after:.1%}", f"{seconds:.2f}")
        summary[name] = {"before": before, "after": after, "seconds_per_step": round(seconds, 3)}
    CONSOLE.print(table)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return [RECIPES[name] for name, result in summary.items() if not result["after"] > result["before"]]


if __name__ == "__main__":
    sys.exit(main())
