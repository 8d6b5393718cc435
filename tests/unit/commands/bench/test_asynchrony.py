"""The rows and settings of the runs that `vlmrl bench async` measures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vlmrl.commands.bench.asynchrony import pin, run_settings, steps_of, write_rows
from vlmrl.commands.bench.parity_reward import reward_func
from vlmrl.commands.bench.speedup import SYNCHRONOUS, Mode, modes
from vlmrl.config.bench_verbs import AsyncBench
from vlmrl.config.load import load

DRAINED = Mode(2, partial=False)


def bench(**flags: Any) -> AsyncBench:
    given = {"actor.model_name_or_path": "m", "ds.param_dtype": "fp32"} | flags
    return load(AsyncBench, [word for name, value in given.items() for word in (f"--{name}", str(value))])


def rows_of(config: AsyncBench, folder: Path) -> list[dict[str, Any]]:
    write_rows(folder / "rows.jsonl", config)
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def test_the_rows_are_enough_for_the_longest_mode(tmp_path: Path) -> None:
    config = bench(**{"rollout.batch_size": 3, "bench.step_s": 0.5, "bench.turns": 2})
    # Q = 2: four steps while the queue fills, six that are measured, two at the end.
    assert steps_of(DRAINED, config.bench) == 12
    rows = rows_of(config, tmp_path)
    assert len(rows) == 12 * 3
    assert {(row["step_s"], row["turns"], row["response_tokens"]) for row in rows} == {(0.5, 2, 16)}


def test_a_long_tail_is_log_normal(tmp_path: Path) -> None:
    config = bench(**{"rollout.batch_size": 256, "bench.workload": "long_tail", "bench.response_tokens": 100})
    lengths = np.array([row["response_tokens"] for row in rows_of(config, tmp_path)])
    assert np.median(lengths) == pytest.approx(100, rel=0.1)
    assert np.log(lengths).std() == pytest.approx(1.0, rel=0.1)
    assert lengths.max() <= 1600
    assert run_settings(config, SYNCHRONOUS, tmp_path / "rows.jsonl").rollout.max_new_tokens == 1600
    assert lengths.tolist() == [row["response_tokens"] for row in rows_of(config, tmp_path)], "equal in every run"


@pytest.mark.parametrize("mode", modes((1, 2)))
@pytest.mark.parametrize("workload", ["environment", "long_tail", "equal_lengths"])
def test_the_runs_differ_only_in_how_they_are_asynchronous(workload: str, mode: Mode, tmp_path: Path) -> None:
    config = bench(**{"bench.workload": workload, "rollout.batch_size": 8, "train.seed": 5})
    settings, synchronous = (run_settings(config, each, tmp_path / "rows.jsonl") for each in (mode, SYNCHRONOUS))
    train = settings.train
    assert (train.queue_size, train.partial_rollout_enable) == mode
    assert (train.batch_size, train.seed) == (8 * 4, 5)
    assert settings.has_agent is (workload == "environment")
    changed = {"async_enable": False, "async_queue_size": 1, "partial_rollout_enable": False}
    assert settings.model_copy(update={"train": train.model_copy(update=changed)}) == synchronous


def test_an_environment_may_take_longer_than_the_limits_of_a_run(tmp_path: Path) -> None:
    config = bench(**{"bench.step_s": 100.0, "bench.turns": 20})
    agent = run_settings(config, SYNCHRONOUS, tmp_path / "rows.jsonl").agent
    assert (agent.step_limit_s, agent.episode_limit_s) == (160.0, 2600.0)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_engines_and_trainer_have_different_cores() -> None:
    code = "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start(); print(flush=True)"
    with ExitStack() as stack:
        pids = []
        for title in ("engine", "VLLM::EngineCore", "rank", "other"):
            child = subprocess.Popen([title, "-c", code], executable=sys.executable, stdout=subprocess.PIPE)
            stack.callback(child.wait)
            stack.callback(child.kill)
            assert child.stdout is not None
            child.stdout.readline()
            pids.append(child.pid)
        pin(engines=pids[:1], ranks=pids[2:3])
        engine, core, rank, other = (
            {frozenset(os.sched_getaffinity(int(thread.name))) for thread in Path(f"/proc/{pid}/task").iterdir()}
            for pid in pids
        )
    all_cores = os.sched_getaffinity(0)
    (of_engine,), (of_rank,) = engine, rank
    assert core == engine
    assert other == {frozenset(all_cores)}
    assert of_engine | of_rank == all_cores
    assert len(of_engine) == len(all_cores) // 2
    assert not of_engine & of_rank


def test_the_reward_depends_on_the_response() -> None:
    assert (reward_func("ab"), reward_func("abc")) == (1.0, 0.0)
