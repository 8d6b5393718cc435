"""CUDA attention kernels, for packed samples and shared prompts, against a dense mask in fp32."""

import pytest
import torch

from vlmrl.commands.self_test.attention import HEAD_DIMS, PLANS, compare, compare_images

CUDA = torch.device("cuda")


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("spans", PLANS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_equals_a_dense_mask_forward_and_backward(
    dtype: torch.dtype, spans: str, window: int | None, dim: int
) -> None:
    assert max(compare(dim, dtype, PLANS[spans], CUDA, window=window)) <= 1


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_image_attention_is_bidirectional_in_half_precision(dim: int) -> None:
    assert max(compare_images(dim, torch.bfloat16, CUDA)) <= 1
