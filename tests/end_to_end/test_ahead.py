"""Asynchronous runs on the real stack: they learn, versions are exact, a killed run goes on with the same tokens."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recipes import recipe, steps_of
from test_resume import RAY_AGENTS, assert_nothing_is_left, begun, read_metrics

from vlmrl.commands.rl import train_rl
from vlmrl.config.load import load
from vlmrl.config.verbs import RlConfig

PER_STEP = 8


def transcripts(out: Path, steps: int) -> list[list[dict[str, Any]]]:
    """Return the groups of each step."""
    files = [out / f"rollouts/step_{step:06d}.jsonl" for step in range(1, steps + 1)]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize(("queue", "partial"), [(1, False), (2, True)])
def test_the_reward_rises_and_versions_are_exact(
    queue: int, partial: bool, tmp_path: Path, tiny_model: Callable[..., str], digits_reward: str
) -> None:
    steps = 8
    flags = {
        "actor.adam.lr": 3e-3,
        "reward.functions": "{}",
        "reward.remote_url": digits_reward,
        "rollout.batch_size": PER_STEP,
        "rollout.max_new_tokens": 24 if partial else 8,
        "train.batch_size": 64,
        "train.max_steps": steps,
        "train.async_queue_size": queue,
        "train.partial_rollout_enable": str(partial).lower(),
        "eval.max_samples": 8,
        "eval.steps": 4,
    }
    train_rl(load(RlConfig, recipe("async_tiny.yaml", tiny_model("qwen2_5_vl"), tmp_path, **flags)))
    lines = steps_of(tmp_path)
    rewards = [line["reward/mean"] for line in lines]
    assert len(rewards) == steps
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.1, rewards
    for number, line in enumerate(lines):
        assert line["sync/logprob_diff_max"] < 1e-3, "an engine with the current weights agrees with the trainer"
        assert line["is/mean"] == pytest.approx(1.0, abs=0.2)
        assert 0 < line["is/ess"] <= 1.0 + 1e-6
        assert line["async/staleness_max"] <= min(queue, number)
        if not partial:
            assert line["async/staleness_mean"] == min(queue, number)
    groups = transcripts(tmp_path, steps)
    assert [[group["index"] for group in step] for step in groups] == [
        list(range(PER_STEP * step, PER_STEP * (step + 1))) for step in range(steps)
    ]


def command(model: str, out: Path, reward: str) -> list[str]:
    """`reward`: a function that gives responses of a random model different rewards, so that it learns."""
    flags = {
        "actor.model_name_or_path": model,
        "actor.adam.lr": "1e-3",
        "data.prompt_dataset": "visual_math?families=count&difficulty=1&pixels=56&size=64",
        "data.max_len": "128",
        "reward.functions": "{}",
        "reward.remote_url": reward,
        "algo.advantage.is_correction_enable": "true",
        "rollout.batch_size": "4",
        "rollout.n_samples_per_prompt": "4",
        "rollout.max_new_tokens": "6",
        "train.batch_size": "8",
        "train.max_steps": "6",
        "train.async_enable": "true",
        "ds.param_dtype": "fp32",
        "vllm.cpu_kv_cache_gib": "0.25",
        "ckpt.save_steps": "1",
        "ckpt.max_num": "20",
        "ckpt.output_dir": str(out),
    }
    return [
        sys.executable,
        "-m",
        "vlmrl",
        "rl",
        *(word for name, value in flags.items() for word in (f"--{name}", value)),
    ]


@pytest.mark.prove
@pytest.mark.timeout(600)
def test_a_killed_run_goes_on_with_the_tokens_of_an_unbroken_one(
    tmp_path: Path, tiny_model: Callable[..., str], digits_reward: str
) -> None:
    model = tiny_model("qwen2_5_vl", size="micro")
    unbroken, broken, log = tmp_path / "unbroken", tmp_path / "broken", tmp_path / "log"
    subprocess.run(command(model, unbroken, digits_reward), check=True, timeout=240, stdout=subprocess.DEVNULL)
    victim, mark = begun(command(model, broken, digits_reward), broken, log, until=3)
    time.sleep(0.1)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert_nothing_is_left(mark, within_s=20, but=RAY_AGENTS)
    subprocess.run(
        [*command(model, broken, digits_reward), "--ckpt.load_enable"],
        check=True,
        timeout=240,
        stdout=subprocess.DEVNULL,
    )

    for one, other in zip(transcripts(unbroken, 6), transcripts(broken, 6), strict=True):
        for group, same in zip(one, other, strict=True):
            assert group["index"] == same["index"]
            assert [r["text"] for r in group["responses"]] == [r["text"] for r in same["responses"]]
    expected, actual = read_metrics(unbroken), read_metrics(broken)
    for step in range(1, 7):
        assert expected[step]["policy/grad_norm"] > 0.0, "the weights do not change"
        for name in ("reward/mean", "policy/loss", "policy/grad_norm", "is/mean", "async/staleness_mean"):
            assert actual[step][name] == pytest.approx(expected[step][name], rel=1e-5, abs=1e-5), (step, name)
