"""The algorithms' recipes on the real stack, shortened: each raises a reward that a random model can learn in seconds,
and optional features show in its metrics."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from preferences import teach
from recipes import read_metrics, recipe, steps_of

from vlmrl.commands.rl import train_rl
from vlmrl.config.load import load
from vlmrl.config.verbs import RlConfig
from vlmrl.errors import RewardError
from vlmrl.models.value_head import value_net

pytestmark = pytest.mark.usefixtures("ray_session")

SHORT = {
    "reward.functions": "{}",
    "rollout.batch_size": 4,
    "rollout.n_samples_per_prompt": 4,
    "train.batch_size": 8,
    "eval.max_samples": 4,
}


def test_ppo_trains_a_critic_that_sees_with_the_actors_eyes_and_goes_on_where_it_stopped(
    tmp_path: Path, tiny_model: Callable[..., str], digits_reward: str
) -> None:
    out, model = tmp_path / "run", tiny_model("qwen2_5_vl")
    flags = SHORT | {
        "reward.remote_url": digits_reward,
        "actor.num_gpus_per_node": 2,
        "actor.adam.lr": 3e-3,
        "actor.freeze_visual_encoder": "true",
        "actor.freeze_projector": "true",
        "critic.freezing_steps": 1,
        "critic.save_value_network": "true",
        "train.enable_ema": "true",
        "train.max_steps": 4,
        "eval.steps": 2,
        "ckpt.save_steps": 2,
        "ckpt.best_metric_key": "eval/visual_math/reward",
    }
    train_rl(load(RlConfig, recipe("counting_tiny/ppo.yaml", model, out, **flags)))
    assert [path.name for path in sorted((out / "checkpoints/critic").iterdir())] == ["step_000002", "step_000004"]
    first = {line["step"]: line for line in read_metrics(out)}
    (out / "model").rename(tmp_path / "model_of_four_steps")
    train_rl(
        load(
            RlConfig,
            recipe(
                "counting_tiny/ppo.yaml", model, out, **(flags | {"train.max_steps": 6, "ckpt.load_enable": "true"})
            ),
        )
    )
    lines = {line["step"]: line for line in read_metrics(out)}
    assert lines.keys() == set(range(7))
    assert "policy/loss" not in lines[1], "on the first step the critic learns alone"
    assert lines[1]["verify/images/critic_effect"] > 1e-6, "the critic follows the images"
    for step in range(1, 7):
        line = lines[step]
        assert ("policy/loss" in line) == (step > 1)
        assert line["sync/logprob_diff_max"] < 1e-3
        names = {"loss", "grad_norm", "clip_fraction", "mean", "explained_variance"}
        assert {"time/value_s", *(f"value/{name}" for name in names)} <= line.keys()
        # Old log-probs, values, two updates of each of two models: a rank encodes each of four images at most once.
        assert line["vision/tower_calls"] <= 8
        assert line["vision/cache_hits"] > 0
        assert step > 4 or line == first[step], "what was there stays"
    critic = value_net(str(out / "critic"), dtype=torch.float32, attn_implementation="sdpa", head_seed=None)
    start = value_net(model, dtype=torch.float32, attn_implementation="sdpa", head_seed=42)
    assert not torch.equal(critic.score.weight, start.score.weight)
    assert (out / "model" / "config.json").exists()
    assert (out / "model_ema" / "config.json").exists()
    best = max((0, 2, 4, 6), key=lambda step: lines[step]["eval/visual_math/reward"])
    kept = json.loads((out / "best/best.json").read_text())
    assert (kept["step"], kept["value"]) == (best, lines[best]["eval/visual_math/reward"])
    assert (out / "best/config.json").exists()


MORE: dict[str, dict[str, Any]] = {
    "reinforce": {
        "algo.advantage.is_correction_enable": "true",
        "algo.advantage.is_correction_type": "icepop",
        "actor.dual_clip": 3,
        "actor.entropy_coef": 1e-3,
    },
    "rloo": {"algo.kl.target": 1e-4, "algo.kl.horizon": 1000},
    "group_norm": {"algo.kl.early_stop": 1e-9},
    "gspo": {"algo.advantage.is_correction_enable": "true", "algo.advantage.is_correction_type": "seq-mask-tis"},
    "cispo": {"train.max_epochs": 2},
    "dapo": {
        "data.prompt_dataset": "visual_math?families=count&difficulty=1&pixels=112&size=200",
        "actor.lr_warmup_ratio": 0.04,
        "train.max_steps": 30,
        "train.num_episodes": 1,
        "algo.dynamic_filtering_max_draws": 5,
    },
    "muon_ema": {
        "actor.muon.lr": 2e-2,
        "algo.kl.early_stop": 10,
        "eval.steps": 3,
        "ckpt.best_metric_key": "eval/visual_math/reward",
    },
}
"""Additional settings of some runs."""


PROVEN_AT_LENGTH = [
    *("reinforce", "reinforce_baseline", "rloo", "group_norm"),
    *("dr_grpo", "gspo", "cispo", "own_algorithm", "muon_ema"),
]
"""Run by `make prove` only: their formulas are covered by unit tests with hand-computed numbers."""


@pytest.mark.parametrize("name", ["dapo", *(pytest.param(name, marks=pytest.mark.prove) for name in PROVEN_AT_LENGTH)])
def test_each_algorithm_raises_the_reward_through_the_whole_stack(
    name: str, tmp_path: Path, tiny_model: Callable[..., str], digits_reward: str
) -> None:
    out = tmp_path / "run"
    reward = digits_reward.replace(":digits", ":soon_all_are_solved") if name == "dapo" else digits_reward
    flags = SHORT | {
        "actor.adam.lr": 3e-3,
        "reward.remote_url": reward,
        "rollout.batch_size": 8,
        "train.batch_size": 16,
        "train.max_steps": 6,
        "eval.steps": -1,
    }
    flags |= MORE.get(name, {})
    train_rl(load(RlConfig, recipe(f"counting_tiny/{name}.yaml", tiny_model("qwen2_5_vl"), out, **flags)))
    steps = steps_of(out)
    assert len(steps) == 6 or name == "dapo"
    assert all(line["sync/logprob_diff_max"] < 1e-3 for line in steps)
    rewards = [line["filter/reward_mean" if name == "dapo" else "reward/mean"] for line in steps]
    if name != "own_algorithm":  # whose spring holds the policy near for longer than this
        assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.1, rewards
    check = SHOWN.get(name)
    if check is not None:
        check(steps)
    if name == "dapo":
        # All prompts were solved: the run ends early, and saves everything that a complete run saves.
        assert 3 <= len(steps) < 30
        assert (out / "model/config.json").exists()
        assert [path.name for path in (out / "checkpoints").glob("step_*")] == [f"step_{len(steps):06d}"]
        assert max(line["step"] for line in read_metrics(out) if "eval/visual_math/pass@1" in line) == len(steps)
    if name == "muon_ema":
        assert (out / "model_ema/config.json").exists()
        assert (out / "best/best.json").exists()


def corrected(steps: list[dict[str, Any]]) -> None:
    # Engine and trainer agree, so the correction is computed but changes nothing.
    for line in steps:
        assert line["policy/correction_weight"] == pytest.approx(1.0, abs=1e-3)
        assert line["policy/correction_dropped"] == 0


def leashed(steps: list[dict[str, Any]]) -> None:
    coefficients = [line["kl/coef"] for line in steps]
    assert coefficients[-1] > coefficients[0], "the policy is further than its target"
    assert all("kl/reference" in line for line in steps)


def stopped(steps: list[dict[str, Any]]) -> None:
    # Of the two optimizer steps of a batch the first alone, which starts from the old policy itself. The very first has
    # a learning rate of 0.
    assert "policy/stopped_early" not in steps[0]
    for line in steps[1:]:
        assert line["policy/stopped_early"] == 1
        assert line["policy/kl_old"] < 1e-9


def filtered(steps: list[dict[str, Any]]) -> None:
    assert all(line["filter/groups_drawn"] >= 8 for line in steps)
    assert any(line["filter/kept_fraction"] < 1 for line in steps), "groups that are all right are drawn anew"
    assert all(line["reward/mean"] != line["filter/reward_mean"] for line in steps if line["filter/kept_fraction"] < 1)
    # Two optimizer steps a step, of 50 if all prompts were kept; over the first 2 of them the rate rises. The run is as
    # far as its prompts are, or its 30 steps.
    shares = [0.0]
    for number, line in enumerate(steps, start=1):
        drawn = sum(each["filter/groups_drawn"] for each in steps[:number])
        shares.append(max(drawn / 200, number / 30))
        places = [50 * share for share in (shares[-2], (shares[-2] + shares[-1]) / 2)]
        assert line["policy/lr"] == pytest.approx(3e-3 * sum(min(1.0, place / 2) for place in places) / 2)


SHOWN = {"reinforce": corrected, "gspo": corrected, "rloo": leashed, "group_norm": stopped, "dapo": filtered}


@pytest.fixture(scope="module")
def reward_model(tiny_model: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A reward model trained for some steps to prefer correct responses to visual_math's questions."""
    out = tmp_path_factory.mktemp("reward_model")
    teach(tiny_model("qwen2_5_vl"), out, steps=20, batch_size=8, lr=1e-3)
    return str(out)


