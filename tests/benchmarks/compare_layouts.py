"""Compare time per pass and reward of the quickstart's GRPO in several layouts, step by step in turn.

    make quickstart
    .venv/bin/python tests/benchmarks/compare_layouts.py --steps 20
    .venv/bin/python tests/benchmarks/compare_layouts.py --layouts shared padded --steps 92

Each layout has its own policy, engine and learner, which start from the same model and see the same prompts in the same
order; the layouts take turns, step by step. The comparison is of `logprob_s + update_s`, the training pass; the first
step of each layout is a warm-up and does not count. Responses are sampled with the same seeds, so the rewards of the
first step are equal; later ones differ by rounding and should agree within noise. Each step is one JSON line on stdout,
the last line has the medians, and a table goes to stderr. More settings may follow after `--`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from contextlib import ExitStack
from typing import Any

from run_by_steps import Measurements, medians, rounded, run_by_steps, table

from vlmrl import startup
from vlmrl.config.load import load
from vlmrl.config.verbs import RlConfig

RECIPE = ["examples/counting_tiny.yaml", "examples/counting_tiny/quickstart.yaml"]
SHOWN = ("seconds", "rollout_s", "logprob_s", "update_s", "reward/mean", "pack/tokens", "vision/tower_calls")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10, help="steps of each layout; the first does not count")
    parser.add_argument("--layouts", nargs="+", default=["shared", "padded"], choices=["shared", "packed", "padded"])
    parser.add_argument("--recipe", nargs="+", default=RECIPE, help="YAML files of vlmrl rl, the base first")
    parser.add_argument("settings", nargs="*", help="more settings, after --: -- --rollout.batch_size 16")
    arguments = parser.parse_args()
    recipe = [word for file in arguments.recipe for word in ("--config", file)]
    startup.prepare()
    measured: dict[str, list[Measurements]] = defaultdict(list)
    with ExitStack() as stack:
        runs = {
            layout: stack.enter_context(
                run_by_steps(load(RlConfig, [*recipe, *arguments.settings, "--train.layout", layout]))
            )
            for layout in arguments.layouts
        }
        for step in range(arguments.steps):
            # Each round starts with another layout.
            turn = step % len(arguments.layouts)
            for layout in arguments.layouts[turn:] + arguments.layouts[:turn]:
                step_metrics = next(runs[layout])
                step_metrics["pass_s"] = step_metrics["logprob_s"] + step_metrics["update_s"]
                shown = {name: step_metrics[name] for name in ("pass_s", *SHOWN)}
                print(json.dumps({"layout": layout, "step": step} | rounded(shown)), flush=True)
                measured[layout].append(step_metrics)
    summarise(measured)


def summarise(measured: dict[str, list[Measurements]]) -> None:
    """Print medians, and the time of each layout's pass relative to the first."""
    names = ("pass_s", "logprob_s", "update_s", "seconds")
    layout_medians = {layout: medians(steps[1:] or steps, names) for layout, steps in measured.items()}
    rewards = {layout: [step["reward/mean"] for step in steps] for layout, steps in measured.items()}
    last: dict[str, Any] = {"medians": {layout: rounded(row) for layout, row in layout_medians.items()}}
    first = next(iter(layout_medians.values()))["pass_s"]
    last["pass_over_first"] = {layout: round(row["pass_s"] / first, 2) for layout, row in layout_medians.items()}
    last["reward_mean"] = {layout: [round(value, 4) for value in values] for layout, values in rewards.items()}
    print(json.dumps(last), flush=True)
    table(
        ("median s", "pass", "logprob", "update", "step", "of first", "reward", "last half"),
        [
            (
                *(layout, *row.values(), f"{last['pass_over_first'][layout]}x"),
                *(rewards[layout][0], statistics.fmean(rewards[layout][len(rewards[layout]) // 2 :])),
            )
            for layout, row in layout_medians.items()
        ],
    )


if __name__ == "__main__":
    main()
