"""LoRA and QLoRA on one GPU shared by trainer and engine: the reward rises, and both agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from recipes import DIGITS, recipe, steps_of

from vlmrl.commands.rl import train_rl
from vlmrl.config.load import load
from vlmrl.config.verbs import RlConfig
from vlmrl.models import tiny

KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "qlora, 8-bit Adam": {"ds.load_in_4bit": "true", "actor.optim": "adam_8bit"},
    "qlora, ZeRO-3, paged Adam": {"ds.load_in_4bit": "true", "ds.zero_stage": 3, "actor.optim": "adam_paged"},
    "merged, with an optimizer that sleeps": {
        "ds.lora.target_modules": "all",
        "ds.zero_stage": 2,
        "ds.enable_sleep": "true",
    },
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_the_reward_rises_and_engine_and_trainer_agree_in_bf16(kind: str, tmp_path: Path) -> None:
    reward = tmp_path / "digits.py"
    reward.write_text(DIGITS)
    flags = {
        "actor.adam.lr": 1e-2,
        "actor.lr_scheduler": "constant",
        "data.prompt_dataset": "visual_math?families=count&difficulty=1&pixels=56&size=256",
        "eval.max_samples": 8,
        "reward.functions": "{}",
        "reward.remote_url": f"{reward}:digits",
        "rollout.batch_size": 8,
        "train.batch_size": 64,
        "train.max_steps": 10,
        "ds.param_dtype": "bf16",
        "vllm.enable_sleep": "true",
        "vllm.gpu_memory_utilization": 0.2,
    }
    model = tiny.build("qwen2_5_vl", tmp_path / "model")
    out = tmp_path / "run"
    train_rl(load(RlConfig, recipe("visual_math_tiny/lora.yaml", str(model), out, **(flags | KINDS[kind]))))
    steps = steps_of(out)
    rewards = [line["reward/mean"] for line in steps]
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.1, rewards
    for line in steps:
        assert line["sync/logprob_diff_mean"] < 0.1
        assert ("sync/adapter_bytes" in line) == ("merged" not in kind)