@pytest.mark.prove
def test_a_reward_model_that_sees_drives_ppo(tmp_path: Path, tiny_model: Callable[..., str], reward_model: str) -> None:
    out = tmp_path / "run"
    flags = {
        "reward.model_name_or_path": reward_model,
        "actor.adam.lr": 3e-3,
        "critic.freezing_steps": 1,
        "rollout.batch_size": 8,
        "rollout.max_new_tokens": 4,
        "train.batch_size": 32,
        "train.max_steps": 16,
        "eval.steps": -1,
        "eval.max_samples": 4,
    }
    train_rl(load(RlConfig, recipe("counting_tiny/reward_model.yaml", tiny_model("qwen2_5_vl"), out, **flags)))
    steps = steps_of(out)
    rewards = [line["reward/mean"] for line in steps]
    # In units of the reward model's scale.
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.8, rewards
    assert read_metrics(out)[1]["verify/images/model_reward_effect"] > 1e-4, "the reward model follows the images"
    for line in steps:
        assert line["reward/mean"] == pytest.approx(line["reward/parts/model"], abs=1e-6)
        assert line["reward/parts/exact"] >= 0, "it is told, and pays nothing"
        assert line["sync/logprob_diff_max"] < 1e-3


def test_a_process_reward_model_alone_pays_the_steps_of_an_answer(
    tmp_path: Path, tiny_model: Callable[..., str], reward_model: str
) -> None:
    out = tmp_path / "run"
    flags = SHORT | {"train.max_steps": 2, "eval.steps": -1, "reward.process_weight": 0.5}
    flags |= {"reward.process_model_name_or_path": reward_model, "reward.process_separator": "1"}
    train_rl(load(RlConfig, recipe("counting_tiny/process_reward.yaml", tiny_model("qwen2_5_vl"), out, **flags)))
    for line in steps_of(out):
        assert 0 < line["reward/parts/process"] < 1
        assert line["reward/mean"] == pytest.approx(0.5 * line["reward/parts/process"], abs=1e-6)
        assert line["policy/grad_norm"] > 0
        assert line["sync/logprob_diff_max"] < 1e-3
    assert read_metrics(out)[0]["eval/visual_math/reward"] > 0


