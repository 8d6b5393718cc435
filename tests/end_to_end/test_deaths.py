"""A role dies during a run: a single line names it, how its process ended and what to do."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import engine_core
from recipes import recipe

from vlmrl.cluster.build import RoleBuilder
from vlmrl.cluster.worker_group import WorkerGroup
from vlmrl.commands import run
from vlmrl.commands.rl import train_rl
from vlmrl.config.load import load
from vlmrl.config.verbs import RlConfig
from vlmrl.errors import ClusterError

pytestmark = pytest.mark.usefixtures("ray_session")

COUNTING = {
    "data.prompt_dataset": "visual_math?families=count&difficulty=1&pixels=56&size=64",
    "data.max_len": 128,
    "rollout.batch_size": 4,
    "rollout.n_samples_per_prompt": 4,
    "rollout.max_new_tokens": 6,
    "train.batch_size": 8,
    "train.max_steps": 200,
    "vllm.cpu_kv_cache_gib": 0.25,
    "eval.steps": -1,
    "eval.max_samples": 4,
    "ckpt.save_steps": -1,
}
"""Longer than any test waits: only the death ends the run."""
REWARD = """
def reward(completions, answer, **columns):
    print("scoring", len(completions), "for", answer[0])
    if len(completions) == 1 and len(completions[0]) % 2:
        raise ValueError("an odd number of letters")
    if len(completions) > 1 and any(len(text) % 2 for text in completions):
        raise ValueError("one of them is odd")
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]
"""
BY_SIGKILL = r"(was killed by signal 9 \(SIGKILL\)|ended without a message)"


def line_of_death(
    kill: Callable[[dict[str, WorkerGroup[Any]]], None],
    *,
    model: str,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    **flags: Any,
) -> str:
    """Run until `kill` ends a process after the first step; return the message of the error."""
    started: list[RoleBuilder] = []
    died: list[float] = []

    class Seen(RoleBuilder):
        def group(self, *given: Any, **options: Any) -> WorkerGroup[Any]:
            started.append(self)
            return super().group(*given, **options)

    def wait_and_kill() -> None:
        metrics = out / "metrics.jsonl"
        while not (metrics.exists() and '"policy/loss"' in metrics.read_text()):
            time.sleep(0.05)
        kill(started[0].groups)
        died.append(time.monotonic())

    monkeypatch.setattr(run, "RoleBuilder", Seen)
    threading.Thread(target=wait_and_kill, daemon=True).start()
    words = recipe("visual_math_tiny.yaml", model, out, **(COUNTING | flags))
    with pytest.raises(ClusterError) as error:
        train_rl(load(RlConfig, words))
    assert died, f"it ended before anybody was killed: {error.value}"
    assert time.monotonic() - died[0] < 30
    return str(error.value)


@pytest.mark.timeout(300)
def test_the_death_of_the_data_process_is_one_line_and_a_reward_that_fails_now_and_then_says_why(
    tmp_path: Path,
    tiny_model: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"

    def kill(groups: dict[str, WorkerGroup[Any]]) -> None:
        os.kill(groups["data"].pids[0], signal.SIGKILL)

    (tmp_path / "theirs.py").write_text(REWARD)
    flags = {
        "reward.functions": "{}",
        "reward.remote_url": tmp_path / "theirs.py:reward",
        "reward.max_failed_fraction": 1,
    }
    model = tiny_model("qwen2_5_vl", size="micro")
    message = line_of_death(kill, model=model, out=out, monkeypatch=monkeypatch, **flags)
    shown = capfd.readouterr()
    assert shown.err == "", "Ray's words are in the log"
    assert "(raylet)" not in shown.out
    assert "\n" not in message
    assert re.match(rf"data on \S+ {BY_SIGKILL}", message), message
    assert "lower --data.max_image_pixels" in message
    log = out / "logs" / "run.log"
    assert f"(output of Ray and libraries: {log})" in message
    assert "data on" in log.read_text()

    problem = r"ValueError: an odd number of letters \(\S*theirs\.py:5\)"
    reported = re.findall(
        rf"^reward: a response to visual_math:\d+ could not be scored: {problem}", shown.out, re.MULTILINE
    )
    assert len(reported) == 1, shown.out
    lines = [json.loads(line) for line in (out / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    for response in (response for line in lines for response in line["responses"]):
        is_odd = len(response["text"]) % 2 == 1
        assert response["failure"] == ("response" if is_odd else None)
        assert re.fullmatch(problem, response["problem"]) if is_odd else response["problem"] is None
    printed = (out / "logs" / "rewards.log").read_text().splitlines()
    assert any(re.fullmatch(r"scoring 4 for \d+", line) for line in printed), "a batch, but for those of the evaluation"


DEATHS = {
    "reward": ("reward on", {}),
    "vllm": ("vllm 1 of 2 on", {"vllm.num_engines": 2, "vllm.max_restarts": 0}),
    "engine core": ("vllm 1 of 2 on", {"vllm.num_engines": 2, "vllm.max_restarts": 0}),
    "actor": ("actor 1 of 2 on", {"actor.num_gpus_per_node": 2}),
    "ref": ("ref on", {"algo.kl.init_coef": 0.01}),
    "critic": ("critic on", {"algo.advantage.estimator": "gae", "train.colocate_all": "false"}),
}
"""Role that dies -> beginning of the line, and settings of the run."""


@pytest.mark.prove
@pytest.mark.timeout(300)
@pytest.mark.parametrize("who", DEATHS)
def test_the_death_of_any_role_is_one_line(
    who: str, tmp_path: Path, tiny_model: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(groups: dict[str, WorkerGroup[Any]]) -> None:
        worker = groups["vllm" if who == "engine core" else who].pids[-1]
        os.kill(engine_core(worker).pid if who == "engine core" else worker, signal.SIGKILL)

    begins, flags = DEATHS[who]
    model = tiny_model("qwen2_5_vl", size="micro")
    message = line_of_death(kill, model=model, out=tmp_path / "run", monkeypatch=monkeypatch, **flags)
    assert "\n" not in message
    assert message.startswith(begins), message
    if who == "engine core":
        assert "has died, its process was killed by signal 9 (SIGKILL)" in message, message
    else:
        assert re.search(BY_SIGKILL, message), message
    assert "lower --" in message
    assert ("the steps before it are saved: resume from" in message) is (who in ("vllm", "engine core"))
