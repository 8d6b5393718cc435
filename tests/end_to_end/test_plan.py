"""The step times that `vlmrl plan` estimates, against measured runs of other sizes on this machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vlmrl.commands.memory import this_machine
from vlmrl.commands.plan import read_run
from vlmrl.plan.fit import Measured, fitted
from vlmrl.plan.rates import CPU

Size = tuple[str, int, int, int]
"""Size of the model, prompts, responses of each, tokens of a response."""

CALIBRATION: tuple[Size, ...] = (("tiny", 4, 4, 32), ("small", 8, 8, 64), ("medium", 2, 4, 32))
PREDICTED: tuple[Size, ...] = (
    ("tiny", 8, 8, 96),
    ("small", 4, 4, 128),
    ("small", 16, 4, 32),
    ("medium", 2, 8, 32),
    ("medium", 4, 4, 64),
)
STEPS = 6


@pytest.mark.prove
def test_step_times_of_other_sizes_are_within_a_quarter(tmp_path: Path, tiny_model: Callable[..., str]) -> None:
    """On a machine without other work. Each run has its own Ray, for the session of the other tests shares four cores
    among two: with that an engine's third thread made rollouts twice as slow."""

    def measured(size: Size) -> Measured:
        model, prompts, responses, tokens = size
        out = tmp_path / "_".join(map(str, size))
        flags = {
            "actor.model_name_or_path": tiny_model("qwen3", size=model),
            "data.prompt_dataset": "arithmetic?difficulty=1&size=2000",
            "data.max_len": 128,
            "reward.functions": "{exact: 1.0}",
            "rollout.batch_size": prompts,
            "rollout.n_samples_per_prompt": responses,
            "rollout.max_new_tokens": tokens,
            "train.batch_size": prompts * responses,
            "train.max_steps": STEPS,
            "train.colocate_all": "true",
            "ds.param_dtype": "fp32",
            "vllm.cpu_kv_cache_gib": 0.5,
            "ckpt.output_dir": out,
        }
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "vlmrl", "rl", *words]
        subprocess.run(command, check=True, timeout=240, stdout=subprocess.DEVNULL)
        return read_run(out, this_machine(), image_pixels=0)

    rates = fitted([measured(size) for size in CALIBRATION], CPU)
    errors = {}
    for size in PREDICTED:
        run = measured(size)
        measured_s = sum(run.seconds[phase.name] for phase in run.step.phases)
        errors[size] = run.step.seconds(rates) / measured_s - 1
    print("\n" + "\n".join(f"{size}: {error:+.0%}" for size, error in errors.items()))
    assert all(abs(error) < 0.25 for error in errors.values()), errors
