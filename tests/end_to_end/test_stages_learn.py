"""Stages learn on two ranks, from images and from text: supervised training, and a reward model on top of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from recipes import read_metrics, recipe

from vlmrl.commands.rm import train_rm
from vlmrl.commands.sft import train_sft
from vlmrl.config.load import load
from vlmrl.config.stages import RmConfig, SftConfig

pytestmark = [pytest.mark.prove, pytest.mark.timeout(1200), pytest.mark.usefixtures("ray_session")]


@dataclass(frozen=True)
class Task:
    """What a tiny model learns."""

    family: str
    questions: str
    preferences: str
    sft_steps: int


TASKS = [
    Task(
        "qwen2_5_vl",
        "visual_math?families=count&difficulty=1&pixels=112",
        "visual_preferences?families=count&difficulty=1&pixels=112",
        250,
    ),
    Task("qwen3", "arithmetic?difficulty=1", "text_preferences?difficulty=1", 1500),
]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.family)
def test_supervised_training_and_a_reward_model_learn_on_two_ranks(
    task: Task, tmp_path: Path, tiny_model: Callable[..., str]
) -> None:
    flags = {
        "actor.num_gpus_per_node": 2,
        "actor.lr_scheduler": "cosine_with_min_lr",
        "actor.adam.lr": 1e-3,
        "data.prompt_dataset": f"{task.questions}&size=100000",
        "eval.dataset": f"{task.questions}&size=512",
        "eval.generate_enable": "true",
        "eval.steps": task.sft_steps // 5,
        "reward.functions": '{"exact": 1.0}',
        "rollout.max_new_tokens": 8,
        "train.max_steps": task.sft_steps,
        "vllm.cpu_kv_cache_gib": 0.25,
    }
    sft, rm = tmp_path / "sft", tmp_path / "rm"
    train_sft(load(SftConfig, recipe("quickstart_sft.yaml", tiny_model(task.family), sft, **flags)))
    exact = curve(sft, "/pass@1")
    assert exact[max(exact)] > 0.8, exact

    flags = {
        "actor.num_gpus_per_node": 2,
        "data.prompt_dataset": f"{task.preferences}&size=20000",
        "eval.dataset": f"{task.preferences}&size=20000",
        "ckpt.best_metric_key": f"eval/{task.preferences.partition('?')[0]}/accuracy",
    }
    train_rm(load(RmConfig, recipe("rm_visual_math_tiny.yaml", str(sft / "model"), rm, **flags)))
    accuracy = curve(rm, "/accuracy")
    assert accuracy[0] < 0.7
    assert accuracy[max(accuracy)] > 0.95, accuracy


def curve(folder: Path, metric: str) -> dict[int, float]:
    """Return an evaluation's metric by step."""
    return {
        line["step"]: value
        for line in read_metrics(folder)
        for name, value in line.items()
        if name.startswith("eval/") and name.endswith(metric)
    }
