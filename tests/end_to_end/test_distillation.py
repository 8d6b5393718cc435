"""Distillation on the real stack with tiny models: a teacher that is the student has no effect, another one teaches."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import EXAMPLES, recipe, steps_of

from vlmrl.commands.rl import train_rl
from vlmrl.commands.sft import train_sft
from vlmrl.config.load import load
from vlmrl.config.stages import SftConfig
from vlmrl.config.verbs import RlConfig
from vlmrl.models.load import load_model
from vlmrl.plugins import processor

pytestmark = pytest.mark.usefixtures("ray_session")

SHORT: dict[str, Any] = {
    "rollout.batch_size": 16,
    "train.batch_size": 16,
    "eval.max_samples": 4,
    "eval.steps": -1,
    "train.max_steps": 1,
    "ckpt.save_steps": -1,
}


SFT: dict[str, Any] = {"train.max_steps": 4, "actor.adam.lr": 3e-3, "train.batch_size": 16}


@pytest.fixture(scope="module")
def teacher(tiny_model: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another model of the student's family, with more rows in its output layer."""
    out = tmp_path_factory.mktemp("teacher")
    start = tiny_model("qwen2_5_vl", seed=7)
    net = load_model(start, dtype=torch.float32, attn_implementation="sdpa")
    net.resize_token_embeddings(400, mean_resizing=False)
    processor(start, min_pixels=3136, max_pixels=100_000).save(out)
    net.save_pretrained(out)
    return str(out)


def distil(model: str, out: Path, teacher: str, **flags: Any) -> list[dict[str, Any]]:
    options = SHORT | {"algo.distill.teacher_model_name_or_path": teacher, "algo.distill.max_gap": 100} | flags
    train_rl(load(RlConfig, recipe("counting_tiny/distill.yaml", model, out, **options)))
    return steps_of(out)


def check_first_step(first: dict[str, Any]) -> None:
    assert first["distill/kl"] > 1e-3
    assert first["distill/advantage_size"] > 0.01
    assert first["verify/images/teacher_effect"] > 1e-5
    assert first["reward/mean"] >= 0, "it is measured, with weight 0"
    assert {"time/teacher_s", "policy/loss"} <= first.keys()


def test_a_wider_teacher_grades_what_the_policy_samples(
    tiny_model: Callable[..., str], tmp_path: Path, teacher: str
) -> None:
    model = tiny_model("qwen2_5_vl")
    (first,) = distil(model, tmp_path / "run", teacher)
    check_first_step(first)
    (line, *_) = (tmp_path / "run/rollouts/step_000001.jsonl").read_text().splitlines()
    for response in json.loads(line)["responses"]:
        assert response["reward"] == 0
        assert response["advantage"] == pytest.approx(response["teacher_gap"])
        assert response["teacher_gap"] != 0


def test_supervised_training_follows_a_teacher_over_the_vocabulary(
    tiny_model: Callable[..., str], tmp_path: Path, teacher: str
) -> None:
    flags = {"sft.teacher_model_name_or_path": teacher, "sft.distill_kl": "reverse", "sft.distill_coef": 1}
    train_sft(load(SftConfig, recipe("quickstart_sft.yaml", tiny_model("qwen2_5_vl"), tmp_path, **flags, **SFT)))
    steps = steps_of(tmp_path)
    assert steps[0]["policy/loss"] == pytest.approx(steps[0]["distill/kl"])
    assert steps[-1]["distill/kl"] < 0.8 * steps[0]["distill/kl"]
    assert steps[0]["distill/nll"] > 1


@pytest.mark.prove
def test_teachers_that_are_sharded_over_ranks_are_those_of_one_rank(
    tiny_model: Callable[..., str], tmp_path: Path, teacher: str
) -> None:
    model = tiny_model("qwen2_5_vl")
    sharded = {"ds.zero_stage": 3, "actor.num_gpus_per_node": 2}
    check_first_step(distil(model, tmp_path / "rl", teacher, **sharded, **{"algo.distill.num_gpus_per_node": 2})[0])
    losses = []
    for name, ranks in (("one", {}), ("two", sharded)):
        flags = {"sft.teacher_model_name_or_path": teacher, **ranks, **SFT}
        train_sft(load(SftConfig, recipe("quickstart_sft.yaml", model, tmp_path / name, **flags)))
        losses.append([step["distill/kl"] for step in steps_of(tmp_path / name)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.prove
def test_a_teacher_that_is_the_student_changes_nothing(tiny_model: Callable[..., str], tmp_path: Path) -> None:
    model = tiny_model("qwen2_5_vl")
    (first,) = distil(model, tmp_path / "run", model, **{"rollout.temperature": 0.7})
    assert abs(first["distill/kl"]) < 1e-6
    assert first["distill/advantage_size"] < 1e-6


@pytest.mark.prove
@pytest.mark.timeout(1200)
def test_distillation_brings_a_student_to_its_teacher_in_fewer_steps_than_grpo_needs(tmp_path: Path) -> None:
    script = [sys.executable, str(EXAMPLES / "compare_distillation.py"), "--out", str(tmp_path)]
    run = subprocess.run(script, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["before"] < 0.6 < 0.8 < summary["teacher"]
    assert (tmp_path / "curves.png").stat().st_size > 10_000
