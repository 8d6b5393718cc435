"""Read the weights of fused experts as vLLM's kernels hold them, in the layout in which they were loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

_UP, _DOWN = "w13_weight", "w2_weight"


def expert_product(module: nn.Module, name: str) -> tuple[int, Callable[[Tensor], Tensor]] | None:
    """Return the width of the experts' weight `name` and the function that multiplies with it: x, [rows of x, width] ->
    [rows of x, experts * rows of an expert]. None when the module has no such weight, or a kernel whose layout is not
    known here.

    Triton's kernel on GPUs holds what was loaded, vLLM's kernel for CPUs a permutation with padding. FlashInfer's
    kernels hold other layouts: those weights are not read.
    """
    method: Any = getattr(module, "quant_method", None)
    if type(method) is not UnquantizedFusedMoEMethod or name not in (_UP, _DOWN) or method.moe_kernel is None:
        return None
    size: int = method.moe.intermediate_size_per_partition
    width = size if name == _DOWN else getattr(module, name).shape[-1]
    if method.unquantized_backend == UnquantizedMoeBackend.TRITON:
        return width, lambda x: F.linear(x, getattr(module, name).flatten(0, 1))
    kernel = method.moe_kernel.fused_experts
    if not isinstance(kernel, CPUUnquantizedExperts) or kernel._use_zentorch:
        return None
    return width, lambda x: F.linear(x, unpack_experts(getattr(module, name), kernel.isa, name, size).flatten(0, 1))


def unpack_experts(packed: Tensor, isa: str, name: str, size: int) -> Tensor:
    """Undo vLLM's packing and padding for CPUs.

    Args:
        packed: [E, rows, columns], padded to a multiple of the kernel's block.
        isa: instruction set of the kernel.
        name: `w13_weight`, whose rows are the gate's and the up projection's, or `w2_weight`.
        size: channels inside an expert, without padding.
    """
    rows, columns = packed.shape[1:]
    plain = packed.flatten(1)[:, _positions(rows, columns, packed.dtype, isa)].view(packed.shape)
    if name == _DOWN:
        return plain[..., :size]
    gate, up = plain.chunk(2, dim=1)
    return torch.cat([gate[:, :size], up[:, :size]], dim=1)


@cache
def _positions(rows: int, columns: int, dtype: torch.dtype, isa: str) -> Tensor:
    """[rows * columns], the position of each number of an expert's weight in its packed form.

    Found by packing the numbers' indices, one byte at a time: bf16 is exact up to 256.
    """
    from vllm._custom_ops import cpu_prepack_moe_weight

    indices = torch.arange(rows * columns)
    origin = torch.zeros_like(indices)
    for shift in range(0, 32, 8):
        byte = ((indices >> shift) & 255).to(dtype).view(1, rows, columns)
        origin += cpu_prepack_moe_weight(byte, isa).flatten().long() << shift
    positions = torch.empty_like(indices)
    positions[origin] = indices
    return positions
