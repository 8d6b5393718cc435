"""`vlmrl rl` on the real stack: two ZeRO-3 ranks, two engines, a reward that a random model can learn in seconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vlmrl.config.run import EvalConfig, RlConfig, SftConfig
from vlmrl.run import evaluate, train_rl, train_sft

# The reward wants what no pretraining is needed for: answers made of digits.
DIGITS = '''
def digits(response, label, metadata, **_):
    """Share of the answer's characters that are digits."""
    return sum(c.isdigit() for c in response) / max(1, len(response))
'''


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def digits_reward(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("reward") / "digits.py"
    file.write_text(DIGITS)
    return f"{file}:digits"


def settings(model: str, out: Path, reward: str, dataset: str, **train: Any) -> dict[str, Any]:
    return {
        "actor": {
            "model_name_or_path": model,
            "num_gpus_per_node": 2,
            "adam": {"lr": 3e-3},
            "lr_scheduler": "constant",
        },
        "data": {"prompt_dataset": dataset, "max_len": 256},
        "reward": {"functions": {}, "remote_url": reward},
        "rollout": {"batch_size": 8, "n_samples_per_prompt": 8, "max_new_tokens": 8},
        "vllm": {"num_engines": 2, "cpu_kv_cache_gib": 0.25},
        "train": {"batch_size": 64, "max_steps": 8, "colocate_all": True} | train,
        "ds": {"param_dtype": "fp32", "zero_stage": 3},
        "ckpt": {"output_dir": str(out)},
    }


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize(
    ("family", "dataset"),
    [
        ("qwen3", "arithmetic?size=64"),
        ("qwen3_vl", "visual_math?families=count&difficulty=1&pixels=128&size=32,arithmetic?size=32"),
    ],
)
def test_the_reward_rises_on_two_ranks_and_two_engines(
    family: str, dataset: str, tmp_path: Path, tiny_model: Callable[..., str], digits_reward: str
) -> None:
    train_rl(RlConfig.model_validate(settings(tiny_model(family), tmp_path / "run", digits_reward, dataset)))
    steps = [line for line in read_metrics(tmp_path / "run") if "reward/mean" in line]
    assert len(steps) == 8
    rewards = [line["reward/mean"] for line in steps]
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.1, rewards
    for line in steps:
        assert line["sync/logprob_diff_max"] < 1e-3
        assert line["group/constant_fraction"] < 1.0
    assert [line["sync/version"] for line in steps] == list(range(1, 9))
    has_images = family == "qwen3_vl"
    assert all((line["media/bytes_moved"] > 0) == has_images for line in steps[:1])
    assert (tmp_path / "run" / "curves.png").stat().st_size > 10_000
    transcript = [json.loads(line) for line in (tmp_path / "run/rollouts/step_000001.jsonl").read_text().splitlines()]
    assert transcript
    assert bool(list((tmp_path / "run/rollouts").glob("media/*.png"))) == has_images


@pytest.mark.usefixtures("ray_session")
def test_sft_then_eval_then_rl_with_a_reference_and_engines_apart(
    tmp_path: Path, tiny_model: Callable[..., str], digits_reward: str
) -> None:
    model = tiny_model("qwen2_5_vl")
    counting = "visual_math?families=count&difficulty=1&pixels=112&size=256"
    train_sft(
        SftConfig.model_validate(
            {
                "actor": {"model_name_or_path": model, "adam": {"lr": 1e-3}},
                "data": {"prompt_dataset": counting, "max_len": 256},
                "train": {"batch_size": 16, "max_steps": 6},
                "ds": {"param_dtype": "fp32", "zero_stage": 2},
                "ckpt": {"output_dir": str(tmp_path / "sft")},
            }
        )
    )
    losses = [line["policy/loss"] for line in read_metrics(tmp_path / "sft")]
    assert losses[-1] < losses[0] - 0.5, losses
    warm = str(tmp_path / "sft" / "model")
    evaluate(
        EvalConfig.model_validate(
            {
                "actor": {"model_name_or_path": warm},
                "eval": {"dataset": counting.replace("256", "32"), "n_samples_per_prompt": 2},
                "data": {"max_len": 256},
                "reward": {"functions": {"exact": 1.0}},
                "rollout": {"max_new_tokens": 6},
                "vllm": {"cpu_kv_cache_gib": 0.25},
                "ds": {"param_dtype": "fp32"},
                "ckpt": {"output_dir": str(tmp_path / "eval")},
            }
        )
    )
    found = read_metrics(tmp_path / "eval")[0]
    assert 0.0 <= found["eval/visual_math/pass@1"] <= found["eval/visual_math/pass@2"] <= 1.0
    train_rl(
        RlConfig.model_validate(
            {
                "actor": {"model_name_or_path": warm, "adam": {"lr": 1e-3}, "lr_scheduler": "constant"},
                "data": {"prompt_dataset": counting, "max_len": 256},
                "reward": {"functions": {"exact": 1.0}, "remote_url": digits_reward, "remote_weight": 0.1},
                "rollout": {"batch_size": 4, "n_samples_per_prompt": 4, "max_new_tokens": 6, "temperature": 0.7},
                "algo": {"kl": {"init_coef": 0.01, "use_loss": True, "estimator": "k3"}},
                "vllm": {"cpu_kv_cache_gib": 0.25},
                "train": {"batch_size": 8, "max_steps": 2, "colocate_actor_ref": True},
                "ds": {"param_dtype": "fp32"},
                "ckpt": {"output_dir": str(tmp_path / "rl")},
            }
        )
    )
    steps = [line for line in read_metrics(tmp_path / "rl") if "reward/mean" in line]
    assert steps[0]["kl/reference"] < 1e-6 < steps[1]["kl/reference"]
    assert {"reward/parts/exact", "reward/parts/digits"} <= steps[0].keys()
    assert all(line["sync/logprob_diff_max"] < 1e-3 for line in steps)
    assert (tmp_path / "rl" / "model" / "preprocessor_config.json").exists() or list(
        (tmp_path / "rl/model").glob("*processor*")
    )
