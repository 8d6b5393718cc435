"""Check NF4 layers, 8-bit Adam and Liger's fused layers against plain PyTorch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vlmrl.commands.self_test.outcome import Broken
from vlmrl.models import tiny
from vlmrl.models.liger import apply_liger
from vlmrl.models.load import load_model

_LIGER_FAMILIES: tuple[tiny.Family, ...] = ("qwen2_5_vl", "qwen3_vl", "qwen3")
_LIGER_TOLERANCE = 1e-3
_EIGHT_BITS = 0.1
"""The largest distance of parameters from those of 32-bit Adam, relative to the distance that they moved."""


def nf4(_: object) -> str:
    """Check that a 4-bit layer computes with its dequantized weight, forward and backward."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    plain = nn.Linear(256, 128, bias=False)
    layer = Linear4bit(256, 128, bias=False, compute_dtype=dtype, quant_type="nf4", compress_statistics=True)
    layer.load_state_dict(plain.state_dict())
    # As `models.quantize.prepare_four_bit` does: the first pass would repack the weight on CPUs that can multiply bf16.
    layer.support_avx512bf16_for_cpu = False
    layer = layer.to(device)
    dequantized = dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
    original = plain.weight.detach()
    rounding = float((dequantized - original.to(device)).abs().mean() / original.abs().mean())
    # Rounding to the 16 levels of NF4 costs 7 to 9 % of the size of the numbers.
    if not rounding < 0.15:
        raise Broken(f"NF4 on {device.type} is off by {rounding:.0%}")
    inputs = torch.randn(64, 256).to(device, dtype).requires_grad_()
    outputs = layer(inputs)
    expected = inputs.float() @ dequantized.T
    weight = torch.randn_like(expected)
    (gradient,) = torch.autograd.grad((outputs.float() * weight).sum(), inputs)
    error = max(_relative_error(outputs, expected), _relative_error(gradient, weight @ dequantized))
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-5
    if not error <= bound:
        raise Broken(f"the relative error of an NF4 layer on {device.type} is {error:.2g}, rounding explains {bound:g}")
    return f"rounding {rounding:.0%}, forward and backward relative error {error:.1g} on {device.type}"


def eight_bit_adam(_: object) -> str:
    """Check that bitsandbytes' 8-bit Adam moves parameters as PyTorch's 32-bit Adam does."""
    from bitsandbytes.optim import AdamW8bit

    torch.manual_seed(0)
    start, goal = torch.randn(2, 64, 4096, device="cuda")

    def optimize(optimizer_class: Any) -> Tensor:
        parameter = nn.Parameter(start.clone())
        optimizer = optimizer_class([parameter], lr=1e-2, weight_decay=0.0)
        for _ in range(20):
            parameter.grad = parameter.detach() - goal
            optimizer.step()
        return parameter.detach()

    result, expected = optimize(AdamW8bit), optimize(torch.optim.AdamW)
    error = float((result - expected).norm() / (expected - start).norm())
    figure = f"after 20 steps it differs from 32-bit Adam by {error:.2%} of the distance moved"
    if not error <= _EIGHT_BITS:
        raise Broken(f"{figure}, the bound is {_EIGHT_BITS:.0%}")
    return figure


class Difference(NamedTuple):
    """The largest differences between a model with fused layers and with its own."""

    logits: float
    gradients: float
    """Relative to the largest gradient of the same parameter, or to 0.1 where that is larger."""


def compare_liger(folder: Path, family: tiny.Family) -> Difference:
    """Compare a tiny model of the family with Liger's layers and with its own, on CUDA in fp32.

    Raises Broken when Liger replaced no layer.
    """
    cuda = torch.device("cuda")
    model = tiny.build(family, folder / family)
    plain = load_model(str(model), dtype=torch.float32, attn_implementation="sdpa").to(cuda)
    fused = copy.deepcopy(plain)
    apply_liger(fused, cuda)
    if not any("Liger" in type(module).__name__ or "Liger" in repr(module.forward) for module in fused.modules()):
        raise Broken(f"Liger has replaced no layer of {family}")
    tokens = torch.arange(40, device=cuda)[None] + 65
    logits, expected = fused(tokens, use_cache=False).logits, plain(tokens, use_cache=False).logits
    logits.square().mean().backward()
    expected.square().mean().backward()
    worst = 0.0
    for changed, original in zip(fused.parameters(), plain.parameters(), strict=True):
        if original.grad is not None and changed.grad is not None:
            scale = original.grad.abs().max().clamp_min(0.1)
            worst = max(worst, float((changed.grad - original.grad).abs().max() / scale))
        elif (original.grad is None) != (changed.grad is None):
            worst = float("inf")
    return Difference(float((logits - expected).abs().max()), worst)


def liger(folder: Path) -> str:
    """Compare logits and gradients of every family that Liger supports."""
    differences = {family: compare_liger(folder, family) for family in _LIGER_FAMILIES}
    for family, difference in differences.items():
        if not (difference.logits <= _LIGER_TOLERANCE and difference.gradients <= 10 * _LIGER_TOLERANCE):
            raise Broken(
                f"{family}: logits differ by {difference.logits:.2g}, gradients by {difference.gradients:.2g} of their "
                f"size; rounding is below {_LIGER_TOLERANCE:g} and {10 * _LIGER_TOLERANCE:g}"
            )
    return f"logits of {', '.join(differences)} differ by {max(d.logits for d in differences.values()):.1g}"


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.detach().float(), expected.detach().float()
    return float((actual - expected).norm() / expected.norm())
