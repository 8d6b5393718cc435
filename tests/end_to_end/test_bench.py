"""The benchmarks that need Ray and vLLM, on the smallest models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vlmrl.commands.bench.asynchrony import asynchrony
from vlmrl.commands.bench.engines import agents, rollout, sync
from vlmrl.config.bench_verbs import AgentsBench, AsyncBench, RolloutBench, SyncBench
from vlmrl.config.load import load

pytestmark = pytest.mark.usefixtures("ray_session")


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def flags(model: str, **more: Any) -> list[str]:
    settings = {"actor.model_name_or_path": model, "ds.param_dtype": "fp32", "bench.repeats": 1} | more
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def test_sync_reports_the_bytes_of_the_base_and_of_the_adapter(
    tiny_model: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model("qwen3", size="micro")
    sync(load(SyncBench, flags(model, **{"ds.lora.rank": 8, "ds.lora.target_modules": "q_proj"})))
    measured = lines(capsys)
    assert [(line["part"], line["warm_up"]) for line in measured] == [
        *(("base", True), ("adapter", True), ("base", False), ("adapter", False)),
    ]
    base, adapter = measured[2:]
    # The synced base has the size of the safetensors files up to their headers, within 1 %.
    assert base["bytes"] == pytest.approx((Path(model) / "model.safetensors").stat().st_size, rel=0.02)
    # Two layers of 64 -> 64: A is [8, 64] and B [64, 8], in four bytes.
    assert adapter["bytes"] == 2 * (8 * 64 + 64 * 8) * 4


def test_rollout_tells_the_tokens_of_every_width(
    tiny_model: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"data.prompt_dataset": "arithmetic", "rollout.batch_size": 4, "rollout.max_new_tokens": 8}
    settings = [*flags(tiny_model("qwen3", size="micro"), **more), "--bench.n_samples_per_prompt", "2", "3"]
    rollout(load(RolloutBench, settings))
    measured = [line for line in lines(capsys) if not line["warm_up"]]
    assert [(line["n_samples_per_prompt"], line["prompts"]) for line in measured] == [(2, 4), (3, 4)]
    for line in measured:
        assert 0 < line["sampled_tokens"] <= 4 * line["n_samples_per_prompt"] * 8


def test_conversations_are_measured_with_environments_and_without(
    tiny_model: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"episodes": 6, "turns": 2, "response_tokens": 5, "step_s": 0.05}
    more = {"agent.num_workers": 1, "vllm.cpu_kv_cache_gib": 0.1} | {f"bench.{k}": v for k, v in sizes.items()}
    agents(load(AgentsBench, flags(tiny_model("qwen3", size="micro"), **more)))
    played, replayed = [line for line in lines(capsys) if not line["warm_up"]]
    assert (played["environments"], replayed["environments"]) == (True, False)
    # Equal seeds behind equal tokens: the same responses.
    assert 6 * 2 <= played["sampled_tokens"] == replayed["sampled_tokens"] <= 6 * 2 * 5
    assert (played["episodes"], played["failed"]) == (6, 0)
    assert played["env_s_per_turn"] >= 0.05
    assert played["seconds"] > 2 * 0.05
    assert 0 < replayed["front_end_cpu_s"] < 60
    ratio = played["sampled_tokens_per_s"] / replayed["sampled_tokens_per_s"]
    assert played["throughput_lost"] == pytest.approx(1 - ratio, abs=0.01)


@pytest.mark.parametrize("workload", ["environment", "long_tail"])
def test_synchronous_and_asynchronous_steps_are_measured_in_turn(
    workload: str, tiny_model: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"bench.workload": workload, "bench.rounds": 1, "bench.steps": 2, "bench.queue_sizes": 1}
    sizes |= {"bench.response_tokens": 4, "rollout.batch_size": 4, "rollout.n_samples_per_prompt": 2}
    sizes |= {"bench.step_s": 0.2, "agent.num_workers": 1} if workload == "environment" else {}
    settings = flags(tiny_model("qwen3", size="micro"), **{"vllm.cpu_kv_cache_gib": 0.1}, **sizes)
    asynchrony(load(AsyncBench, settings[:4] + settings[6:]))
    synchronous, drained, partial, *results = lines(capsys)
    assert [(line["mode"], line["queue"]) for line in (synchronous, drained, partial)] == [
        *(("synchronous", 0), ("drained", 1), ("partial", 1)),
    ]
    assert [line["mode"] for line in results] == ["synchronous", "drained", "partial"]
    for line in (synchronous, drained, partial):
        assert sum(line["seconds"][part] for part in ("rollout", "update", "sync")) < line["seconds"]["step"]
        assert line["response_tokens"] == pytest.approx(synchronous["response_tokens"], rel=0.2), "of equal prompts"
    assert [line["staleness"] for line in (synchronous, drained)] == [0.0, 1.0]
    assert "verify_again" in partial["seconds"]
    assert "verify_again" not in synchronous["seconds"]
    if workload == "environment":
        assert synchronous["seconds"]["rollout"] > 0.2 > partial["seconds"]["rollout"]
    for line in results:
        assert 1.0 <= line["bound"] <= 2.0
        assert line["reached"] == pytest.approx(line["speedup"] / line["bound"], abs=0.01)
