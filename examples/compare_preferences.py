"""Compare the losses of `vlmrl dpo` from the same warm start on the same preferences, as a plot and a table.

    .venv/bin/python examples/compare_preferences.py
    .venv/bin/python examples/compare_preferences.py --only dpo kto --steps 40

A tiny Qwen2.5-VL learns to count circles in images, first from right counts, as in `make quickstart`, then from right
and wrong ones alike, so that its responses are well-formed, and right in about half of the cases. It responds eight
times to each of 2,000 questions, and each loss trains it to prefer its own right responses to its wrong ones, without a
likelihood term (but MPO, which has one). During training the model responds to held-out images at temperature 1. The
last line is one JSON object, and the exit code is 1 unless every loss raises the share of right responses by more than
twice the standard error of the difference. Each run has its own folder under `--out`; a run that is finished there is
not repeated, and one that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

from compare_algorithms import CONSOLE, HERE, python, read_curve, vlmrl, warm_start
from rich.table import Table

LOSSES = {"dpo": "DPO", "ipo": "IPO", "cdpo": "cDPO", "kto": "KTO", "mpo": "MPO"}
"""Name of the recipe, `dpo_counting_tiny/<name>.yaml`, or for DPO `dpo_counting_tiny.yaml` -> label of its curve."""
COLOURS = {"dpo": "#2f6fde", "ipo": "#d1495b", "cdpo": "#6fb7d9", "kto": "#e8833a", "mpo": "#2a9d6f"}
BETAS = {"ipo": 0.5}
"""1 for the others: responses of two tokens need a reference that is stronger than the default of 0.1."""
QUESTIONS = "families=count&difficulty=1&pixels=112"
HELD_OUT = 512
HELD_OUT_OF_KTO = 502
"""Of twice as many single responses these are right, and only their questions are asked."""
METRIC = "eval/visual_preferences/pass@1"

Curve = dict[str, list[float]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/compare_preferences"), help="folder for all output")
    parser.add_argument("--steps", type=int, default=60, help="steps of each run")
    parser.add_argument("--only", nargs="+", choices=LOSSES, default=list(LOSSES), help="losses to run")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    start = begin(out)
    for number, name in enumerate(arguments.only, start=1):
        CONSOLE.print(f"{number}/{len(arguments.only)}  {LOSSES[name]}", highlight=False)
        train(name, out / name, start, arguments.steps)
    curves = {name: read_curve(out / name / "metrics.jsonl", METRIC) for name in arguments.only}
    draw(curves, out / "curves.png")
    CONSOLE.print(f"plot: {out / 'curves.png'}", highlight=False)
    summary = summarise(curves)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    show(summary)
    sys.stdout.write(json.dumps(summary) + "\n")
    return int(not all(result["rises"] for result in summary.values()))


def begin(out: Path) -> Path:
    """Return the model that all losses start from, and write its responses, as pairs and with labels."""
    model = out / "both" / "model"
    if not model.is_dir():
        right = warm_start(out)
        CONSOLE.print("supervised training on right and wrong counts")
        vlmrl(
            *("sft", "--config", str(HERE / "quickstart_sft.yaml"), "--actor.model_name_or_path", str(right)),
            *("--data.prompt_dataset", f"visual_preferences?{QUESTIONS}&size=8000&kind=unpaired"),
            *("--data.output_key", "response", "--train.max_steps", "60"),
            folder=model.parent,
        )
    for keep in ("pairs", "labels"):
        if rows_of(out, keep).is_file():
            continue
        CONSOLE.print(f"responses of this model, as {keep}")
        python(
            *("-m", "vlmrl", "generate", "--actor.model_name_or_path", str(model), "--reward.functions", "exact"),
            *("--data.prompt_dataset", f"visual_math?{QUESTIONS}&size=2000&seed=1", "--data.max_len", "256"),
            *("--rollout.n_samples_per_prompt", "8", "--rollout.max_new_tokens", "8", "--rollout.batch_size", "256"),
            *("--generate.keep", keep, "--generate.output", str(rows_of(out, keep))),
            *("--ds.param_dtype", "fp32", "--vllm.cpu_kv_cache_gib", "0.5"),
            *("--ckpt.output_dir", str(out / "responses")),
            log=out / f"{keep}.log",
        )
    return model


def rows_of(out: Path, keep: str) -> Path:
    """Return the file of responses as `pairs` or with `labels`."""
    return out / f"{keep}.jsonl"


def train(name: str, folder: Path, start: Path, steps: int) -> None:
    """Train from `start` with a loss on the responses of `start`, unless that is done."""
    if (folder / "model").is_dir():
        return
    size, kind, keep = (2 * HELD_OUT, "&kind=unpaired", "labels") if name == "kto" else (HELD_OUT, "", "pairs")
    own: tuple[str, ...] = ("--dpo.nll_loss_coef", "1" if name == "mpo" else "0")
    rows = str(rows_of(folder.parent, keep))
    if name == "kto":  # the responses of held-out rows are in a column of another name
        own, rows = ("--dpo.kto_undesirable_weight", "1"), f"{rows}:output_key=answer"
    overlay = () if name == "dpo" else ("--config", str(HERE / "dpo_counting_tiny" / f"{name}.yaml"))
    vlmrl(
        *("dpo", "--config", str(HERE / "dpo_counting_tiny.yaml"), *overlay),
        *("--data.prompt_dataset", rows, "--dpo.beta", str(BETAS.get(name, 1.0)), *own),
        *("--actor.model_name_or_path", str(start), "--actor.adam.lr", "1e-4"),
        *("--train.max_steps", str(steps), "--ckpt.save_steps", "20"),
        *("--eval.dataset", f"visual_preferences?{QUESTIONS}&size={size}{kind}"),
        *("--eval.steps", str(max(1, steps // 4)), "--eval.generate_enable", "true", "--eval.temperature", "1.0"),
        *("--reward.functions", "exact", "--rollout.max_new_tokens", "8", "--vllm.cpu_kv_cache_gib", "0.5"),
        folder=folder,
    )


def num_asked(name: str) -> int:
    """Number of held-out questions that the run of a loss is asked."""
    return HELD_OUT_OF_KTO if name == "kto" else HELD_OUT


def standard_error(rate: float, num_responses: int) -> float:
    """Standard error of the share of right responses among so many, each to a question of its own."""
    return math.sqrt(rate * (1 - rate) / num_responses)


def rises(before: float, after: float, num_responses: int) -> bool:
    """Whether a share rises by more than twice the standard error of the difference, as if samples were separate."""
    error = math.hypot(standard_error(before, num_responses), standard_error(after, num_responses))
    return after - before > 2 * error


def summarise(curves: dict[str, Curve]) -> dict[str, dict[str, float | bool]]:
    """Return the accuracy of each loss before and after training, and whether it rises."""
    summary: dict[str, dict[str, float | bool]] = {}
    for name, curve in curves.items():
        before, after = curve["accuracy"][0], curve["accuracy"][-1]
        seconds = sorted(curve["seconds"])[len(curve["seconds"]) // 2]
        summary[name] = {
            "before": round(before, 4),
            "after": round(after, 4),
            "standard_error": round(standard_error(after, num_asked(name)), 4),
            "rises": rises(before, after, num_asked(name)),
            "seconds_per_step": round(seconds, 3),
        }
    return summary


def draw(curves: dict[str, Curve], out: Path) -> None:
    """Plot held-out accuracy over steps, one line per loss, with a band of one standard error."""
    # Figure without pyplot, which may need a display.
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(9, 5), dpi=110, layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        steps, rates, colour = curve["step"], curve["accuracy"], COLOURS[name]
        errors = [standard_error(rate, num_asked(name)) for rate in rates]
        axes.plot(steps, rates, marker="o", markersize=3.5, color=colour, label=LOSSES[name])
        low, high = ([rate + sign * error for rate, error in zip(rates, errors, strict=True)] for sign in (-1, 1))
        axes.fill_between(steps, low, high, color=colour, alpha=0.1, linewidth=0)
    axes.set_title("right counts on held-out images, from one model and its own responses", loc="left")
    axes.set_xlabel("step of 64 responses")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(out)


def show(summary: dict[str, dict[str, float | bool]]) -> None:
    """Print the table."""
    table = Table("loss", "before", "after", "standard error", "seconds per step")
    for name, result in summary.items():
        shares = (f"{result[key]:.1%}" for key in ("before", "after", "standard_error"))
        table.add_row(LOSSES[name], *shares, f"{result['seconds_per_step']:.2f}")
    CONSOLE.print(table)
    if flat := [LOSSES[name] for name, result in summary.items() if not result["rises"]]:
        CONSOLE.print(f"accuracy did not rise with: {', '.join(flat)}", style="red", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
