"""`make ladder`: the stages of training one after the other, with a tiny Qwen2.5-VL on two CPU cores.

Supervised training, a reward model, PPO against it, DPO on the same preferences, and the accuracy of each model on
held-out images. Each stage is a command of `vlmrl`, which is printed. The last line is one JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vlmrl import startup
from vlmrl.commands.exit_code import exit_code
from vlmrl.commands.quickstart import set_aside
from vlmrl.errors import VlmrlError
from vlmrl.observe.ladder_picture import Rung, draw_ladder
from vlmrl.observe.sinks import read_metrics

RUNS = Path("runs/ladder")
_TRAINED = ("sft", "rm", "ppo", "dpo")
"""Folders of the stages that train."""
_SETS = "families=count&difficulty=1&pixels=112"


@dataclass(frozen=True)
class Stage:
    """One command of the ladder."""

    title: str
    folder: str
    """Its output in `runs/ladder/`."""
    words: tuple[str, ...]
    """Verb and flags, without the output folder."""

    def command(self, runs: Path) -> list[str]:
        """Return the words behind `vlmrl`."""
        return [*self.words, "--ckpt.output_dir", str(runs / self.folder)]


def stages(runs: Path) -> list[Stage]:
    """Return the commands that run in `runs`, in order."""
    sft, reward_model = ("--actor.model_name_or_path", str(runs / "sft/model")), str(runs / "rm/model")
    return [
        Stage(
            "supervised fine-tuning",
            "sft",
            ("sft", "--config", "examples/quickstart_sft.yaml", "--actor.model_name_or_path", str(runs / "start")),
        ),
        Stage(
            "a reward model from preferences",
            "rm",
            ("rm", "--config", "examples/rm_visual_math_tiny.yaml", *sft),
        ),
        Stage(
            "PPO against the reward model",
            "ppo",
            (
                *("rl", "--config", "examples/counting_tiny.yaml"),
                *("--config", "examples/counting_tiny/reward_model.yaml", *sft),
                *("--reward.model_name_or_path", reward_model, "--train.max_steps", "60"),
            ),
        ),
        Stage(
            "DPO on the same preferences",
            "dpo",
            ("dpo", "--config", "examples/dpo_counting_tiny.yaml", *sft),
        ),
        *(
            Stage(
                f"accuracy of the model of {name}",
                f"eval_{name}",
                (
                    *("eval", "--actor.model_name_or_path", str(runs / name / "model"), "--reward.functions", "exact"),
                    *("--eval.dataset", f"visual_math?{_SETS}&size=512", "--eval.temperature", "1.0"),
                    *("--data.max_len", "256", "--rollout.max_new_tokens", "8"),
                    *("--ds.param_dtype", "fp32", "--vllm.cpu_kv_cache_gib", "0.5"),
                ),
            )
            for name in ("sft", "ppo", "dpo")
        ),
    ]


def main() -> int:
    """Build a model, run the stages, draw the picture and print the result; return the exit code."""
    startup.prepare()
    return exit_code(lambda: climb(RUNS, run_command), "ladder")


def run_command(words: Sequence[str]) -> None:
    """Run a command of vlmrl in a process of its own. Raises VlmrlError if it fails."""
    done = subprocess.run([sys.executable, "-m", "vlmrl", *words], check=False)
    if done.returncode:
        raise VlmrlError(f"vlmrl {words[0]} ended with exit code {done.returncode}: see its message above")


def climb(runs: Path, run: Callable[[Sequence[str]], None]) -> int:
    """Run the stages in the folder `runs`. `run` runs a command of vlmrl."""
    started = time.monotonic()
    set_aside(runs)
    print(f"a Qwen2.5-VL of 1.6M random weights -> {runs / 'start'}", flush=True)
    from vlmrl.models import tiny

    tiny.build("qwen2_5_vl", runs / "start")
    all_stages = stages(runs)
    seconds: dict[str, float] = {}
    for number, stage in enumerate(all_stages, start=1):
        words = stage.command(runs)
        print(f"\n{number}/{len(all_stages)}  {stage.title}: vlmrl {' '.join(words)}", flush=True)
        begun = time.monotonic()
        run(words)
        seconds[stage.folder] = round(time.monotonic() - begun, 1)
    accuracy = {name: _curve(runs / f"eval_{name}", "eval/visual_math/pass@1")[-1][1] for name in ("sft", "ppo", "dpo")}
    pairs, picture = _curve(runs / "rm", "eval/visual_preferences/accuracy"), runs / "ladder.png"
    rungs = [Rung(name.upper(), value) for name, value in accuracy.items()]
    draw_ladder(rungs, reward_model=pairs, ppo=_curve(runs / "ppo", "reward/mean"), out=picture)
    reward_model = pairs[-1][1]
    print(f"\nAccuracy on held-out images: {', '.join(f'{name} {value:.0%}' for name, value in accuracy.items())}")
    print(f"The reward model prefers the right response in {reward_model:.0%} of held-out pairs")
    print(f"Picture: {picture}")
    print(f"Reports, to open in a browser: {', '.join(str(runs / name / 'report.html') for name in _TRAINED)}")
    result = {
        **accuracy,
        "reward_model": reward_model,
        "seconds": round(time.monotonic() - started, 1),
        "seconds_of_stages": seconds,
    }
    print(json.dumps(result), flush=True)
    return 0


def _curve(folder: Path, metric: str) -> list[tuple[int, float]]:
    """Return the steps and values of a metric of a run."""
    curve = [(record["step"], record[metric]) for record in read_metrics(folder / "metrics.jsonl") if metric in record]
    assert curve, f"{folder} has no {metric}"
    return curve


if __name__ == "__main__":
    sys.exit(main())
