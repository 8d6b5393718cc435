"""vLLM on CUDA: start, generate, receive weights, and free memory while asleep."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vlmrl import plugins
from vlmrl.config.data import Columns
from vlmrl.config.vllm import Vllm
from vlmrl.models import tiny
from vlmrl.models.weight_buckets import digest, fingerprint, pack_bucket
from vlmrl.rollout.engine import RolloutEngine
from vlmrl.rollout.settings import EngineSettings
from vlmrl.types import Floats, Group, Prompt, Sampling

TWO_RESPONSES = Sampling(n=2, temperature=1.0, top_p=1.0, max_new_tokens=8, seed=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build("qwen3", tmp_path_factory.mktemp("gpu") / "model")


def with_engine(model: Path, use: Callable[[RolloutEngine], Awaitable[Any]], **vllm: Any) -> Any:
    """Start an engine, use it, stop it."""

    async def run() -> Any:
        engine = EngineSettings(
            model=str(model),
            vllm=Vllm(gpu_memory_utilization=0.2, enforce_eager=True, **vllm),
            columns=Columns(),
            trust_remote_code=False,
            dtype="bf16",
            max_model_len=256,
            top_p=1.0,
            name="vllm",
            temperature=0.5,
        ).build()
        await engine.start()
        try:
            return await use(engine)
        finally:
            await engine.shutdown()

    return asyncio.run(run())


def make_prompt(model: Path) -> Prompt:
    processor = plugins.processor_of(str(model), Columns())
    text = processor.render("2 + 2 = ?", num_images=0, columns=Columns())
    tokens, request = processor.encode(text, [])
    return Prompt(index=0, source="test:0", text=text, tokens=tokens, request=request, label="4")


def test_an_engine_returns_responses_with_log_probs(model: Path) -> None:
    group: Group = with_engine(model, lambda engine: engine.generate(make_prompt(model), TWO_RESPONSES))
    assert len(group.rollouts) == 2
    for rollout in group.rollouts:
        assert 1 <= rollout.num_sampled <= 8
        assert all((segment.logprobs[segment.sampled] < 0).all() for segment in rollout.segments)


def test_an_engine_has_the_offline_limits_of_vllm(model: Path) -> None:
    limits = with_engine(model, lambda engine: engine.status())["limits"]
    assert limits.max_num_seqs >= 256
    assert limits.max_num_batched_tokens >= 8192


def test_prefill_scores_equal_those_of_sampling(model: Path) -> None:
    """With the default model runner: at the sampling temperature, and without the banned tokens."""

    async def both(engine: RolloutEngine) -> tuple[Group, list[Floats]]:
        group = await engine.generate(make_prompt(model), replace(TWO_RESPONSES, temperature=0.5))
        return group, await engine.score(group)

    group, rows = with_engine(model, both)
    for segment, row in zip(group.segments, rows, strict=True):
        np.testing.assert_allclose(row, segment.logprobs, atol=0.1)


@pytest.mark.parametrize("second_runner", ["0", "1"])
def test_an_engine_holds_the_synced_weights_with_either_model_runner(
    model: Path, second_runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", second_runner)
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    changed = {name: tensor.detach() * 1.5 for name, tensor in net.state_dict().items()}

    async def sync(engine: RolloutEngine) -> tuple[Group, str, Group]:
        before = await engine.generate(make_prompt(model), TWO_RESPONSES)
        await engine.begin_update(1, readback={"seed": 1, "is_full": True})
        await engine.load_bucket(pack_bucket(changed.items()))
        reply = await engine.finish_update(vision_changed=False)
        return before, reply, await engine.generate(make_prompt(model), TWO_RESPONSES)

    before, reply, after = with_engine(model, sync)
    assert reply == fingerprint({name: digest(name, tensor) for name, tensor in changed.items()})
    assert [rollout.versions for rollout in (*before.rollouts, *after.rollouts)] == [(0,), (0,), (1,), (1,)]


def test_a_sleeping_engine_frees_memory_and_generates_the_same_afterwards(model: Path) -> None:
    async def nap(engine: RolloutEngine) -> tuple[Group, int, int, Group]:
        before = await engine.generate(make_prompt(model), TWO_RESPONSES)
        awake, _ = torch.cuda.mem_get_info()
        await engine.sleep()
        asleep, _ = torch.cuda.mem_get_info()
        await engine.wake(["weights"])
        half, _ = torch.cuda.mem_get_info()
        assert awake < half < asleep
        assert (await engine.status())["is_asleep"]
        await engine.wake()
        return before, awake, asleep, await engine.generate(make_prompt(model), TWO_RESPONSES)

    before, free_awake, free_asleep, after = with_engine(model, nap, enable_sleep=True)
    assert free_asleep - free_awake > 2**30
    assert [segment.tokens.tolist() for segment in after.segments] == [
        segment.tokens.tolist() for segment in before.segments
    ]
