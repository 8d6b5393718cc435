"""Stages learn on two ranks, from images and from text: supervised training, and a reward model on top of it."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from recipes import read_metrics, recipe

from vlmrl.commands.rm import train_rm
from vlmrl.commands.sft import train_sft
from vlmrl.config.load import load
from vlmrl.config.stages import RmConfig, SftConfig

pytestmark = [pytest.mark.prove, pytest.mark.timeout(1200), pytest.mark.usefixtures("ray_session")]


_MARKS = 12


@dataclass(frozen=True)
class Task:
    """What a tiny model learns: to count, in pictures or in text."""

    family: str
    questions: Callable[[Path, str], str]
    """(folder, split) -> the dataset of questions."""
    preferences: Callable[[Path, str], str]


def marks(folder: Path, split: str, *, columns: Callable[[int, random.Random], dict[str, str]]) -> str:
    """Write questions on how many of some marks are circles; the splits share none. Returns the file."""
    rng = random.Random(split)
    rows = []
    while len(rows) < (512 if split == "test" else 20_000):
        text = "".join(rng.choices("ox", k=_MARKS))
        if (zlib.crc32(text.encode()) % 8 == 0) == (split == "test"):
            count = text.count("o")
            rows.append({"input": f"How many o? {' '.join(text)}"} | columns(count, rng))
    file = folder / f"marks_{split}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def pictures(name: str, size: int) -> Callable[[Path, str], str]:
    sizes = {"train": size, "test": 512}
    return lambda folder, split: f"{name}?families=count&difficulty=1&pixels=112&size={sizes[split]}"


def answered(count: int, rng: random.Random) -> dict[str, str]:
    return {"label": str(count), "answer": str(count)}


def preferred(count: int, rng: random.Random) -> dict[str, str]:
    return {"chosen": str(count), "rejected": str(rng.choice([n for n in (count - 1, count + 1) if 0 <= n <= _MARKS]))}


TASKS = [
    Task("qwen2_5_vl", pictures("visual_math", 32_000), pictures("visual_preferences", 20_000)),
    Task("qwen3", partial(marks, columns=answered), partial(marks, columns=preferred)),
]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.family)
def test_supervised_training_and_a_reward_model_learn_on_two_ranks(
    task: Task, tmp_path: Path, tiny_model: Callable[..., str]
) -> None:
    flags = {
        "actor.num_gpus_per_node": 2,
        "actor.lr_scheduler": "cosine_with_min_lr",
        "actor.adam.lr": 1e-3,
        "data.prompt_dataset": task.questions(tmp_path, "train"),
        "eval.dataset": task.questions(tmp_path, "test"),
        "eval.generate_enable": "true",
        "eval.steps": 50,
        "reward.functions": '{"exact": 1.0}',
        "rollout.max_new_tokens": 8,
        "train.max_steps": 250,
        "vllm.cpu_kv_cache_gib": 0.25,
    }
    sft, rm = tmp_path / "sft", tmp_path / "rm"
    train_sft(load(SftConfig, recipe("quickstart_sft.yaml", tiny_model(task.family), sft, **flags)))
    exact = curve(sft, "/pass@1")
    assert exact[max(exact)] > 0.8, exact

    flags = {
        "actor.num_gpus_per_node": 2,
        "data.prompt_dataset": task.preferences(tmp_path, "train"),
        "eval.dataset": task.preferences(tmp_path, "test"),
        "ckpt.best_metric_key": "null",
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
