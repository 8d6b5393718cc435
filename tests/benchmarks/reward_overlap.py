"""What a slow reward costs a GRPO step, when it is paid while other answers are still being written.

    .venv/bin/python tests/benchmarks/reward_overlap.py --steps 5

Two runs of the whole real stack take turns, step by step, on the same prompts: one with a reward that costs nothing,
one with the same reward said 50 ms later, by 8 workers. One after another the rewards of a step would take 50 ms times
its answers: the serial cost. The step may grow by less than a tenth of that, what 8 workers alone would not reach: a
group is scored as soon as its last answer ends. Where other programs share the cores, a whole step is noisy; the growth
of its rollout and reward phases, which are all that a reward can touch, is less so, and is shown beside it. The first
step of each is a warm-up and does not count. Each step is one JSON line on stdout, the last line holds the medians and
the growth, and a table goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

from letters import DELAY_S
from run_by_steps import Measured, medians, rounded, run_by_steps, table

from vlmrl import startup
from vlmrl.config.load import load
from vlmrl.config.run import RlConfig
from vlmrl.models import tiny

HERE = Path(__file__).parent
SIDES = {"instant": "share_of_letters", "slow": "after_a_while"}
PHASES = ("seconds", "rollout_s", "reward_s", "update_s")
NUM_ANSWERS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each side, after one that warms up")
    parser.add_argument("--prompts", type=int, default=32, help=f"prompts of a step, with {NUM_ANSWERS} answers each")
    parser.add_argument("--workers", type=int, default=8, help="reward.num_workers")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/reward_overlap"), help="folder for the model")
    arguments = parser.parse_args()
    startup.prepare()
    model = arguments.out.absolute() / "model"
    if not model.exists():
        tiny.build("qwen2_5_vl", model, size="micro")
    measured: dict[str, list[Measured]] = defaultdict(list)
    with ExitStack() as stack:
        runs = {
            side: stack.enter_context(run_by_steps(load(RlConfig, workload(model, function, arguments))))
            for side, function in SIDES.items()
        }
        for step in range(arguments.steps + 1):
            for side in sorted(SIDES, reverse=bool(step % 2)):
                found = next(runs[side])
                shown = {name: found[name] for name in (*PHASES, "response/tokens_mean", "reward/mean")}
                print(json.dumps({"side": side, "step": step, "warm_up": step == 0} | rounded(shown)), flush=True)
                if step:
                    measured[side].append(found)
    tell(measured, serial_s=DELAY_S * arguments.prompts * NUM_ANSWERS)


def workload(model: Path, function: str, arguments: argparse.Namespace) -> list[str]:
    settings = {
        "actor.model_name_or_path": model,
        "data.prompt_dataset": "visual_math?families=count&difficulty=1&pixels=3136"
        f"&size={arguments.prompts * (arguments.steps + 2)}",
        "rollout.batch_size": arguments.prompts,
        "rollout.n_samples_per_prompt": NUM_ANSWERS,
        "rollout.max_new_tokens": 64,
        "reward.remote_url": f"{HERE / 'letters.py'}:{function}",
        "reward.num_workers": arguments.workers,
        "train.batch_size": arguments.prompts * NUM_ANSWERS,
        "train.colocate_all": "true",
        "train.image_check_steps": -1,
        "ds.param_dtype": "fp32",
        "ckpt.output_dir": arguments.out,
    }
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def tell(measured: dict[str, list[Measured]], *, serial_s: float) -> None:
    """The medians and the growth, as the last JSON line and as a table."""
    found = {side: medians(steps, PHASES) for side, steps in measured.items()}
    growth = {
        what: statistics.median(
            sum(slow[name] - instant[name] for name in names)
            for slow, instant in zip(measured["slow"], measured["instant"], strict=True)
        )
        for what, names in (("step", ("seconds",)), ("rollout_and_reward", ("rollout_s", "reward_s")))
    }
    last = {
        "medians": {side: rounded(row) for side, row in found.items()},
        "serial_s": serial_s,
        "growth_over_serial": {what: round(seconds / serial_s, 4) for what, seconds in growth.items()},
    }
    print(json.dumps(last), flush=True)
    table(("median s", *(name.removesuffix("_s") for name in PHASES)), [(k, *v.values()) for k, v in found.items()])


if __name__ == "__main__":
    main()
