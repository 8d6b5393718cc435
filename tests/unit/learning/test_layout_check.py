"""Layouts in fp32 on the first layers: sound ones are equal in runs of either type, planted faults are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from planted_faults import leak_between_responses, shift_positions
from sample_batches import batch
from transformers import PreTrainedModel

from vlmrl.learning import layout_check
from vlmrl.learning.layout_check import Difference, compare_layouts, first_layers
from vlmrl.models import tiny
from vlmrl.models.adapter_plan import AdapterPlan, choose_targets, layers
from vlmrl.models.adapters import inject
from vlmrl.models.attention import implementation
from vlmrl.models.load import load_model
from vlmrl.plugins import Processor, processor
from vlmrl.types import Sample

CPU = torch.device("cpu")
Made = tuple[PreTrainedModel, Processor, list[Sample]]
Types = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
Families = pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3"])


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tiny.Family, torch.dtype], Made]:
    def made(family: tiny.Family, dtype: torch.dtype) -> Made:
        folder = tmp_path_factory.getbasetemp() / f"layouts-{family}"
        if not folder.exists():
            tiny.build(family, folder, size="micro")
        net = load_model(str(folder), dtype=dtype, attn_implementation=implementation("auto", CPU))
        read = processor(str(folder), min_pixels=3136, max_pixels=100_000)
        return net, read, _texts() if family == "qwen3" else batch(read)

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


def compared(made: Made) -> dict[Any, Difference]:
    net, read, samples = made
    return compare_layouts(net, read, samples, ["packed", "shared"], attention="auto", device=CPU)


@Types
@Families
def test_sound_layouts_are_equal(make: Any, family: tiny.Family, dtype: torch.dtype) -> None:
    found = compared(make(family, dtype))
    assert set(found) == {"packed", "shared"}
    assert max(max(difference) for difference in found.values()) < 3e-6


def with_large_logits(made: Made) -> Made:
    """As in Qwen2.5, whose first layers have keys with biases in the hundreds."""
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
def test_layers_that_round_a_lot_in_fp32_are_no_fault(make: Any, family: tiny.Family, dtype: torch.dtype) -> None:
    found = compared(with_large_logits(make(family, dtype)))
    assert max(max(difference) for difference in found.values()) < 5e-6


@Types
@pytest.mark.parametrize("large", [False, True], ids=["", "large logits"])
@Families
def test_positions_of_responses_that_are_off_by_one_are_found(
    make: Any, monkeypatch: pytest.MonkeyPatch, family: tiny.Family, dtype: torch.dtype, large: bool
) -> None:
    shift_positions(monkeypatch)
    made = make(family, dtype)
    found = compared(with_large_logits(made) if large else made)
    assert max(found["packed"]) < 3e-6, "packed shares no prompt"
    assert min(found["shared"]) > 1e-2


@Types
@pytest.mark.parametrize("large", [False, True], ids=["", "large logits"])
def test_a_leak_of_a_thousandth_of_the_attention_between_two_responses_is_found(
    make: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, large: bool
) -> None:
    leak_between_responses(monkeypatch)
    made = make("qwen2_5_vl", dtype)
    found = compared(with_large_logits(made) if large else made)
    assert max(found["packed"]) < 3e-6
    assert min(found["shared"]) > 1e-4


def test_a_model_with_adapters_is_compared_without_them(make: Any) -> None:
    net, read, samples = make("qwen2_5_vl", torch.bfloat16)
    found_layers = choose_targets(("all",), layers(net, read), frozen=())
    inject(net, AdapterPlan(2, 16.0, 0.0, False, False, tuple(found_layers), frozenset(found_layers.values())))
    found = compared((net, read, samples))
    assert max(max(difference) for difference in found.values()) < 3e-6


def test_the_copy_is_two_layers_in_fp32_with_the_tokens_that_are_used(make: Any) -> None:
    net, read, samples = make("qwen2_5_vl", torch.bfloat16)
    first = first_layers(net, read, samples, implementation("auto", CPU))
    used = {int(token) for sample in samples for token in sample.tokens} | {read.pad_token_id}
    assert first.get_input_embeddings().weight.shape[0] == len(used)
    real = list(first.base_model.parameters())
    assert {parameter.dtype for parameter in real} == {torch.float32}
    assert {parameter.device.type for parameter in real} == {"cpu"}
    assert len(first.base_model.language_model.layers) == 2
    assert {parameter.dtype for parameter in net.parameters()} == {torch.bfloat16}, "the model itself stays what it is"


def test_a_device_that_is_full_leaves_the_comparison_to_the_cpu(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net, read, samples = make("qwen2_5_vl", torch.bfloat16)
    sound, tried = layout_check._differences, []

    def full(*asked: Any) -> Any:
        tried.append(asked[-1].type)
        if len(tried) == 1:
            raise torch.OutOfMemoryError
        return sound(*asked)

    monkeypatch.setattr(layout_check, "_differences", full)
    found = compare_layouts(net, read, samples, ["shared"], attention="auto", device=torch.device("meta"))
    assert tried == ["meta", "cpu"]
    assert max(found["shared"]) < 3e-6
