"""The recipe of the calculator: a text model learns to call a tool."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from recipes import EXAMPLES, read_metrics, recipe, steps_of

from vlmrl.commands.rl import train_rl
from vlmrl.commands.sft import train_sft
from vlmrl.config.load import load
from vlmrl.config.stages import SftConfig
from vlmrl.config.verbs import RlConfig

pytestmark = pytest.mark.usefixtures("ray_session")


@pytest.mark.prove
def test_a_text_model_learns_to_call_the_calculator(tmp_path: Path) -> None:
    subprocess.run([sys.executable, EXAMPLES / "agents" / "calculator_start.py", tmp_path], check=True)
    warm_up = {
        "actor.model_name_or_path": tmp_path / "start",
        "actor.adam.lr": 2e-3,
        "ds.param_dtype": "fp32",
        "data.prompt_dataset": tmp_path / "demonstrations.jsonl",
        "data.max_len": 160,
        "train.batch_size": 32,
        "train.max_steps": 400,
        "ckpt.output_dir": tmp_path / "warm",
    }
    train_sft(load(SftConfig, [word for name, value in warm_up.items() for word in (f"--{name}", str(value))]))
    files = {"data.prompt_dataset": tmp_path / "questions.jsonl", "eval.dataset": tmp_path / "held_out.jsonl"}
    files["train.agent_func_path"] = f"{EXAMPLES / 'agents' / 'calculator.py'}:make"
    train_rl(load(RlConfig, recipe("tools_tiny.yaml", str(tmp_path / "warm" / "model"), tmp_path / "rl", **files)))
    name = "eval/held_out/pass@1"
    before, after = [line[name] for line in read_metrics(tmp_path / "rl") if name in line]
    assert before < 0.2
    assert after > 0.8
    steps = steps_of(tmp_path / "rl")
    assert steps[-1]["agent/tool_calls"] > 0.9 * 64 > 0.5 * 64 > steps[0]["agent/tool_calls"]
    for line in steps:
        assert line["sync/logprob_diff_max"] < 1e-3
