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
from vlmrl.config.stages import SftConfig
from vlmrl.config.verbs import EvalConfig, RlConfig
from vlmrl.observe.episode_picture import draw_episode, longest_episode

BLIND = Path(__file__).with_name("blind_steer.py")
PASS_RATE = "eval/episodes/pass@1"
ENVIRONMENT = f"{STEER}:make_small"
AGENT = str(STEER.with_name("steer_openai.py"))
DEMONSTRATIONS = f"demonstrations?environment={ENVIRONMENT}&size=40000"

pytestmark = pytest.mark.usefixtures("ray_session")


def warmed_up(model: str, out: Path, **flags: Any) -> str:
    """The model after supervised training on demonstrations."""
    words = recipe("steer_tiny_sft.yaml", model, out, **{"data.prompt_dataset": DEMONSTRATIONS}, **flags)
    train_sft(load(SftConfig, words))
    return str(out / "model")


def steered(model: str, out: Path, *, overlay: str | None = None, **flags: Any) -> list[float]:
    """Train on episodes; return the fraction of held-out episodes that reach the goal, for every evaluation."""
    name = f"steer_tiny/{overlay}.yaml" if overlay else "steer_tiny.yaml"
    return rates_of(name, model, out, **{"train.agent_func_path": ENVIRONMENT}, **flags)


def rates_of(name: str, model: str, out: Path, **flags: Any) -> list[float]:
    """Train by a recipe; see `steered`."""
    train_rl(load(RlConfig, recipe(name, model, out, **flags)))
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


def test_adapters_on_four_bits_and_a_critic_learn_from_conversations_on_two_ranks(
    tmp_path: Path, tiny_model: Callable[..., str]
) -> None:
    flags: dict[str, Any] = {
        "actor.adam.lr": 1e-3,
        "actor.num_gpus_per_node": 2,
        "vllm.num_engines": 2,
        "ds.load_in_4bit": True,
        "ds.lora.rank": 8,
        "critic.freezing_steps": -1,
        "rollout.batch_size": 4,
        "rollout.n_samples_per_prompt": 3,
        "train.batch_size": 12,
        "train.max_steps": 2,
        "agent.max_turns": 4,
        "eval.max_samples": 2,
    }
    out = tmp_path / "run"
    steered(tiny_model("qwen2_5_vl"), out, overlay="ppo", **flags)
    steps = steps_of(out)
    assert [line["sync/version"] for line in steps] == [1, 2]
    for line in steps:
        assert line["agent/failed"] == 0
        assert line["agent/turns_mean"] > 2
        assert line["policy/grad_norm"] > 0
        assert line["value/grad_norm"] > 0
    records = [json.loads(line) for line in (out / "rollouts" / "step_000002.jsonl").read_text().splitlines()]
    assert {version for record in records for one in record["responses"] for version in one["versions"]} == {1}


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., str]) -> str:
    """The tiny model after the recipe's warm-up."""
    return warmed_up(tiny_model("qwen2_5_vl"), tmp_path_factory.mktemp("sft"))


@pytest.mark.prove
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("overlay", ["lora", "ppo"])
def test_adapters_and_ppo_learn_to_steer_as_well(overlay: str, warm: str, tmp_path: Path) -> None:
    rates = steered(warm, tmp_path / "rl", overlay=overlay)
    assert rates[-1] >= 0.8, rates
    assert rates[-1] > rates[0] + 0.1, rates


@pytest.mark.prove
@pytest.mark.timeout(3600)
def test_an_agent_with_a_client_of_its_own_learns_to_steer_as_well(warm: str, tmp_path: Path) -> None:
    """Behind the gateway, in 40 of the recipe's 80 steps."""
    flags = {"train.agent_func_path": AGENT, "train.max_steps": 40}
    rates = rates_of("gateway_tiny.yaml", warm, tmp_path / "rl", **flags)
    assert rates[-1] >= 0.75, rates
    assert rates[-1] > rates[0] + 0.1, rates


@pytest.mark.prove
@pytest.mark.timeout(3600)
def test_the_policy_steers_by_the_pictures_of_all_turns(warm: str, tmp_path: Path) -> None:
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
