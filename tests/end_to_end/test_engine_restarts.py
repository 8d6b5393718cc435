"""Engines that die are started again with the current weights, and the run goes on with the same tokens."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import engine_core
from recipes import recipe, steps_of
from test_deaths import COUNTING

from vlmrl.cluster.build import RoleBuilder
from vlmrl.cluster.worker_group import WorkerGroup
from vlmrl.commands import run
from vlmrl.commands.rl import train_rl
from vlmrl.config.load import load
from vlmrl.config.verbs import RlConfig
from vlmrl.errors import EngineLossError

pytestmark = pytest.mark.usefixtures("ray_session")

SHORT = COUNTING | {"train.max_steps": 4, "actor.adam.lr": 1e-3, "ds.param_dtype": "fp32"}
ADAPTERS = {"ds.load_in_4bit": "true", "ds.lora.rank": 4, "ds.lora.target_modules": "all-linear", "vllm.num_engines": 2}
AHEAD = {"train.colocate_all": "false", "train.async_enable": "true", "algo.advantage.is_correction_enable": "true"}


class Killer:
    """Kills processes of engines once the run's first steps are finished."""

    def __init__(self, out: Path, monkeypatch: pytest.MonkeyPatch, victims: list[tuple[int, int, str]]) -> None:
        """`victims`: (finished steps, number of the engine, its `worker` or its `core`), in order."""
        self.killed: list[int] = []
        builders: list[RoleBuilder] = []

        class Seen(RoleBuilder):
            def group(self, *given: Any, **options: Any) -> WorkerGroup[Any]:
                builders.append(self)
                return super().group(*given, **options)

        def watch() -> None:
            for steps, engine, part in victims:
                while not (out / "metrics.jsonl").exists() or len(steps_of(out)) < steps:
                    time.sleep(0.02)
                worker = builders[0].groups["vllm"].pids[engine]
                killed = engine_core(worker).pid if part == "core" else worker
                os.kill(killed, signal.SIGKILL)
                self.killed.append(killed)

        monkeypatch.setattr(run, "RoleBuilder", Seen)
        self.thread = threading.Thread(target=watch, daemon=True)
        self.thread.start()


def train(model: str, out: Path, **flags: Any) -> list[dict[str, Any]]:
    train_rl(load(RlConfig, recipe("visual_math_tiny.yaml", model, out, **(SHORT | flags))))
    return steps_of(out)


def responses(out: Path, step: int) -> list[tuple[int, list[str]]]:
    lines = (out / f"rollouts/step_{step:06d}.jsonl").read_text().splitlines()
    return [(group["index"], [r["text"] for r in group["responses"]]) for group in map(json.loads, lines)]


@pytest.mark.timeout(400)
def test_a_run_with_adapters_goes_on_with_the_same_tokens_when_its_engines_die(
    tmp_path: Path, tiny_model: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model("qwen2_5_vl", size="micro")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected = train(model, whole, **ADAPTERS)
    killer = Killer(broken, monkeypatch, [(1, 1, "worker"), (2, 0, "core")])
    actual = train(model, broken, **ADAPTERS)
    assert len(killer.killed) == 2
    shown = " ".join(capfd.readouterr().out.split())
    assert "vllm 1 of 2 on" in shown
    assert "it is started again (1 of vllm.max_restarts 3)" in shown
    assert "its process was killed by signal 9 (SIGKILL)" in shown
    assert "it is started again (2 of vllm.max_restarts 3)" in shown
    assert actual[-1]["cluster/engine_restarts"] == 2
    assert [line["cluster/engine_restarts"] for line in expected] == [0.0] * 4
    for step in range(1, 5):
        assert responses(broken, step) == responses(whole, step), step
    for one, other in zip(expected, actual, strict=True):
        for name in ("reward/mean", "policy/loss", "policy/grad_norm"):
            assert other[name] == pytest.approx(one[name], rel=1e-5, abs=1e-5), name
        assert other["sync/logprob_diff_max"] < 1e-4


@pytest.mark.prove
@pytest.mark.timeout(300)
def test_an_asynchronous_run_goes_on_when_its_only_engine_dies_and_stops_when_it_dies_too_often(
    tmp_path: Path, tiny_model: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = tiny_model("qwen2_5_vl", size="micro"), tmp_path / "run"
    killer = Killer(out, monkeypatch, [(1, 0, "worker"), (3, 0, "core")])
    with pytest.raises(EngineLossError) as error:
        train(model, out, **AHEAD, **{"vllm.max_restarts": 1, "train.max_steps": 200})
    assert len(killer.killed) == 2
    message = str(error.value)
    assert "was killed by signal 9" in message
    assert "this came after 1 restart (vllm.max_restarts 1)" in message
    lines = steps_of(out)
    # The step in which the engine dies once more ends without a sync, which reports it.
    assert next(count for line in lines[::-1] if (count := line.get("cluster/engine_restarts"))) == 1
    assert [index for step in range(1, len(lines) + 1) for index, _ in responses(out, step)] == list(
        range(4 * len(lines))
    )
    compared = [line["sync/logprob_diff_max"] for line in lines if "sync/logprob_diff_max" in line]
    assert max(compared) < 1e-3
    assert len(compared) >= len(lines) - 2, "a step in which the engine dies may not be compared"
    assert f"resume from {out / 'checkpoints' / f'step_{len(lines):06d}'}" in message

    resumed = {"ckpt.load_enable": "true", "train.max_steps": len(lines) + 1}
    assert len(train(model, out, **AHEAD, **resumed)) == len(lines) + 1
