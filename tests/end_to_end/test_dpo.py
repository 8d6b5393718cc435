"""`vlmrl dpo` end to end: a resumed run equals an unbroken one, and a precomputed reference the live one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recipes import EXAMPLES, read_metrics, recipe, steps_of

from vlmrl.commands.dpo import train_dpo
from vlmrl.config.load import load
from vlmrl.config.stages import DpoConfig

pytestmark = pytest.mark.usefixtures("ray_session")


def run(model: str, out: Path, **flags: Any) -> list[dict[str, Any]]:
    common = {
        "actor.model_name_or_path": model,
        "actor.adam.lr": 1e-3,
        "ds.param_dtype": "fp32",
        "data.max_len": 256,
        "train.batch_size": 8,
        "train.max_steps": 4,
        "ckpt.output_dir": out,
    }
    words = [word for name, value in (common | flags).items() for word in (f"--{name}", str(value))]
    train_dpo(load(DpoConfig, words))
    return steps_of(out)


def numbers(steps: list[dict[str, Any]]) -> list[dict[str, float]]:
    kept = ("dpo/", "policy/loss", "policy/grad_norm")
    return [{name: value for name, value in line.items() if name.startswith(kept)} for line in steps]


def test_a_resumed_run_equals_an_unbroken_one_with_images(tiny_model: Callable[..., str], tmp_path: Path) -> None:
    """MPO with adapters: BCO's running mean is in the checkpoint."""
    data = "visual_preferences?families=count&difficulty=1&pixels=56&size=64"
    flags = {"data.prompt_dataset": data, "dpo.loss": "mpo", "ds.lora.rank": 4, "ckpt.save_steps": 2}
    model = tiny_model("qwen2_5_vl", size="micro")
    whole = run(model, tmp_path / "whole", **flags)
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "step_000004")
    resumed = run(model, tmp_path / "resumed", **flags, **{"ckpt.load_enable": "true"})
    assert numbers(resumed)[-2:] == numbers(whole)[-2:]
    assert whole[-1]["dpo/delta"] != 0
    assert (tmp_path / "whole" / "adapter").is_dir()


def test_a_precomputed_reference_equals_a_live_one_with_images(tiny_model: Callable[..., str], tmp_path: Path) -> None:
    data = "visual_preferences?families=count&difficulty=1&pixels=56&size=64"
    flags = {"data.prompt_dataset": data, "data.eval_fraction": 0.25, "train.max_steps": 2}
    model = tiny_model("qwen2_5_vl", size="micro")
    live = run(model, tmp_path / "live", **flags)
    computed = run(model, tmp_path / "computed", **flags, **{"dpo.precompute_reference": "true"})
    for one, other in zip(numbers(live), numbers(computed), strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    evaluations = [
        [value for line in read_metrics(tmp_path / name) for key, value in line.items() if key.endswith("/loss")]
        for name in ("live", "computed")
    ]
    assert evaluations[0] == pytest.approx(evaluations[1], abs=1e-5)
    lines = [json.loads(line) for line in (tmp_path / "computed" / "reference.jsonl").read_text().splitlines()]
    assert re.fullmatch(r"weights [0-9a-f]{12} \(fp32\)", lines[0]["reference"])
    assert lines[-1]["rows"] == 16


@pytest.mark.prove
@pytest.mark.timeout(2400)
def test_each_loss_raises_the_accuracy_of_sampled_responses(tmp_path: Path) -> None:
    script = [sys.executable, str(EXAMPLES / "compare_preferences.py"), "--out", str(tmp_path)]
    run = subprocess.run(script, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    summary = json.loads(run.stdout.splitlines()[-1])
    assert set(summary) == {"dpo", "ipo", "cdpo", "kto", "mpo"}
    assert all(0.4 < result["before"] < 0.65 for result in summary.values())
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_responses_to_held_out_questions_are_sampled(tiny_model: Callable[..., str], tmp_path: Path) -> None:
    data = "visual_preferences?families=count&difficulty=1&pixels=56&size=16&kind=unpaired"
    flags = {"data.prompt_dataset": data, "data.output_key": "response", "dpo.loss": "kto", "ds.lora.rank": 4}
    flags |= {"eval.dataset": data, "eval.generate_enable": "true", "train.max_steps": 1}
    flags |= {"reward.functions": "exact", "rollout.max_new_tokens": 4, "vllm.cpu_kv_cache_gib": 0.2}
    run(tiny_model("qwen2_5_vl", size="micro"), tmp_path, **flags)
    evaluations = [line for line in read_metrics(tmp_path) if "eval/visual_preferences/pass@1" in line]
    assert [line["step"] for line in evaluations] == [0, 1]
    assert all("eval/visual_preferences/loss" in line for line in evaluations)
    responses = [json.loads(line) for line in next((tmp_path / "rollouts").glob("*.jsonl")).read_text().splitlines()]
    assert 0 < len(responses) < 16


@pytest.mark.prove
def test_the_recipe_of_kto_runs(tiny_model: Callable[..., str], tmp_path: Path) -> None:
    flags = {"train.max_steps": 2, "train.batch_size": 4, "eval.steps": -1}
    flags |= {"eval.dataset": "visual_preferences?families=count&difficulty=1&pixels=112&size=8&kind=unpaired"}
    words = recipe("dpo_counting_tiny.yaml", tiny_model("qwen2_5_vl", size="micro"), tmp_path)
    words = [*words[:2], "--config", words[1].replace(".yaml", "/kto.yaml"), *words[2:]]
    train_dpo(load(DpoConfig, [*words, *(word for name, value in flags.items() for word in (f"--{name}", str(value)))]))
    steps = steps_of(tmp_path)
    assert len(steps) == 2
    assert steps[0]["dpo/kl"] == pytest.approx(0.0, abs=1e-4)
