r"""Compare a whole GRPO step (rollout, log-probs, update, weight sync) of vlmrl and of TRL 1.16, in turn.

    .venv/bin/python tests/benchmarks/compare_trl.py --steps 5

The workload: a Qwen2.5-VL of 13M random weights in fp32, images of 392x392 pixels (196 tokens), 8 prompts with 8
responses of 64 tokens. Both sides have the same prompts in the same order, the same reward, loss, optimizer and
learning rate. They take turns: while one makes a step, the other waits. A random model ends a response about once in
some thousands of tokens, so nearly all have 64; both means are printed. The first step of each side is a warm-up and
does not count.

vlmrl runs as in `vlmrl rl`: Ray, a vLLM engine, DeepSpeed, verified weight syncs. trl_process.py documents the setup of
TRL, which is installed into a separate folder (`--trl`) if it is missing, and uses this environment for the rest. Each
step is one JSON line on stdout, the last line has the medians, and a table goes to stderr.

On CPU much of a step is the kernel clearing pages that glibc's malloc returned and takes again. Both sides inherit this
script's environment, so they can also be compared without that; TRL is then faster with larger micro-batches:

    MALLOC_MMAP_THRESHOLD_=8589934592 MALLOC_TRIM_THRESHOLD_=8589934592 MALLOC_TOP_PAD_=268435456 \
        .venv/bin/python tests/benchmarks/compare_trl.py --steps 5 --micro-batch 8
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from run_by_steps import Measurements, medians, rounded, run_by_steps, table

from vlmrl import startup
from vlmrl.config.dump import dump_yaml
from vlmrl.config.load import load
from vlmrl.config.verbs import RlConfig
from vlmrl.models import tiny

HERE = Path(__file__).parent
TRL = "trl==1.16.0"
QUESTION = "How many circles?"
PHASES = ("rollout_s", "logprob_s", "update_s", "sync_s")
SHOWN = (
    *("seconds", "data_s", "reward_s", *PHASES),
    *("prompt/tokens_mean", "response/tokens_mean", "pack/tokens", "vision/tower_calls", "sync/logprob_diff_max"),
)
"""Printed metrics of a step, if a side has them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each side, after one that warms up")
    parser.add_argument("--micro-batch", type=int, default=2, help="TRL's per_device_train_batch_size")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/compare_trl"), help="folder for all output")
    parser.add_argument("--trl", type=Path, help="folder of TRL, installed if missing; by default OUT/environment")
    parser.add_argument("--only", choices=("vlmrl", "trl"), help="measure one side alone")
    parser.add_argument("settings", nargs="*", help="more settings for vlmrl, after --: -- --train.layout packed")
    arguments = parser.parse_args()
    startup.prepare()
    out = arguments.out.absolute()
    model = out / "model"
    if not model.exists():
        tiny.build("qwen2_5_vl", model, size="small")
    config = load(RlConfig, [*workload(model, out, arguments.steps + 2), *arguments.settings])
    dump_yaml(config, out / "config.yaml")
    measured: dict[str, list[Measurements]] = defaultdict(list)
    with ExitStack() as stack:
        sides = {}
        if arguments.only != "vlmrl":
            trl = install(arguments.trl or out / "environment")
            # One step more than requested: after its last step TRL would clean up during vlmrl's last step.
            sides["trl"] = stack.enter_context(trl_steps(trl, out, arguments.steps + 2, arguments.micro_batch))
        if arguments.only != "trl":
            sides["vlmrl"] = stack.enter_context(run_by_steps(config))
        for step in range(arguments.steps + 1):
            # Alternate which side is first.
            for side in list(sides) if step % 2 else list(reversed(sides)):
                step_metrics = next(sides[side])
                shown = {name: value for name, value in step_metrics.items() if name in SHOWN}
                print(json.dumps({"side": side, "step": step, "warm_up": step == 0} | rounded(shown)), flush=True)
                if step:
                    measured[side].append(step_metrics)
    summarise(measured)


def workload(model: Path, out: Path, steps: int) -> list[str]:
    """The settings of vlmrl's side."""
    settings = {
        "actor.model_name_or_path": model,
        "actor.adam.lr": 1e-6,
        "actor.lr_scheduler": "constant",
        "data.prompt_dataset": f"visual_math?families=count&difficulty=1&pixels=392&size={8 * steps}",
        "rollout.batch_size": 8,
        "rollout.n_samples_per_prompt": 8,
        "rollout.max_new_tokens": 64,
        "reward.remote_url": f"{HERE / 'letters.py'}:share_of_letters",
        "train.batch_size": 64,
        "train.colocate_all": "true",
        "train.image_check_steps": -1,
        "ds.param_dtype": "fp32",
        "ckpt.output_dir": out / "vlmrl",
    }
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def install(folder: Path) -> Path:
    """Install TRL without dependencies into a separate folder, and leave the environment unchanged."""
    if not (folder / "trl").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), TRL]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return folder


@contextmanager
def trl_steps(trl: Path, out: Path, steps: int, micro_batch: int) -> Iterator[Iterator[Measurements]]:
    """Start TRL's process, and yield an iterator over its steps."""
    path = os.pathsep.join([str(trl.absolute()), os.environ["PYTHONPATH"]])
    command = [
        sys.executable,
        str(HERE / "trl_process.py"),
        "--config",
        str(out / "config.yaml"),
        "--question",
        QUESTION,
    ]
    command += ["--steps", str(steps), "--micro-batch", str(micro_batch), "--out", str(out / "trl")]
    log = out / "trl.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        )

    def read_line() -> Measurements:
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"TRL's process has ended (exit code {process.wait()}); its output is in {log}")
        return json.loads(line)

    def steps_of_trl() -> Iterator[Measurements]:
        while True:
            process.stdin.write("step\n")
            process.stdin.flush()
            yield read_line()

    try:
        read_line()
        yield steps_of_trl()
    finally:
        process.kill()
        process.wait()


def summarise(steps: dict[str, list[Measurements]]) -> None:
    """Print the medians, as the last JSON line and as a table."""
    side_medians = {side: medians(measured, ("seconds", *PHASES)) for side, measured in steps.items()}
    last: dict[str, Any] = {"medians": {side: rounded(row) for side, row in side_medians.items()}}
    last["steps"] = {side: len(measured) for side, measured in steps.items()}
    if len(side_medians) == 2:
        last["ratio"] = round(side_medians["trl"]["seconds"] / side_medians["vlmrl"]["seconds"], 2)
    print(json.dumps(last), flush=True)
    table(
        ("median s", "step", *(name.removesuffix("_s") for name in PHASES)),
        [(k, *v.values()) for k, v in side_medians.items()],
    )
    if "ratio" in last:
        print(f"vlmrl's step is {last['ratio']} times as fast as TRL's", file=sys.stderr)


if __name__ == "__main__":
    main()
