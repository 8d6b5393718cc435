"""Adapters in complete runs: engines get the adapter, alone or merged, and the base does not change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recipes import recipe, steps_of

from vlmrl.commands.rl import train_rl
from vlmrl.commands.sft import train_sft
from vlmrl.config.load import load
from vlmrl.config.stages import SftConfig
from vlmrl.config.verbs import RlConfig

pytestmark = pytest.mark.usefixtures("ray_session")

TASKS = {"qwen3": "arithmetic?difficulty=1&size=256"}
COUNTING = "visual_math?families=count&difficulty=1&pixels=56&size=256"

LORA = {"rank": 8, "alpha": 32}


@pytest.fixture(scope="module")
def settings(digits_reward: str, tiny_model: Callable[..., str]) -> Callable[..., dict[str, Any]]:
    """`settings(family, out, ds=...)`: a run of a tiny model that learns to respond in digits."""

    def build(family: str, out: Path, size: str = "tiny", **changes: dict[str, Any]) -> dict[str, Any]:
        config: dict[str, dict[str, Any]] = {
            "actor": {
                "model_name_or_path": tiny_model(family, size=size),
                "adam": {"lr": 1e-2},
                "lr_scheduler": "constant",
            },
            "data": {"prompt_dataset": TASKS.get(family, COUNTING), "max_len": 160},
            "reward": {"functions": {}, "remote_url": digits_reward},
            "rollout": {"batch_size": 8, "n_samples_per_prompt": 8, "max_new_tokens": 6},
            "train": {"batch_size": 64, "max_steps": 10, "colocate_all": True},
            "ds": {"param_dtype": "fp32", "lora": LORA},
            "vllm": {"cpu_kv_cache_gib": 0.25},
            "ckpt": {"output_dir": str(out)},
        }
        for section, values in changes.items():
            config[section] = config.get(section, {}) | values
        return config

    return build


def num_trained(folder: Path) -> int:
    rows = [line.split("\t") for line in (folder / "parameters.tsv").read_text().splitlines()[1:]]
    return sum(int(row[1]) for row in rows)


@pytest.mark.parametrize(
    ("family", "four_bit", "stage"),
    # Half of the twelve combinations: covers all pairs of family, 4 bits and stage.
    [
        ("qwen2_5_vl", True, 2),
        pytest.param("qwen2_5_vl", False, 3, marks=pytest.mark.prove),
        pytest.param("qwen3", False, 2, marks=pytest.mark.prove),
        pytest.param("qwen3", True, 3, marks=pytest.mark.prove),
        pytest.param("qwen3_vl", False, 2, marks=pytest.mark.prove),
        pytest.param("qwen3_vl", True, 3, marks=pytest.mark.prove),
    ],
)
def test_the_reward_rises_on_two_ranks_and_two_engines(
    family: str, four_bit: bool, stage: int, tmp_path: Path, digits_reward: str, tiny_model: Callable[..., str]
) -> None:
    flags = {
        "actor.num_gpus_per_node": 2,
        "actor.adam.lr": 1e-2,
        "actor.lr_scheduler": "constant",
        "data.prompt_dataset": TASKS.get(family, COUNTING),
        "eval.dataset": TASKS.get(family, COUNTING),
        "eval.max_samples": 8,
        "reward.functions": "{}",
        "reward.remote_url": digits_reward,
        "rollout.batch_size": 8,
        "train.batch_size": 64,
        "train.max_steps": 10,
        "ds.zero_stage": stage,
        "vllm.num_engines": 2,
    }
    example = "visual_math_tiny/qlora.yaml" if four_bit else "visual_math_tiny/lora.yaml"
    train_rl(load(RlConfig, recipe(example, tiny_model(family), tmp_path / "run", **flags)))
    steps = steps_of(tmp_path / "run")
    rewards = [line["reward/mean"] for line in steps]
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.1, rewards
    # Every trained number is sent, and nothing else: as fp32, four bytes each.
    sent = 4.0 * num_trained(tmp_path / "run")
    for version, line in enumerate(steps, start=1):
        assert line["sync/logprob_diff_max"] < 1e-3
        assert line["sync/bytes"] == line["sync/adapter_bytes"] == sent
        assert line["sync/version"] == version
        assert line["verify/adapters/base_gap"] < 1e-4
        assert line["verify/adapters/gap"] < 1e-4
    assert steps[-1]["verify/adapters/effect"] > 1e-2
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").exists()
    assert not (tmp_path / "run" / "model").exists()


def test_on_the_models_own_weights_the_gap_of_the_bases_is_shown_and_nothing_is_sent_but_adapters(
    tmp_path: Path, settings: Callable[..., dict[str, Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    config = settings(
        "qwen2_5_vl",
        tmp_path / "run",
        size="micro",
        ds={"load_in_4bit": True},
        vllm={"qlora_base": "original"},
        algo={"kl": {"init_coef": 0.01, "use_loss": True, "estimator": "k3"}},
        train={"batch_size": 64, "max_steps": 2},
    )
    train_rl(RlConfig.model_validate(config))
    shown = capfd.readouterr().out
    assert "ref " not in shown, "the reference is the policy without its adapters: no separate model is placed"
    assert "vllm.qlora_base original" in shown
    steps = steps_of(tmp_path / "run")
    for line in steps:
        assert line["verify/adapters/base_gap"] > 1e-4, "4 bits are not the original"
        assert line["sync/logprob_diff_mean"] > 1e-4
        assert line["sync/bytes"] == line["sync/adapter_bytes"]
    # With an adapter of zeros, reference and policy are the same function.
    assert steps[0]["kl/reference"] < 1e-9 < steps[1]["kl/reference"]


def test_an_adapter_from_supervised_training_goes_on_to_learn_in_the_tower_by_merged_weights(
    tmp_path: Path, settings: Callable[..., dict[str, Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    lora = {"lora": {"rank": 4, "target_modules": ["all"]}}
    warm = settings("qwen2_5_vl", tmp_path / "sft", size="micro", ds=lora)
    supervised = {name: warm[name] for name in ("actor", "data", "ds", "ckpt")} | {"train": {"batch_size": 8}}
    supervised["train"]["max_steps"] = 4
    train_sft(SftConfig.model_validate(supervised))
    losses = [line["policy/loss"] for line in steps_of(tmp_path / "sft")]
    assert losses[-1] < losses[0], losses

    def config(steps: int, **ckpt: Any) -> RlConfig:
        options = settings(
            "qwen2_5_vl",
            tmp_path / "rl",
            size="micro",
            actor={"adapter_name_or_path": str(tmp_path / "sft" / "adapter")},
            ds=lora,
            train={"max_steps": steps},
            ckpt={"save_steps": 1} | ckpt,
        )
        return RlConfig.model_validate(options)

    train_rl(config(2))
    assert (
        "merged in, because vLLM does not apply adapters of the vision tower and projector exactly"
        in capfd.readouterr().out
    )
    train_rl(config(3, load_enable=True))
    steps = steps_of(tmp_path / "rl")
    assert [line["step"] for line in steps] == [1, 2, 3]
    for line in steps:
        assert "sync/adapter_bytes" not in line
        assert line["verify/adapters/gap"] < 1e-4 < line["verify/adapters/effect"]
        assert line["sync/logprob_diff_max"] < 1e-3
    assert (tmp_path / "rl" / "adapter" / "adapter_config.json").exists()
