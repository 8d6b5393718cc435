"""Weights of experts are read from the packed form of vLLM's CPU kernel as they were loaded."""

from __future__ import annotations

import pytest
import torch
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.platforms import current_platform

from vlmrl.rollout.expert_rows import unpack_experts

current_platform.import_kernels()
pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM's kernels for CPUs")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "padded"), [(48, 64), (64, 64), (96, 96)])
def test_packed_experts_are_read_as_they_were_loaded(dtype: torch.dtype, size: int, padded: int) -> None:
    up, down = torch.randn(3, 2, size, 32).to(dtype), torch.randn(3, 32, size).to(dtype)
    plain_up, plain_down = torch.zeros(3, 2, padded, 32, dtype=dtype), torch.zeros(3, 32, padded, dtype=dtype)
    plain_up[:, :, :size], plain_down[..., :size] = up, down
    packed = cpu_prepack_moe_weight(plain_up.flatten(1, 2), "vec")
    assert not torch.equal(packed, plain_up.flatten(1, 2)), "the kernel's layout is another"
    assert torch.equal(unpack_experts(packed, "vec", "w13_weight", size), up.flatten(1, 2))
    packed = cpu_prepack_moe_weight(plain_down, "vec")
    assert torch.equal(unpack_experts(packed, "vec", "w2_weight", size), down)
