"""What vLLM is started with. Its starting and stopping: tests/end_to_end/test_engine.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vlmrl.config.data import Columns
from vlmrl.config.vllm import Vllm
from vlmrl.errors import ConfigError
from vlmrl.models.adapter_plan import AdapterPlan
from vlmrl.rollout.launch import check_base, settings


class Tools:
    resize_factor = None


def started_with(adapter: AdapterPlan | None, **vllm: Any) -> dict[str, Any]:
    return settings(
        vllm=Vllm(**vllm),
        columns=Columns(),
        processor=Tools(),  # type: ignore[arg-type]
        top_p=1.0,
        adapter=adapter,
    )


def plan(rank: int) -> AdapterPlan:
    return AdapterPlan(
        rank=rank,
        alpha=16.0,
        dropout=0.0,
        is_rank_stabilized=False,
        has_magnitude=False,
        targets=("model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"),
        groups=frozenset({"language"}),
    )


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (2, 8), (8, 8), (9, 16), (300, 320), (512, 512)])
def test_vllm_makes_room_for_one_adapter_in_the_layers_that_get_it_and_no_others(rank: int, room: int) -> None:
    from vllm.config.lora import LoRAConfig

    found = started_with(plan(rank))
    named = {name: found[name] for name in ("enable_lora", "max_loras", "max_lora_rank", "lora_target_modules")}
    assert named == {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": room,
        "lora_target_modules": ["q_proj", "up_proj"],
    }
    LoRAConfig(max_lora_rank=room, max_loras=1, target_modules=named["lora_target_modules"])


def test_without_an_adapter_vllm_is_not_told_of_any() -> None:
    assert not {name for name in started_with(None) if "lora" in name}


def test_a_base_in_4_bits_is_asked_of_vllm_only_when_it_was_asked_for() -> None:
    assert started_with(None, qlora_base="bitsandbytes")["quantization"] == "bitsandbytes"
    for base in ("dequantized", "original"):
        assert "quantization" not in started_with(None, qlora_base=base)
        check_base(Vllm(qlora_base=base))  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_base_in_4_bits_needs_cuda() -> None:
    with pytest.raises(ConfigError, match=r"vllm\.qlora_base bitsandbytes needs a CUDA device: take dequantized"):
        check_base(Vllm(qlora_base="bitsandbytes"))