def test_critic_and_reward_model_learn_and_score_on_devices_of_their_own(
    tmp_path: Path, tiny_model: Callable[..., str], reward_model: str
) -> None:
    out = tmp_path / "run"
    flags = {
        "reward.model_name_or_path": reward_model,
        "train.colocate_all": "false",
        "train.colocate_critic_reward": "true",
        "ds.lora.rank": 8,
        "critic.freezing_steps": 1,
        "critic.save_value_network": "true",
        "rollout.batch_size": 4,
        "train.batch_size": 16,
        "train.max_steps": 2,
        "eval.steps": -1,
        "eval.max_samples": 4,
        "ckpt.save_steps": -1,
    }
    train_rl(load(RlConfig, recipe("counting_tiny/reward_model.yaml", tiny_model("qwen2_5_vl"), out, **flags)))
    lines = [line for line in read_metrics(out) if line["step"] > 0]
    assert ["policy/loss" in line for line in lines] == [False, True]
    for line in lines:
        assert line["value/grad_norm"] > 0
        assert line["sync/logprob_diff_max"] < 1e-3
    assert (out / "adapter/adapter_model.safetensors").exists()
    assert (out / "critic/adapter_model.safetensors").exists()


def test_what_was_learnt_outlives_an_evaluation_that_fails(tmp_path: Path, tiny_model: Callable[..., str]) -> None:
    out, file, mark = tmp_path / "run", tmp_path / "breaks.py", tmp_path / "training_has_begun"
    # The evaluation's questions are about rectangles.
    file.write_text(
        "from pathlib import Path\n\n"
        "def breaks(prompt, response):\n"
        f"    mark = Path({str(mark)!r})\n"
        "    if 'circles' in prompt:\n"
        "        mark.touch()\n"
        "    elif mark.exists():\n"
        "        raise RuntimeError('the scorer is gone')\n"
        "    return float(len(response))\n"
    )
    flags = SHORT | {
        "reward.remote_url": f"{file}:breaks",
        "eval.dataset": "visual_math?families=rectangle&difficulty=1&pixels=112&size=8",
        "eval.steps": -1,
        "train.max_steps": 1,
        "ckpt.save_steps": -1,
    }
    config = load(RlConfig, recipe("counting_tiny/group_norm.yaml", tiny_model("qwen2_5_vl"), out, **flags))
    with pytest.raises(RewardError, match=r"^evaluation after step 1, whose model is saved: .*the scorer is gone"):
        train_rl(config)
    assert (out / "model/config.json").exists()
    assert [line["step"] for line in read_metrics(out)] == [0, 1]
    assert (out / "checkpoints/step_000001/extra.json").exists()
