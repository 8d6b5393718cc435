"""Passes in a wider type than the weights are in."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from sample_batches import batch, packs

from vlmrl.learning.exact import widened
from vlmrl.learning.forward import Forward
from vlmrl.models import tiny
from vlmrl.models.adapter_plan import AdapterPlan, choose_targets, layers
from vlmrl.models.adapters import inject
from vlmrl.models.attention import implementation
from vlmrl.models.load import load_model
from vlmrl.models.scorer import Scorer
from vlmrl.plugins import processor
from vlmrl.types import Floats

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("family", "adapter"), [("qwen2_5_vl", None), ("qwen3_vl", None), ("qwen2_5_vl", "lora"), ("qwen2_5_vl", "dora")]
)
def test_half_of_a_model_says_in_fp32_what_the_whole_says(
    family: tiny.Family, adapter: str | None, tmp_path: Path
) -> None:
    folder = str(tiny.build(family, tmp_path / family, size="micro"))
    read = processor(folder, min_pixels=3136, max_pixels=100_000)
    half = load_model(folder, dtype=torch.bfloat16, attn_implementation=implementation("auto", CPU))
    if adapter is not None:
        found = choose_targets(("all",), layers(half, read), frozen=())
        inject(half, AdapterPlan(2, 16.0, 0.0, False, adapter == "dora", tuple(found), frozenset(found.values())))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in half.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    whole = copy.deepcopy(half)
    for module in whole.parameters():
        module.data = module.data.float()
    samples = batch(read)
    cuts = packs(samples, "padded")

    def said(net: torch.nn.Module) -> Floats:
        passes = Forward(Scorer(net), read, temperature=0.7, bans=True, device=CPU, cache_bytes=0)  # type: ignore[arg-type]
        found = dict(passes.logprobs(cuts))
        return np.concatenate([found[i][sample.sampled] for i, sample in enumerate(samples)])

    before = said(half)
    with widened(half):
        exact = said(half)
    rounding = np.abs(before - said(whole)).mean()
    assert rounding > 1e-3
    # Pixels reach the tower in its own type, inputs their adapters, and DoRA's sums are of weights as they are: that is
    # still rounded.
    assert np.abs(exact - said(whole)).mean() < rounding / 2
    np.testing.assert_array_equal(said(half), before)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}


def test_a_whole_model_says_in_double_precision_what_a_double_one_says(tmp_path: Path) -> None:
    folder = str(tiny.build("qwen2_5_vl", tmp_path / "model", size="micro"))
    read = processor(folder, min_pixels=3136, max_pixels=100_000)
    net = load_model(folder, dtype=torch.float32, attn_implementation=implementation("auto", CPU))
    double = copy.deepcopy(net)
    for parameter in double.parameters():
        parameter.data = parameter.data.double()
    samples = batch(read)

    def said(model: torch.nn.Module) -> torch.Tensor:
        # As `Forward` does, without its rounding of what was said to fp32.
        passes = Forward(Scorer(model), read, temperature=0.1, bans=True, device=CPU, cache_bytes=0)  # type: ignore[arg-type]
        with torch.no_grad():
            return torch.cat([passes(pack).logprobs.double().flatten() for pack in packs(samples, "padded")])

    with widened(net, torch.float64):
        exact = said(net)
    rounding = (said(net) - exact).abs().mean()
    assert rounding > 1e-7
    assert (exact - said(double)).abs().mean() < rounding / 5
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}


def test_a_pass_that_fails_leaves_the_weights_as_they_were() -> None:
    layer = torch.nn.Linear(2, 3, dtype=torch.bfloat16)
    weight = layer.weight.data
    with widened(layer), pytest.raises(RuntimeError):
        layer(torch.zeros(1, 5))
    assert layer.weight.data_ptr() == weight.data_ptr()
    assert layer.weight.dtype == torch.bfloat16
