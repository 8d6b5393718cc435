"""Arguments of vLLM, the message of its death, and its captured output.

Start and stop are tested in tests/end_to_end/test_engine.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import ModelRegistry
from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
from vllm.model_executor.models.utils import WeightsMapper

from vlmrl.config.vllm import Vllm
from vlmrl.errors import ConfigError
from vlmrl.models.adapter_plan import AdapterPlan
from vlmrl.models.load import skeleton
from vlmrl.models.tiny import build
from vlmrl.plugins import processor
from vlmrl.rollout import launch
from vlmrl.rollout.capacity import Demand
from vlmrl.rollout.engine_checks import check_base
from vlmrl.rollout.launch import Console, engine_arguments, find_cause


class TextProcessor:
    resize_factor = None


def arguments_with(adapter: AdapterPlan | None, *, demand: Demand | None = None, **vllm: Any) -> dict[str, Any]:
    return engine_arguments(
        vllm=Vllm(**vllm),
        max_images=8,
        processor=TextProcessor(),  # type: ignore[arg-type]
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
def test_vllm_makes_room_for_one_adapter_in_the_adapted_layers_alone(rank: int, room: int) -> None:
    from vllm.config.lora import LoRAConfig

    arguments = arguments_with(plan(rank))
    lora = {name: arguments[name] for name in ("enable_lora", "max_loras", "max_lora_rank", "lora_target_modules")}
    assert lora == {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": room,
        "lora_target_modules": ["q_proj", "up_proj"],
    }
    LoRAConfig(max_lora_rank=room, max_loras=1, target_modules=lora["lora_target_modules"])


def test_without_an_adapter_no_argument_mentions_lora() -> None:
    assert not {name for name in arguments_with(None) if "lora" in name}


def test_vllm_quantizes_the_layers_of_the_language_model_to_fp8_by_row() -> None:
    from vllm.config.quantization import QUANT_KEY_NAMES, resolve_quantization_config
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer

    arguments = arguments_with(None, quantization="fp8")
    config = resolve_quantization_config(arguments["quantization"], arguments["quantization_config"])
    assert config is not None
    assert config.linear is not None
    assert config.linear.weight == QUANT_KEY_NAMES["fp8_per_channel_static"]
    ignored = {
        name: should_ignore_layer(name, config.ignore, use_fnmatch=True)
        for name in (
            "visual.blocks.0.mlp.down_proj",
            "visual.merger.mlp.0",
            "language_model.model.layers.0.mlp.down_proj",
        )
    }
    assert list(ignored.values()) == [True, True, False]


def test_an_engine_has_as_many_workers_as_stages_and_shards() -> None:
    arguments = arguments_with(None, tensor_parallel_size=2, pipeline_parallel_size=3)
    assert (arguments["tensor_parallel_size"], arguments["pipeline_parallel_size"]) == (2, 3)
    assert Vllm(tensor_parallel_size=2, pipeline_parallel_size=3).gpus_per_engine == 6


def test_vllm_quantizes_to_4_bits_only_with_bitsandbytes() -> None:
    assert arguments_with(None, qlora_base="bitsandbytes")["quantization"] == "bitsandbytes"
    for base in ("dequantized", "original"):
        assert "quantization" not in arguments_with(None, qlora_base=base)
        check_base(Vllm(qlora_base=base))  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_base_in_4_bits_needs_cuda() -> None:
    with pytest.raises(ConfigError, match=r"vllm\.qlora_base bitsandbytes needs a CUDA device: use dequantized"):
        check_base(Vllm(qlora_base="bitsandbytes"))


def test_limits_follow_the_demand_of_the_run_unless_the_user_sets_them() -> None:
    default, fitted = arguments_with(None), arguments_with(None, demand=Demand(40, prompts=5, prompt_tokens=100))
    names = ("max_num_seqs", "max_num_batched_tokens")
    assert [default[name] for name in names] == [128, 2048]
    assert [fitted[name] for name in names] == [40, 2048]
    user_set = arguments_with(None, max_num_seqs=16, max_num_batched_tokens=512)
    assert [user_set[name] for name in names] == [16, 512]


def test_the_default_limits_are_those_of_vllm_for_offline_inference() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    # On CPU, where this runs; on a GPU it is 256 or 1024 responses by the size of its memory.
    assert launch._offline_limits(1) == (256, 4096)
    assert (AsyncEngineArgs.max_num_seqs, AsyncEngineArgs.max_num_batched_tokens) == (None, None)


class Child:
    """A process with this exit code; None while it runs."""

    def __init__(self, exitcode: int | None) -> None:
        self.exitcode = exitcode


@pytest.mark.parametrize(
    ("codes", "kills", "message"),
    [
        (
            (-9, None),
            2,
            "has died, its process was killed by signal 9 (SIGKILL); if memory has run out, lower",
        ),
        ((-9, -15), 3, "has died, its process was killed by the kernel: out of memory; if memory has run out, lower"),
        ((-15, -11), 3, "has died, its process was killed by signal 11 (SIGSEGV)"),
        ((1,), 3, "has died, its process ended with exit code 1"),
        ((None,), 2, "has died; if memory has run out, lower --vllm.gpu_memory_utilization, or on CPU"),
    ],
)
def test_the_death_message_says_how_the_process_ended_and_which_settings_may_help(
    codes: tuple[int | None, ...], kills: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = launch.Launch("vllm (tiny)")
    dead._killed_before = 2
    monkeypatch.setattr(launch, "oom_kills", lambda: kills)
    dead._children = dict.fromkeys(Child(code) for code in codes)  # type: ignore[assignment]
    death = dead.death()
    assert death.startswith(message)
    assert ("--vllm." in death) == ("if memory" in message)


def test_the_cause_is_the_last_exception_that_is_no_consequence_of_another() -> None:
    lines = [
        "(EngineCore pid=7) INFO 11-20 18:36:00 [core.py:133] Initializing",
        "(EngineCore pid=7) (Worker pid=8) ERROR 11-20 18:36:00 [x.py:953] ValueError: first",
        "(EngineCore pid=7) ERROR 11-20 18:36:01 [core.py:1510]     raise ValueError('x')",
        "(EngineCore pid=7) ERROR 11-20 18:36:01 [core.py:1510] safetensors_rust.SafetensorError: header too small",
        "Exception: WorkerProc initialization failed due to an exception in a background process.",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    ]
    assert find_cause(lines) == "safetensors_rust.SafetensorError: header too small"
    assert find_cause(lines[:2]) == "ValueError: first"
    assert find_cause(lines[:1]) is None


def test_a_child_that_starts_in_the_context_is_captured_for_its_whole_life(capfd: pytest.CaptureFixture[str]) -> None:
    script = "import time; print('one', flush=True); time.sleep(0.3); raise ValueError('two')"
    console = Console()
    with console:
        os.write(1, b"inside\n")
        child = subprocess.Popen([sys.executable, "-c", script])
    os.write(2, b"outside\n")
    child.wait()
    deadline = time.monotonic() + 5
    while console.cause() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert console.cause() == "ValueError: two"
    assert capfd.readouterr() == ("", "outside\n")


def test_nothing_is_captured_when_vllm_logs_at_debug(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    with Console():
        os.write(2, b"shown\n")
    assert capfd.readouterr().err == "shown\n"


FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "gemma3", "internvl", "glm4v", "smolvlm"]


@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_leaves_tower_and_projector_of_every_family_as_they_are(tmp_path: Path, family: Any) -> None:
    """Layers of the language model are quantized. The names are those of vLLM's model."""
    folder = str(build(family, tmp_path / family, size="micro"))
    net, reader = skeleton(folder), processor(folder, min_pixels=256, max_pixels=65536)
    theirs_of = ModelRegistry.models[net.config.architectures[0]].load_model_cls()
    mapper = getattr(theirs_of, "hf_to_vllm_mapper", WeightsMapper())
    patterns = arguments_with(None, quantization="fp8")["quantization_config"]["ignore"]
    ignored: dict[str, set[bool]] = {}
    for name, module in net.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            theirs = mapper.map_name(f"{name}.weight").removesuffix(".weight")
            part = ignored.setdefault(reader.parameter_group(f"{name}.weight"), set())
            part.add(should_ignore_layer(theirs, patterns, use_fnmatch=True))
    # Gemma 3's projector is no linear layer in Transformers.
    assert ignored == {"vision": {True}, "language": {False}} | ({} if family == "gemma3" else {"projector": {True}})
