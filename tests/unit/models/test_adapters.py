"""Adapters in a model: only the planned layers, no change at first, the change of a weight by hand."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from adapted_models import plan_for, randomize
from torch import nn

from vlmrl.errors import ConfigError
from vlmrl.models.adapters import adapter_tensors, adapters_off, delta, exact_pattern, inject_adapter, low_rank_delta
from vlmrl.models.load import freeze
from vlmrl.models.tiny import Family

FAMILIES: list[Family] = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_text", "qwen3", "llama"]
Make = Callable[..., Any]


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        (family, targets)
        for family in FAMILIES
        for targets in ("all-linear", "vision", "all", "q_proj")
        if targets != "vision" or family.endswith("_vl")
    ],
)
def test_only_the_planned_layers_train(net: Make, reader: Make, family: Family, targets: str) -> None:
    model = net(family)
    names = [name for name, _ in model.named_parameters()]
    plan = plan_for(model, reader(family), targets)
    inject_adapter(model, plan)
    trains = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trains == {f"{target}.{half}.default.weight" for target in plan.targets for half in ("lora_A", "lora_B")}
    assert [name for name, _ in adapter_tensors(model)] == list(plan.tensor_names)
    assert {id(p) for _, p in adapter_tensors(model)} == {id(p) for p in model.parameters() if p.requires_grad}
    # The base is unchanged, under the same names.
    assert [n.replace(".base_layer.", ".") for n, p in model.named_parameters() if not p.requires_grad] == names
    assert isinstance(model.get_output_embeddings(), nn.Linear)


@pytest.mark.parametrize("lora", [{}, {"use_rslora": True}, {"use_dora": True}, {"dropout": 0.5}])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_adapter_changes_nothing_and_off_equals_the_base_to_the_bit(
    net: Make, reader: Make, logprobs_of: Make, family: Family, lora: dict[str, Any]
) -> None:
    model = net(family)
    before = logprobs_of(model, family)
    inject_adapter(model, plan_for(model, reader(family), "all", **lora))
    torch.testing.assert_close(logprobs_of(model, family), before, atol=2e-5 if "use_dora" in lora else 0.0, rtol=0.0)
    randomize(model)
    assert (logprobs_of(model, family) - before).abs().max() > 1e-3
    on = logprobs_of(model, family)
    for _ in range(2):
        with adapters_off(model):
            assert torch.equal(logprobs_of(model, family), before)
            assert all(p.requires_grad for _, p in adapter_tensors(model))
        assert torch.equal(logprobs_of(model, family), on)


def test_adapters_are_on_again_after_an_error(net: Make, reader: Make, logprobs_of: Make) -> None:
    model = net("qwen3")
    inject_adapter(model, plan_for(model, reader("qwen3")))
    randomize(model)
    on = logprobs_of(model, "qwen3")
    with pytest.raises(ZeroDivisionError), adapters_off(model):
        raise ZeroDivisionError
    assert torch.equal(logprobs_of(model, "qwen3"), on)


def test_adapters_have_the_dtype_of_the_model(net: Make, reader: Make) -> None:
    model = net("qwen3").bfloat16()
    inject_adapter(model, plan_for(model, reader("qwen3"), use_dora=True))
    assert {p.dtype for _, p in adapter_tensors(model)} == {torch.bfloat16}
    assert len(adapter_tensors(model)) == 14 * 3


def test_frozen_and_missing_layers_are_refused(net: Make, reader: Make) -> None:
    model, read = net("qwen2_5_vl"), reader("qwen2_5_vl")
    plan = plan_for(model, read, "all")
    freeze(model, read, vision=True, projector=False)
    with pytest.raises(ConfigError, match=r"model\.visual\.blocks\.0\.attn\.qkv is frozen"):
        inject_adapter(model, plan)
    with pytest.raises(ConfigError, match=r"a layer model\.visual\..*, which Qwen3ForCausalLM does not have"):
        inject_adapter(net("qwen3"), plan)


def test_the_pattern_matches_exactly_the_targets() -> None:
    names = ["a.layers.0.q", "a.layers.0.k", "a.layers.10.q", "a.layers.10.k", "a.layers.2.q", "b.mlp.0", "head"]
    pattern = exact_pattern(names)
    assert all(re.fullmatch(pattern, name) for name in names)
    others = ["a.layers.1.q", "a.layers.2.k", "a.layers.100.q", "x.a.layers.0.q", "aXlayers.0.q", "b.mlp.1", "headed"]
    assert not any(re.fullmatch(pattern, name) for name in others)
    assert exact_pattern(["a.0.q", "a.0.k", "a.1.q", "a.1.k"]) == r"a\.(?:0|1)(?:\.q|\.k)"


# ---------------------------------------------------------------- change of a weight


def test_the_change_of_a_weight_by_hand() -> None:
    a, b = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [0.0]])
    weight = torch.tensor([[0.0, -8.0], [3.0, 4.0]])
    assert low_rank_delta(a, b, scaling=2.0, weight=weight).tolist() == [[6.0, 12.0], [0.0, 0.0]]
    # The sum is [[6, 4], [3, 4]], with row norms sqrt(52) and 5; the magnitudes are 2 sqrt(13) and 10.
    magnitude = torch.tensor([52.0**0.5, 10.0])
    added = low_rank_delta(a, b, scaling=2.0, weight=weight, magnitude=magnitude)
    torch.testing.assert_close(weight + added, torch.tensor([[6.0, 4.0], [6.0, 8.0]]))


@pytest.mark.parametrize("lora", [{}, {"use_rslora": True}, {"use_dora": True}])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3"])
def test_the_base_plus_the_change_equals_the_adapted_model(
    net: Make, reader: Make, logprobs_of: Make, family: Family, lora: dict[str, Any]
) -> None:
    model, merged = net(family), net(family)
    inject_adapter(model, plan_for(model, reader(family), "all", **lora))
    randomize(model)
    parameters = dict(merged.named_parameters())
    with torch.no_grad():
        for name, layer in model.named_modules():
            if hasattr(layer, "lora_A"):
                parameters[f"{name}.weight"] += delta(layer)
    torch.testing.assert_close(logprobs_of(merged, family), logprobs_of(model, family), atol=5e-5, rtol=0.0)
