"""Measure how much a slow reward lengthens a GRPO step, when it overlaps with generation.

    .venv/bin/python tests/benchmarks/reward_overlap.py --steps 5

Two runs of the real stack take turns, step by step, on the same prompts: one with an instant reward, one with the same
reward after 50 ms, computed by 8 workers. In sequence the rewards of a step would take 50 ms per response: the serial
cost. The step should grow by less than a tenth of that, which 8 workers alone would not reach: a group is scored as
soon as its last response ends. If other programs share the cores, the time of a whole step is noisy; the growth of the
rollout and reward phases, the only ones that a reward affects, is less so and is also shown. The first step of each run
is a warm-up and does not count. Each step is one JSON line on stdout, the last line has the medians and the growth, and
a table goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

from letters import DELAY_S
from run_by_steps import Measurements, medians, rounded, run_by_steps, table

from vlmrl import startup
from vlmrl.config.load import load
from vlmrl.config.verbs import RlConfig
from vlmrl.models import tiny

HERE = Path(__file__).parent
SIDES = {"instant": "share_of_letters", "slow": "after_a_while"}
PHASES = ("seconds", "rollout_s", "reward_s", "update_s")
NUM_RESPONSES = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each side, after one that warms up")
    parser.add_argument("--prompts", type=int, default=32, help=f"prompts per step, {NUM_RESPONSES} responses each")
    parser.add_argument("--workers", type=int, default=8, help="reward.num_workers")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/reward_overlap"), help="folder for the model")
    arguments = parser.parse_args()
    startup.prepare()
    model = arguments.out.absolute() / "model"
    if not model.exists():
        tiny.build("qwen2_5_vl", model, size="micro")
    measured: dict[str, list[Measurements]] = defaultdict(list)
    with ExitStack() as stack:
        runs = {
            side: stack.enter_context(run_by_steps(load(RlConfig, workload(model, function, arguments))))
            for side, function in SIDES.items()
        }
        for step in range(arguments.steps + 1):
            for side in sorted(SIDES, reverse=bool(step % 2)):
                step_metrics = next(runs[side])
                shown = {name: step_metrics[name] for name in (*PHASES, "response/tokens_mean", "reward/mean")}
                print(json.dumps({"side": side, "step": step, "warm_up": step == 0} | rounded(shown)), flush=True)
                if step:
                    measured[side].append(step_metrics)
    summarise(measured, serial_s=DELAY_S * arguments.prompts * NUM_RESPONSES)


def workload(model: Path, function: str, arguments: argparse.Namespace) -> list[str]:
    settings = {
        "actor.model_name_or_path": model,
        "data.prompt_dataset": "visual_math?families=count&difficulty=1&pixels=3136"
        f"&size={arguments.prompts * (arguments.steps + 2)}",
        "rollout.batch_size": arguments.prompts,
        "rollout.n_samples_per_prompt": NUM_RESPONSES,
        "rollout.max_new_tokens": 64,
        "reward.remote_url": f"{HERE / 'letters.py'}:{function}",
        "reward.num_workers": arguments.workers,
        "train.batch_size": arguments.prompts * NUM_RESPONSES,
        "train.colocate_all": "true",
        "train.image_check_steps": -1,
        "ds.param_dtype": "fp32",
        "ckpt.output_dir": arguments.out,
    }
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def summarise(measured: dict[str, list[Measurements]], *, serial_s: float) -> None:
    """Print medians and growth, as the last JSON line and as a table."""
    side_medians = {side: medians(steps, PHASES) for side, steps in measured.items()}
    growth = {
        name: statistics.median(
            sum(slow[phase] - instant[phase] for phase in phases)
            for slow, instant in zip(measured["slow"], measured["instant"], strict=True)
        )
        for name, phases in (("step", ("seconds",)), ("rollout_and_reward", ("rollout_s", "reward_s")))
    }
    last = {
        "medians": {side: rounded(row) for side, row in side_medians.items()},
        "serial_s": serial_s,
        "growth_over_serial": {name: round(seconds / serial_s, 4) for name, seconds in growth.items()},
    }
    print(json.dumps(last), flush=True)
    table(
        ("median s", *(name.removesuffix("_s") for name in PHASES)), [(k, *v.values()) for k, v in side_medians.items()]
    )


if __name__ == "__main__":
    main()
