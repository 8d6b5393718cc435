"""The algorithms' recipes on the real stack, shortened: PPO with a critic, and with a reward model, until something is
learnt; of the others two steps each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from preferences import teach
from recipes import read_metrics, recipe, steps_of

from vlmrl.config.load import load
from vlmrl.config.run import RlConfig
from vlmrl.models.value_head import value_net
from vlmrl.run import train_rl

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
    train_rl(load(RlConfig, recipe("ppo_tiny.yaml", model, out, **flags)))
    assert [path.name for path in sorted((out / "checkpoints/critic").iterdir())] == ["step_000002", "step_000004"]
    first = {line["step"]: line for line in read_metrics(out)}
    (out / "model").rename(tmp_path / "model_of_four_steps")
    train_rl(
        load(
            RlConfig,
            recipe("ppo_tiny.yaml", model, out, **(flags | {"train.max_steps": 6, "ckpt.load_enable": "true"})),
        )
    )
    lines = {line["step"]: line for line in read_metrics(out)}
    assert lines.keys() == set(range(7))
    assert "policy/loss" not in lines[1], "on the first step the critic learns alone"
    assert lines[1]["sight/critic_care"] > 1e-6, "the critic follows the images"
    for step in range(1, 7):
        line = lines[step]
        assert ("policy/loss" in line) == (step > 1)
        assert line["sync/logprob_diff_max"] < 1e-3
        assert {"value/loss", "value/grad_norm", "value/clip_fraction", "value/mean", "time/value_s"} <= line.keys()
        # Old log-probs, values, two updates of each of two models: a rank looks at each of four images once at most.
        assert line["vision/tower_calls"] <= 8
        assert line["vision/cache_hits"] > 0
        assert step > 4 or line == first[step], "what was there stays"
    critic = value_net(str(out / "critic"), dtype=torch.float32, attn_implementation="sdpa", head_seed=None)
    start = value_net(model, dtype=torch.float32, attn_implementation="sdpa", head_seed=42)
    assert not torch.equal(critic.score.weight, start.score.weight)
    assert (out / "model" / "config.json").exists()
    assert (out / "model_ema" / "config.json").exists()
    best = max((2, 4, 6), key=lambda step: lines[step]["eval/visual_math/reward"])
    assert (out / "best").exists(), best


@pytest.mark.parametrize(
    "name",
    ["reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo", "gspo", "cispo", "dapo", "own_algorithm"],
)
def test_each_algorithm_runs_through_the_whole_stack(
    name: str, tmp_path: Path, tiny_model: Callable[..., str], digits_reward: str
) -> None:
    out = tmp_path / "run"
    flags = SHORT | {"reward.remote_url": digits_reward, "train.max_steps": 2, "eval.steps": -1}
    train_rl(load(RlConfig, recipe(f"{name}_tiny.yaml", tiny_model("qwen2_5_vl"), out, **flags)))
    steps = steps_of(out)
    assert len(steps) == 2
    assert all(line["sync/logprob_diff_max"] < 1e-3 for line in steps)
    # A step whose answers are all worth the same has nothing to teach.
    assert any(line["policy/grad_norm"] > 0 for line in steps)


@pytest.fixture(scope="module")
def judge(tiny_model: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A reward model that has learnt for some steps which answers to visual_math's questions are right."""
    out = tmp_path_factory.mktemp("judge")
    teach(tiny_model("qwen2_5_vl"), out, steps=20, batch_size=8, lr=1e-3)
    return str(out)


def test_a_reward_model_that_sees_drives_ppo(tmp_path: Path, tiny_model: Callable[..., str], judge: str) -> None:
    out = tmp_path / "run"
    flags = {
        "reward.model_name_or_path": judge,
        "actor.adam.lr": 3e-3,
        "critic.freezing_steps": 1,
        "rollout.batch_size": 8,
        "rollout.max_new_tokens": 4,
        "train.batch_size": 32,
        "train.max_steps": 16,
        "eval.steps": -1,
        "eval.max_samples": 4,
    }
    train_rl(load(RlConfig, recipe("reward_model_tiny.yaml", tiny_model("qwen2_5_vl"), out, **flags)))
    steps = steps_of(out)
    rewards = [line["reward/mean"] for line in steps]
    # In units of the reward model's own scale.
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.8, rewards
    assert read_metrics(out)[1]["sight/model_reward_care"] > 1e-4, "the reward model follows the images"
    for line in steps:
        assert line["reward/mean"] == pytest.approx(line["reward/parts/model"], abs=1e-6)
        assert line["reward/parts/exact"] >= 0, "it is told, and pays nothing"
        assert line["sync/logprob_diff_max"] < 1e-3


def test_a_process_reward_model_pays_the_steps_of_an_answer(
    tmp_path: Path, tiny_model: Callable[..., str], judge: str, digits_reward: str
) -> None:
    out = tmp_path / "run"
    flags = SHORT | {"reward.remote_url": digits_reward, "train.max_steps": 2, "eval.steps": -1}
    flags |= {"reward.process_model_name_or_path": judge, "reward.process_separator": "1"}
    train_rl(load(RlConfig, recipe("process_reward_tiny.yaml", tiny_model("qwen2_5_vl"), out, **flags)))
    for line in steps_of(out):
        assert 0 < line["reward/parts/process"] < 1
        assert line["policy/grad_norm"] > 0
        assert line["sync/logprob_diff_max"] < 1e-3
