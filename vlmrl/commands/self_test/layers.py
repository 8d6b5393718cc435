"""Layers and optimizers of other libraries against plain PyTorch: NF4 layers, 8-bit Adam, Liger's fused layers."""

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
"""How far parameters may be from those of 32-bit Adam, relative to how far they went."""


def nf4(_: object) -> str:
    """A 4-bit layer computes with the numbers that its bits stand for, and passes their gradient on to its input."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    torch.manual_seed(0)
    plain = nn.Linear(256, 128, bias=False)
    layer = Linear4bit(256, 128, bias=False, compute_dtype=dtype, quant_type="nf4", compress_statistics=True)
    layer.load_state_dict(plain.state_dict())
    # As `models.quantize.settle` does: the first pass would repack the weight on CPUs that can multiply bf16.
    layer.support_avx512bf16_for_cpu = False
    layer = layer.to(where)
    numbers = dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
    rounded = float((numbers - plain.weight.detach().to(where)).abs().mean() / plain.weight.detach().abs().mean())
    # Rounding numbers to the 16 levels of NF4 costs 7 to 9 % of their size.
    if not rounded < 0.15:
        raise Broken(f"NF4 on {where.type} is off by {rounded:.0%}")
    given = torch.randn(64, 256).to(where, dtype).requires_grad_()
    found = layer(given)
    wanted = given.float() @ numbers.T
    weight = torch.randn_like(wanted)
    (gradient,) = torch.autograd.grad((found.float() * weight).sum(), given)
    error = max(_relative(found, wanted), _relative(gradient, weight @ numbers))
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-5
    if not error <= bound:
        raise Broken(f"an NF4 layer on {where.type} is off by {error:.2g} of its values, at most {bound:g} is rounding")
    return f"rounding {rounded:.0%}, forward and backward off by {error:.1g} of the values on {where.type}"


def eight_bit_adam(_: object) -> str:
    """bitsandbytes' 8-bit Adam goes where PyTorch's goes."""
    from bitsandbytes.optim import AdamW8bit

    torch.manual_seed(0)
    start, goal = torch.randn(2, 64, 4096, device="cuda")

    def walked(make: Any) -> Tensor:
        at = nn.Parameter(start.clone())
        optimizer = make([at], lr=1e-2, weight_decay=0.0)
        for _ in range(20):
            at.grad = at.detach() - goal
            optimizer.step()
        return at.detach()

    far, wanted = walked(AdamW8bit), walked(torch.optim.AdamW)
    error = float((far - wanted).norm() / (wanted - start).norm())
    if not error <= _EIGHT_BITS:
        raise Broken(
            f"after 20 steps it is {error:.1%} of the way from where 32-bit Adam is, at most {_EIGHT_BITS:.0%}"
        )
    return f"after 20 steps {error:.2%} of the way from where 32-bit Adam is"


class Difference(NamedTuple):
    """How far a model with fused layers is from the model's own, at most."""

    logits: float
    gradients: float
    """Relative to the largest gradient of the same parameter, or to 0.1 where that is larger."""


def compare_liger(folder: Path, family: tiny.Family) -> Difference:
    """A tiny model of the family with Liger's layers and with its own, on CUDA in fp32.

    Raises Broken when Liger has replaced nothing.
    """
    cuda = torch.device("cuda")
    model = tiny.build(family, folder / family)
    plain = load_model(str(model), dtype=torch.float32, attn_implementation="sdpa").to(cuda)
    fused = copy.deepcopy(plain)
    apply_liger(fused, cuda)
    if not any("Liger" in type(module).__name__ or "Liger" in repr(module.forward) for module in fused.modules()):
        raise Broken(f"Liger has replaced no layer of {family}")
    tokens = torch.arange(40, device=cuda)[None] + 65
    found, wanted = fused(tokens, use_cache=False).logits, plain(tokens, use_cache=False).logits
    found.square().mean().backward()
    wanted.square().mean().backward()
    worst = 0.0
    for mine, other in zip(fused.parameters(), plain.parameters(), strict=True):
        if other.grad is not None and mine.grad is not None:
            worst = max(worst, float((mine.grad - other.grad).abs().max() / other.grad.abs().max().clamp_min(0.1)))
        elif (other.grad is None) != (mine.grad is None):
            worst = float("inf")
    return Difference(float((found - wanted).abs().max()), worst)


def liger(folder: Path) -> str:
    """Logits and gradients of every family that Liger knows."""
    found = {family: compare_liger(folder, family) for family in _LIGER_FAMILIES}
    for family, difference in found.items():
        if not (difference.logits <= _LIGER_TOLERANCE and difference.gradients <= 10 * _LIGER_TOLERANCE):
            raise Broken(
                f"{family}: logits differ by {difference.logits:.2g}, gradients by {difference.gradients:.2g} of their "
                f"size; rounding is below {_LIGER_TOLERANCE:g} and {10 * _LIGER_TOLERANCE:g}"
            )
    return f"logits of {', '.join(found)} differ by {max(d.logits for d in found.values()):.1g}"


def _relative(found: Tensor, wanted: Tensor) -> float:
    one, other = found.detach().float(), wanted.detach().float()
    return float((one - other).norm() / other.norm())
