"""The CUDA kernel of packed attention is the same function as SDPA, sample by sample."""

import pytest
import torch
from torch import Tensor, nn

from vlmrl.models.attention import packed_attention

LENGTHS = [5, 130, 1, 64]
HEADS, KEY_HEADS, DIM = 8, 2, 64


def one_by_one(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Each sample by itself through SDPA in fp32: [1, T, H, d]."""
    answers = []
    for start, length in zip([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], LENGTHS, strict=False):
        q, k, v = (states[:, :, start : start + length].float() for states in (query, key, value))
        answers.append(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    return torch.cat(answers, dim=2).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_attention_equals_sdpa_on_each_sample_forward_and_backward(dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)

    def states(heads: int) -> Tensor:
        drawn = torch.randn(1, heads, sum(LENGTHS), DIM, device="cuda", generator=generator)
        return drawn.to(dtype).requires_grad_()

    query, key, value = states(HEADS), states(KEY_HEADS), states(KEY_HEADS)
    starts = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).int()
    packed, _ = packed_attention(
        nn.Identity(), query, key, value, None, cu_seq_lens_q=starts, max_length_q=max(LENGTHS), scaling=DIM**-0.5
    )
    wanted = one_by_one(query, key, value)
    # bf16 keeps 8 bits of a number's mantissa.
    close = {"atol": 2e-2, "rtol": 2e-2} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-4}
    torch.testing.assert_close(packed.float(), wanted, **close)
    weight = torch.randn(wanted.shape, device="cuda", generator=generator)
    found = torch.autograd.grad((packed.float() * weight).sum(), (query, key, value))
    expected = torch.autograd.grad((wanted * weight).sum(), (query, key, value))
    for gradient, other in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient.float(), other.float(), atol=10 * close["atol"], rtol=close["rtol"])
