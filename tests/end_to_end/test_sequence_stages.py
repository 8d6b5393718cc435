"""`vlmrl dpo`, `rm` and PPO with ranks that share tokens: the metrics of one rank, and resumed with another size."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recipes import read_metrics, recipe, steps_of

from vlmrl.commands.dpo import train_dpo
from vlmrl.commands.rl import train_rl
from vlmrl.commands.rm import train_rm
from vlmrl.config.load import load
from vlmrl.config.stages import DpoConfig, RmConfig
from vlmrl.config.verbs import RlConfig

pytestmark = [pytest.mark.prove, pytest.mark.usefixtures("ray_session")]
PAIRS = "visual_preferences?families=count&difficulty=1&pixels=56&size=64"


def ranks(number: int, size: int) -> dict[str, Any]:
    return {"actor.num_gpus_per_node": number, "ds.sequence_parallel_size": size, "ds.zero_stage": 2}


def words(model: str, out: Path, **flags: Any) -> list[str]:
    common = {
        "actor.model_name_or_path": model,
        "actor.adam.lr": 1e-2,
        # Adam's step then follows the gradient; with a small epsilon it is its sign, rounding noise included.
        "actor.adam.eps": 1e-3,
        "ds.param_dtype": "fp32",
        "data.prompt_dataset": PAIRS,
        "data.max_len": 256,
        "train.batch_size": 8,
        "train.max_steps": 4,
        "ckpt.output_dir": out,
    }
    return [word for name, value in (common | flags).items() for word in (f"--{name}", str(value))]


def assert_equal(shared: list[dict[str, Any]], alone: list[dict[str, Any]]) -> None:
    """Compare losses, gradient norms and what preferences are measured by."""
    assert len(shared) == len(alone) > 0
    for one, other in zip(shared, alone, strict=True):
        names = [name for name in other if name.startswith(("dpo/", "rm/", "policy/", "value/", "pack/tokens"))]
        assert {name for name in one if name.startswith(("dpo/", "rm/", "policy/", "value/"))} <= set(names)
        for name in names:
            assert one[name] == pytest.approx(other[name], rel=1e-5, abs=1e-5), (other["step"], name)


def test_preferences_have_the_metrics_of_one_rank_also_when_resumed_with_another_size(
    tiny_model: Callable[..., str], tmp_path: Path
) -> None:
    model = tiny_model("qwen2_5_vl", size="micro")

    def run(name: str, **flags: Any) -> list[dict[str, Any]]:
        train_dpo(load(DpoConfig, words(model, tmp_path / name, **{"ckpt.save_steps": 2}, **flags)))
        return steps_of(tmp_path / name)

    alone = run("alone", **ranks(1, 1))
    # Data-parallel ranks divide the samples, so tokens of packs differ.
    sizes = {1: "divided", 2: "shared"}
    for size, name in sizes.items():
        whole = run(name, **ranks(2, size))
        assert_equal(whole, alone if size == 2 else without_packs(alone))
        folder = tmp_path / f"resumed_{name}"
        shutil.copytree(tmp_path / name, folder)
        shutil.rmtree(folder / "checkpoints" / "step_000004")
        resumed = run(folder.name, **ranks(2, 3 - size), **{"ckpt.load_enable": "true"})
        assert_equal(without_packs(resumed[-2:]), without_packs(alone[-2:]))


def without_packs(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if not name.startswith("pack/")} for line in steps]


def test_a_reward_model_has_the_metrics_of_one_rank(tiny_model: Callable[..., str], tmp_path: Path) -> None:
    model = tiny_model("qwen3_vl", size="micro")
    steps = {}
    for size in (1, 2):
        out = tmp_path / str(size)
        train_rm(load(RmConfig, words(model, out, **ranks(size, size))))
        steps[size] = [line for line in read_metrics(out) if "rm/loss" in line]
    assert_equal(steps[2], steps[1])


def test_ppo_has_the_metrics_of_one_rank(tiny_model: Callable[..., str], digits_reward: str, tmp_path: Path) -> None:
    flags: dict[str, Any] = {
        "reward.functions": "{}",
        "reward.remote_url": digits_reward,
        "actor.adam.eps": 1e-3,
        "critic.adam.eps": 1e-3,
        "critic.freezing_steps": 1,
        "rollout.batch_size": 4,
        "rollout.n_samples_per_prompt": 4,
        "train.batch_size": 8,
        "train.max_steps": 3,
        "eval.steps": -1,
    }
    steps = {}
    for size in (1, 2):
        out = tmp_path / str(size)
        model = tiny_model("qwen2_5_vl", size="micro")
        train_rl(load(RlConfig, recipe("counting_tiny/ppo.yaml", model, out, **flags, **ranks(size, size))))
        steps[size] = steps_of(out)
    assert [line["step"] for line in steps[2]] == [2, 3]
    assert "value/loss" in steps[2][0]
    assert_equal(steps[2], steps[1])
