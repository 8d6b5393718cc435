"""The quickstart's GRPO in several layouts at once: seconds of its passes, and its reward, step by step.

    make quickstart
    .venv/bin/python tests/benchmarks/compare_layouts.py --steps 20
    .venv/bin/python tests/benchmarks/compare_layouts.py --layouts shared padded --steps 92

Each layout trains a policy of its own, with engine and learner of its own, from the same model on the same prompts in
the same order; they take turns, step by step, in one run. What is compared is `logprob_s + update_s`, the training
pass; the first step of each is a warm-up and does not count. Answers are sampled from the same seeds, so the first
step's rewards are equal; later ones part, as rounding differs, and should stay together within noise. Each step is one
JSON line on stdout, the last line holds the medians, and a table goes to stderr. Other settings, also another recipe
than the quickstart's, may follow after `--`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from contextlib import ExitStack
from typing import Any

from run_by_steps import Measured, medians, rounded, run_by_steps, table

from vlmrl import startup
from vlmrl.config.load import load
from vlmrl.config.run import RlConfig

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
    measured: dict[str, list[Measured]] = defaultdict(list)
    with ExitStack() as stack:
        runs = {
            layout: stack.enter_context(
                run_by_steps(load(RlConfig, [*recipe, *arguments.settings, "--train.layout", layout]))
            )
            for layout in arguments.layouts
        }
        for step in range(arguments.steps):
            # In turn, and every round begins with another one.
            turn = step % len(arguments.layouts)
            for layout in arguments.layouts[turn:] + arguments.layouts[:turn]:
                found = next(runs[layout])
                found["pass_s"] = found["logprob_s"] + found["update_s"]
                shown = {name: found[name] for name in ("pass_s", *SHOWN)}
                print(json.dumps({"layout": layout, "step": step} | rounded(shown)), flush=True)
                measured[layout].append(found)
    tell(measured)


def tell(measured: dict[str, list[Measured]]) -> None:
    """Medians, and how many times the first layout's pass each one takes."""
    names = ("pass_s", "logprob_s", "update_s", "seconds")
    found = {layout: medians(steps[1:] or steps, names) for layout, steps in measured.items()}
    rewards = {layout: [step["reward/mean"] for step in steps] for layout, steps in measured.items()}
    last: dict[str, Any] = {"medians": {layout: rounded(row) for layout, row in found.items()}}
    first = next(iter(found.values()))["pass_s"]
    last["pass_over_first"] = {layout: round(row["pass_s"] / first, 2) for layout, row in found.items()}
    last["reward_mean"] = {layout: [round(value, 4) for value in values] for layout, values in rewards.items()}
    print(json.dumps(last), flush=True)
    table(
        ("median s", "pass", "logprob", "update", "step", "of first", "reward", "last half"),
        [
            (
                *(layout, *row.values(), f"{last['pass_over_first'][layout]}x"),
                *(rewards[layout][0], statistics.fmean(rewards[layout][len(rewards[layout]) // 2 :])),
            )
            for layout, row in found.items()
        ],
    )


if __name__ == "__main__":
    main()
