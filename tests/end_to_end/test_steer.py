"""The tiny Qwen2.5-VL learns to steer by a new picture in every turn, and the pictures are why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blind_steer import STEER
from recipes import read_metrics, recipe, steps_of

from vlmrl.commands.evaluate import evaluate
from vlmrl.commands.rl import train_rl
from vlmrl.commands.sft import train_sft
from vlmrl.config.load import load
from vlmrl.config.verbs import EvalConfig, RlConfig, SftConfig
from vlmrl.observe.episode_picture import draw_episode, longest_episode

BLIND = Path(__file__).with_name("blind_steer.py")
PASS_RATE = "eval/episodes/pass@1"
ENVIRONMENT = f"{STEER}:make_small"
DEMONSTRATIONS = f"demonstrations?environment={ENVIRONMENT}&size=40000"

pytestmark = pytest.mark.usefixtures("ray_session")


def warmed_up(model: str, out: Path, **flags: Any) -> str:
    """The model after supervised training on demonstrations."""
    words = recipe("steer_tiny_sft.yaml", model, out, **{"data.prompt_dataset": DEMONSTRATIONS}, **flags)
    train_sft(load(SftConfig, words))
    return str(out / "model")


def steered(model: str, out: Path, **flags: Any) -> list[float]:
    """Train on episodes; return the fraction of held-out episodes that reach the goal, for every evaluation."""
    words = recipe("steer_tiny.yaml", model, out, **{"train.agent_func_path": ENVIRONMENT}, **flags)
    train_rl(load(RlConfig, words))
    assert all(line["sync/logprob_diff_max"] < 1e-3 for line in steps_of(out))
    return [line[PASS_RATE] for line in read_metrics(out) if PASS_RATE in line]


def test_two_steps_with_images_in_every_turn(tmp_path: Path, tiny_model: Callable[..., str]) -> None:
    flags: dict[str, Any] = {
        "actor.adam.lr": 1e-3,
        "rollout.batch_size": 4,
        "rollout.n_samples_per_prompt": 4,
        "train.batch_size": 16,
        "train.max_steps": 2,
        "agent.max_turns": 5,
        "eval.max_samples": 4,
    }
    out = tmp_path / "run"
    steered(tiny_model("qwen2_5_vl"), out, **flags)
    steps = steps_of(out)
    assert len(steps) == 2
    for line in steps:
        assert line["sync/logprob_diff_max"] < 1e-4
        assert 2 < line["agent/turns_mean"] <= line["agent/turns_max"] <= 5
        assert line["agent/failed"] == line["agent/tool_calls"] == line["agent/timeouts"] == 0
        assert line["agent/stop/done"] + line["agent/stop/turns"] == pytest.approx(1.0)
        assert line["vision/tower_calls"] > 0
    transcript = out / "rollouts" / "step_000001.jsonl"
    records = [json.loads(line) for line in transcript.read_text().splitlines()]
    assert [len(record["responses"]) for record in records] == [4] * 4
    for record in records:
        for response in record["responses"]:
            roles = [message["role"] for message in response["messages"]]
            assert roles == (["assistant", "user"] * 5)[: len(roles)]
            assert roles[-1] == "assistant"
            images = [*record["images"], *(name for message in response["messages"] for name in message["images"])]
            assert len(images) == roles.count("assistant")
            assert all((out / "rollouts" / "media" / f"{name}.png").exists() for name in images)
    picture = tmp_path / "episode.png"
    draw_episode(*longest_episode(transcript), media=out / "rollouts" / "media", out=picture)
    assert picture.stat().st_size > 2_000


@pytest.mark.prove
@pytest.mark.timeout(3600)
def test_the_policy_steers_by_the_pictures_of_all_turns(tmp_path: Path, tiny_model: Callable[..., str]) -> None:
    warm = warmed_up(tiny_model("qwen2_5_vl"), tmp_path / "sft")
    out = tmp_path / "rl"
    rates = steered(warm, out)
    assert rates[-1] >= 0.8, rates
    assert rates[-1] > rates[0] + 0.1, rates
    sighted, stale, blind = (
        evaluated(str(out / "model"), tmp_path / make, environment)
        for make, environment in (
            ("make_small", ENVIRONMENT),
            ("first_picture", f"{BLIND}:first_picture"),
            ("constant_picture", f"{BLIND}:constant_picture"),
        )
    )
    assert sighted >= 0.8
    assert stale <= sighted - 0.2
    # Random moves reach the goal in 13 % of the episodes.
    assert blind <= 0.3


def evaluated(model: str, out: Path, environment: str) -> float:
    """The fraction of held-out episodes that reach the goal."""
    config = {
        "actor": {"model_name_or_path": model},
        "agent": {"max_turns": 12, "max_images": 12, "context_len": 768},
        "eval": {"dataset": "episodes?size=200", "temperature": 1.0},
        "data": {"max_len": 256},
        "rollout": {"max_new_tokens": 6},
        "train": {"agent_func_path": environment},
        "vllm": {"cpu_kv_cache_gib": 0.5},
        "ds": {"param_dtype": "fp32"},
        "ckpt": {"output_dir": str(out)},
    }
    evaluate(EvalConfig.model_validate(config))
    (metrics,) = read_metrics(out)
    return float(metrics[PASS_RATE])
