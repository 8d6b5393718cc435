"""Layouts in fp32 on the first layers: correct ones are equal at either precision, planted faults are detected."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from planted_faults import leak_between_responses, shift_positions
from sample_batches import batch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3NextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from vlmrl.learning import layout_check
from vlmrl.learning.layout_check import Difference, compare_layouts, copy_first_layers
from vlmrl.models import linear_attention, tiny
from vlmrl.models.adapter_plan import AdapterPlan, choose_targets, layers
from vlmrl.models.adapters import inject_adapter
from vlmrl.models.attention import implementation
from vlmrl.models.attention_plan import AttentionPlan, plan_attention
from vlmrl.models.load import load_model
from vlmrl.plugins import Processor, processor
from vlmrl.types import Sample

CPU = torch.device("cpu")
Made = tuple[PreTrainedModel, Processor, list[Sample]]
Types = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
Families = pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3", "qwen3_moe"])


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tiny.Family, torch.dtype], Made]:
    def made(family: tiny.Family, dtype: torch.dtype) -> Made:
        folder = tmp_path_factory.getbasetemp() / f"layouts-{family}"
        if not folder.exists():
            tiny.build(family, folder, size="micro")
        net = load_model(str(folder), dtype=dtype, attn_implementation=implementation("auto", CPU))
        read = processor(str(folder), min_pixels=3136, max_pixels=100_000)
        return net, read, _texts() if family in ("qwen3", "qwen3_moe") else batch(read)

    return made


def _texts() -> list[Sample]:
    rng = np.random.default_rng(0)
    samples = []
    for group, length in enumerate((20, 9)):
        prompt = rng.integers(97, 122, length)
        for more in (6, 8):
            tokens = np.concatenate([prompt, rng.integers(97, 122, more)])
            samples.append(Sample(tokens, np.arange(len(tokens)) >= length, (), group))
    return samples


def compare(made: Made) -> dict[Any, Difference]:
    net, read, samples = made
    return compare_layouts(net, read, samples, ["packed", "shared"], attention="auto", device=CPU)


@Types
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3", "glm4v", "internvl", "gemma3"])
def test_correct_layouts_are_equal(make: Any, family: tiny.Family, dtype: torch.dtype) -> None:
    differences = compare(make(family, dtype))
    assert set(differences) == {"packed", "shared"}
    assert max(max(difference) for difference in differences.values()) < 3e-6


def with_large_logits(made: Made) -> Made:
    """Enlarge attention logits, as in Qwen2.5, whose first layers have key biases in the hundreds."""
    net, read, samples = made
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.endswith(".k_proj.bias"):
                parameter.copy_(150 * torch.randn(parameter.shape, generator=draw))
            elif name.endswith((".q_proj.weight", ".q_norm.weight", ".k_norm.weight")):
                parameter.mul_(5)
    return net, read, samples


@Types
@Families
def test_large_rounding_in_fp32_is_no_fault(make: Any, family: tiny.Family, dtype: torch.dtype) -> None:
    differences = compare(with_large_logits(make(family, dtype)))
    assert max(max(difference) for difference in differences.values()) < 5e-6


@Types
@pytest.mark.parametrize("large", [False, True], ids=["", "large logits"])
@Families
def test_positions_of_responses_that_are_off_by_one_are_detected(
    make: Any, monkeypatch: pytest.MonkeyPatch, family: tiny.Family, dtype: torch.dtype, large: bool
) -> None:
    shift_positions(monkeypatch)
    made = make(family, dtype)
    differences = compare(with_large_logits(made) if large else made)
    assert max(differences["packed"]) < 3e-6, "packed shares no prompt"
    assert min(differences["shared"]) > 1e-2


@Types
@pytest.mark.parametrize("large", [False, True], ids=["", "large logits"])
def test_a_leak_of_a_thousandth_of_the_attention_between_responses_is_detected(
    make: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, large: bool
) -> None:
    leak_between_responses(monkeypatch)
    made = make("qwen2_5_vl", dtype)
    differences = compare(with_large_logits(made) if large else made)
    assert max(differences["packed"]) < 3e-6
    assert min(differences["shared"]) > 1e-4


def test_responses_that_start_linear_attention_without_their_prompt_are_detected(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = linear_attention._run_spans

    def without_prompts(run: Any, flat: Tensor, plan: AttentionPlan) -> Tensor:
        spans = tuple(span._replace(parent=None) for span in plan.spans)
        return sound(run, flat, plan_attention(spans, causal=True))

    monkeypatch.setattr(linear_attention, "_run_spans", without_prompts)
    differences = compare(make("qwen3_5", torch.bfloat16))
    assert max(differences["packed"]) < 3e-6
    assert min(differences["shared"]) > 1e-2


def test_experts_are_compared_in_double_precision_too(make: Any) -> None:
    _, read, samples = make("qwen3", torch.float32)
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 384, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    linear = {f"linear_{kind}_head_dim": 16 for kind in ("key", "value")} | {
        f"linear_num_{kind}_heads": 2 for kind in ("key", "value")
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2} | {
        f"{kind}_intermediate_size": 16 for kind in ("moe", "shared_expert")
    }
    config = Qwen3NextConfig(
        **sizes, **heads, **linear, **experts, layer_types=["linear_attention", "full_attention"], initializer_range=0.3
    )
    torch.manual_seed(0)
    net = AutoModelForCausalLM.from_config(config, attn_implementation=implementation("auto", CPU))
    linear_attention.run_per_span(net)
    differences = compare((net, read, samples))
    assert max(max(difference) for difference in differences.values()) < 3e-6


@pytest.mark.parametrize(
    ("kinds", "number"),
    [
        (None, 2),
        (["full_attention"] * 9, 2),
        (["sliding_attention"] * 5 + ["full_attention"], 6),
        (["linear_attention"] * 3 + ["full_attention"] * 2, 4),
        (["linear_attention", "full_attention"], 2),
        (["linear_attention"], 1),
    ],
)
def test_every_kind_of_layer_is_compared(kinds: list[str] | None, number: int) -> None:
    config: Any = SimpleNamespace(num_hidden_layers=9 if kinds is None else len(kinds), layer_types=kinds)
    assert layout_check._num_layers(config) == number


def test_a_model_with_adapters_is_compared_without_them(make: Any) -> None:
    net, read, samples = make("qwen2_5_vl", torch.bfloat16)
    found_layers = choose_targets(("all",), layers(net, read), frozen=())
    inject_adapter(net, AdapterPlan(2, 16.0, 0.0, False, False, tuple(found_layers), frozenset(found_layers.values())))
    differences = compare((net, read, samples))
    assert max(max(difference) for difference in differences.values()) < 3e-6


def test_the_copy_has_two_layers_in_fp32_and_the_used_tokens(make: Any) -> None:
    net, read, samples = make("qwen2_5_vl", torch.bfloat16)
    first = copy_first_layers(net, read, samples, implementation("auto", CPU))
    used = {int(token) for sample in samples for token in sample.tokens} | {read.pad_token_id}
    assert first.get_input_embeddings().weight.shape[0] == len(used)
    real = list(first.base_model.parameters())
    assert {parameter.dtype for parameter in real} == {torch.float32}
    assert {parameter.device.type for parameter in real} == {"cpu"}
    assert len(first.base_model.language_model.layers) == 2
    assert {parameter.dtype for parameter in net.parameters()} == {torch.bfloat16}, "the model itself is unchanged"


def test_on_a_full_device_the_comparison_runs_on_the_cpu(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net, read, samples = make("qwen2_5_vl", torch.bfloat16)
    sound, tried = layout_check._differences, []

    def full(*arguments: Any) -> Any:
        tried.append(arguments[-1].type)
        if len(tried) == 1:
            raise torch.OutOfMemoryError
        return sound(*arguments)

    monkeypatch.setattr(layout_check, "_differences", full)
    differences = compare_layouts(net, read, samples, ["shared"], attention="auto", device=torch.device("meta"))
    assert tried == ["meta", "cpu"]
    assert max(differences["shared"]) < 3e-6


def test_kernels_that_take_neither_fp64_nor_cpu_tensors_are_not_called(
    make: Callable[[tiny.Family, torch.dtype], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where flash-linear-attention and causal-conv1d are installed: Transformers then calls them on any device."""
    for name in ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"):

        @wraps(getattr(modeling_qwen3_5, name).__wrapped__)
        def kernel(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("Expected a CUDA tensor")

        monkeypatch.setattr(modeling_qwen3_5, name, kernel)
    made = make("qwen3_5", torch.float32)
    assert all(gap < 1e-5 for gaps in compare(made).values() for gap in gaps)
    with pytest.raises(RuntimeError, match="Expected a CUDA tensor"):
        made[0](torch.ones(1, 8, dtype=torch.long))
