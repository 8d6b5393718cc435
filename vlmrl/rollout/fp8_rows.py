"""Rows of linear layers that vLLM quantizes to FP8 while it loads them (`vllm.quantization`): for the read-back.

Each row of a weight has a scale, its largest number over 448, and is divided by it and rounded to e4m3 (vLLM's
`Fp8PtpcOnlineLinearMethod`, again with every reload). So what was sent is rounded in the same way, and the layer's
numbers times their scales must equal it bit for bit. Read in vLLM 0.32; not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_METHOD = "Fp8PtpcOnlineLinearMethod"
_KERNEL = "Cutlass"
"""vLLM's kernels for Ada and Hopper. They hold the transposed weight, padded; others may pack it."""
_MAX = 448.0
"""The largest number of e4m3."""
_SMALLEST_SCALE = 1.0 / (_MAX * 512)
_ROWS_AT_ONCE = 2048


def is_fp8(layer: nn.Module) -> bool:
    """Whether a linear layer holds FP8 rows that `product` can read: those of a row-parallel layer in several workers
    have a common scale, which no worker can compute from its columns."""
    method: Any = getattr(layer, "quant_method", None)
    if type(method).__name__ != _METHOD or not type(method.fp8_linear).__name__.startswith(_KERNEL):
        return False
    rows, columns = int(layer.output_size_per_partition), int(layer.input_size_per_partition)  # type: ignore[arg-type]
    weight, scale = getattr(layer, "weight", None), getattr(layer, "weight_scale", None)
    if not isinstance(weight, Tensor) or not isinstance(scale, Tensor) or columns != layer.input_size:
        return False
    is_transposed = weight.dim() == 2 and weight.shape[0] >= columns and weight.shape[1] >= rows
    return weight.dtype == torch.float8_e4m3fn and is_transposed and scale.numel() >= rows


def rounded(rows: Tensor) -> Tensor:
    """Round whole rows of a weight, [R, D], to what an FP8 layer holds of them; in their own dtype."""
    low, high = rows.aminmax(dim=-1, keepdim=True)
    largest = torch.maximum(low.abs(), high.abs()).float()
    # As in vLLM: by a tensor, because a Python number would become a product with its reciprocal.
    scale = (largest / torch.full((), _MAX, device=rows.device)).clamp_min(_SMALLEST_SCALE)
    held = (rows / scale).clamp_(-_MAX, _MAX).to(torch.float8_e4m3fn)
    return (held.float() * scale).to(rows.dtype)


def product(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a function that multiplies x, [N, D], with the weight that the layer holds, [R, D]."""
    held: Any = layer

    def read(x: Tensor) -> Tensor:
        rows, columns = held.output_size_per_partition, held.input_size_per_partition
        weight, scale = held.weight[:columns, :rows], held.weight_scale.reshape(-1)[:rows, None]
        parts = []
        for first in range(0, rows, _ROWS_AT_ONCE):
            some = slice(first, first + _ROWS_AT_ONCE)
            parts.append(F.linear(x, (weight[:, some].t().float() * scale[some].float()).to(x.dtype)))
        return torch.cat(parts, dim=1)

    return read
