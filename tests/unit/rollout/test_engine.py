"""Errors of an engine before vLLM runs. The rest needs vLLM: tests/end_to_end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Qwen3Config

from vlmrl.config.data import Columns
from vlmrl.config.vllm import Vllm
from vlmrl.errors import ClusterError, ConfigError
from vlmrl.models.adapter_plan import AdapterPlan
from vlmrl.processors.text import TextProcessor
from vlmrl.rollout.engine import RolloutEngine
from vlmrl.rollout.settings import EngineSettings


def engine(**settings: Any) -> RolloutEngine:
    defaults = {"model": "nowhere", "vllm": Vllm(), "columns": Columns(), "trust_remote_code": False, "dtype": "fp32"}
    return EngineSettings(**(defaults | {"max_model_len": 8, "top_p": 1.0, "name": "engine-3"} | settings)).build()


def test_an_engine_that_was_not_started_is_an_error() -> None:
    idle = engine()
    with pytest.raises(ClusterError, match="rollout engine engine-3 is not running"):
        asyncio.run(idle.begin_update(1))
    asyncio.run(idle.shutdown())
    status = asyncio.run(idle.status())
    assert (status["version"], status["adapter"]) == (0, None)


def test_a_base_that_vllm_cannot_hold_is_refused_before_the_start() -> None:
    with pytest.raises(ConfigError, match=r"vllm\.qlora_base bitsandbytes needs"):
        asyncio.run(engine(vllm=Vllm(qlora_base="bitsandbytes")).start())


def test_an_adapter_that_vllm_cannot_apply_is_refused() -> None:
    plan = AdapterPlan(
        rank=4,
        alpha=16.0,
        dropout=0.0,
        is_rank_stabilized=False,
        has_magnitude=False,
        targets=("model.visual.blocks.0.attn.qkv",),
        groups=frozenset({"vision"}),
    )
    with pytest.raises(AssertionError):
        engine(adapter=plan)


class IncompatibleVllm:
    """Starts, but its workers lack names."""

    vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=16, max_num_batched_tokens=2048))

    def __init__(self) -> None:
        self.is_stopped = False

    async def start(self, arguments: Any, *, timeout_s: float) -> IncompatibleVllm:
        return self

    async def stop(self, llm: Any) -> None:
        self.is_stopped = True

    async def collective_rpc(self, method: str, args: Any) -> list[list[str]]:
        assert method == "vlmrl_prepare"
        return [["GPUModelRunner.get_model"], ["GPUModelRunner.get_model", "WorkerLoRAManager.lora_config"]]


def test_an_incompatible_worker_ends_the_start_in_one_line(tmp_path: Path) -> None:
    Qwen3Config().save_pretrained(tmp_path)
    incompatible, vllm = engine(model=str(tmp_path)), IncompatibleVllm()
    incompatible.__dict__ |= {"_launch": vllm, "_processor": TextProcessor}
    with pytest.raises(ClusterError, match=r"engine-3: vLLM .* lacks GPUModelRunner\.get_model, WorkerLoRA") as caught:
        asyncio.run(incompatible.start())
    assert "\n" not in str(caught.value)
    assert vllm.is_stopped
