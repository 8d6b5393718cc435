"""Forward passes in a wider type than the weights'."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from sample_batches import batch, packs

from vlmrl.learning.forward import LogprobForward
from vlmrl.learning.higher_precision import higher_precision
from vlmrl.models import tiny
from vlmrl.models.adapter_plan import AdapterPlan, choose_targets, layers
from vlmrl.models.adapters import inject_adapter
from vlmrl.models.attention import implementation
from vlmrl.models.experts import plain_experts
from vlmrl.models.load import load_model
from vlmrl.models.scorer import Scorer
from vlmrl.plugins import processor
from vlmrl.types import Floats

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("family", "adapter"),
    [
        ("qwen2_5_vl", None),
        ("qwen3_vl", None),
        ("smolvlm", None),
        ("qwen3_5", None),
        ("qwen2_5_vl", "lora"),
        ("qwen2_5_vl", "dora"),
    ],
)
def test_a_half_precision_model_computes_in_fp32_like_one_in_fp32(
    family: tiny.Family, adapter: str | None, tmp_path: Path
) -> None:
    folder = str(tiny.build(family, tmp_path / family, size="micro"))
    read = processor(folder, min_pixels=3136, max_pixels=100_000)
    half = load_model(folder, dtype=torch.bfloat16, attn_implementation=implementation("auto", CPU))
    if adapter is not None:
        targets = choose_targets(("all",), layers(half, read), frozen=())
        inject_adapter(
            half, AdapterPlan(2, 16.0, 0.0, False, adapter == "dora", tuple(targets), frozenset(targets.values()))
        )
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in half.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    whole = copy.deepcopy(half)
    for module in whole.parameters():
        module.data = module.data.float()
    samples = batch(read)
    cuts = packs(samples, "padded")

    def logprobs_of(net: torch.nn.Module) -> Floats:
        passes = LogprobForward(Scorer(net), read, temperature=0.7, bans=True, device=CPU, cache_bytes=0)  # type: ignore[arg-type]
        by_id = dict(passes.logprobs(cuts))
        return np.concatenate([by_id[i][sample.sampled] for i, sample in enumerate(samples)])

    before = logprobs_of(half)
    with higher_precision(half):
        exact = logprobs_of(half)
    rounding = np.abs(before - logprobs_of(whole)).mean()
    assert rounding > 1e-3
    # Pixels reach the tower in its own type, inputs their adapters, and DoRA's sums are of weights as they are: that is
    # still rounded.
    assert np.abs(exact - logprobs_of(whole)).mean() < rounding / (5 if adapter is None else 2)
    np.testing.assert_array_equal(logprobs_of(half), before)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl_moe", "smolvlm"])
def test_an_fp32_model_computes_in_fp64_like_one_in_fp64(tmp_path: Path, family: tiny.Family) -> None:
    folder = str(tiny.build(family, tmp_path / "model", size="micro"))
    read = processor(folder, min_pixels=3136, max_pixels=100_000)
    net = load_model(folder, dtype=torch.float32, attn_implementation=implementation("auto", CPU))
    double = copy.deepcopy(net)
    for parameter in double.parameters():
        parameter.data = parameter.data.double()
    samples = batch(read)

    def logprobs_of(model: torch.nn.Module) -> torch.Tensor:
        # As `LogprobForward` does, without its rounding to fp32.
        passes = LogprobForward(Scorer(model), read, temperature=0.1, bans=True, device=CPU, cache_bytes=0)  # type: ignore[arg-type]
        with torch.no_grad():
            return torch.cat([passes(pack).logprobs.double().flatten() for pack in packs(samples, "padded")])

    with higher_precision(net, torch.float64):
        exact = logprobs_of(net)
    rounding = (logprobs_of(net) - exact).abs().mean()
    assert rounding > 3e-8
    with plain_experts(double):
        wide = logprobs_of(double)
    assert (exact - wide).abs().mean() < rounding / 5
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}


def test_a_failing_pass_restores_the_weights() -> None:
    layer = torch.nn.Linear(2, 3, dtype=torch.bfloat16)
    weight = layer.weight.data
    with higher_precision(layer), pytest.raises(RuntimeError):
        layer(torch.zeros(1, 5))
    assert layer.weight.data_ptr() == weight.data_ptr()
    assert layer.weight.dtype == torch.bfloat16
