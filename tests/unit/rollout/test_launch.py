"""What vLLM is started with. Its starting and stopping: tests/end_to_end/test_engine.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vlmrl.config.data import Columns
from vlmrl.config.vllm import Vllm
from vlmrl.errors import ConfigError
from vlmrl.models.adapter_plan import AdapterPlan
from vlmrl.rollout import launch
from vlmrl.rollout.capacity import Demand
from vlmrl.rollout.launch import check_base, engine_arguments


class Tools:
    resize_factor = None


def started_with(adapter: AdapterPlan | None, *, demand: Demand | None = None, **vllm: Any) -> dict[str, Any]:
    return engine_arguments(
        vllm=Vllm(**vllm),
        columns=Columns(),
        processor=Tools(),  # type: ignore[arg-type]
        top_p=1.0,
        adapter=adapter,
        demand=demand,
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


def test_an_engine_has_room_for_what_the_run_asks_of_it() -> None:
    unknown, told = started_with(None), started_with(None, demand=Demand(40, prompts=5, prompt_tokens=100))
    names = ("max_num_seqs", "max_num_batched_tokens")
    assert [unknown[name] for name in names] == [128, 2048]
    assert [told[name] for name in names] == [40, 2048]
    own = started_with(None, max_num_seqs=16, max_num_batched_tokens=512)
    assert [own[name] for name in names] == [16, 512]


def test_the_largest_room_is_what_vllm_takes_offline() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    # On CPU, where this runs; on a GPU it is 256 or 1024 responses by the size of its memory.
    assert launch._offline_limits(1) == (256, 4096)
    assert (AsyncEngineArgs.max_num_seqs, AsyncEngineArgs.max_num_batched_tokens) == (None, None)


class Ended:
    """A process that has ended, or runs."""

    def __init__(self, exitcode: int | None) -> None:
        self.exitcode = exitcode


@pytest.mark.parametrize(
    ("codes", "kills", "said"),
    [
        (
            (-9, None),
            2,
            "has died, its process was killed by signal 9 (SIGKILL); where memory is used up, lower",
        ),
        ((-9, -15), 3, "has died, its process was killed by the kernel: out of memory; where memory is used up, lower"),
        ((-15, -11), 3, "has died, its process was killed by signal 11 (SIGSEGV)"),
        ((1,), 3, "has died, its process ended with exit code 1"),
        ((None,), 2, "has died; where memory is used up, lower --vllm.gpu_memory_utilization, or on CPU"),
    ],
)
def test_an_engines_death_says_how_its_process_ended_and_which_settings_are_its_own(
    codes: tuple[int | None, ...], kills: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = launch.Launch("vllm (tiny)")
    dead._killed_before = 2
    monkeypatch.setattr(launch, "oom_kills", lambda: kills)
    dead._children = dict.fromkeys(Ended(code) for code in codes)  # type: ignore[assignment]
    told = dead.death()
    assert told.startswith(said)
    assert ("--vllm." in told) == ("where memory" in said)
