"""The CUDA kernels of attention, packed samples and shared prompts alike, against a dense mask in fp32."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vlmrl.models.attention import packed_attention
from vlmrl.models.attention_plan import Plan, Span, plan, spans_of

HEADS, KEY_HEADS, DIM = 8, 2, 64
PLANS = {
    "samples": spans_of([5, 130, 1, 64]),
    "a group, a sample, another group": (
        *(Span(0, 70), Span(70, 33, 0), Span(103, 1, 0), Span(104, 128, 0)),
        Span(232, 17),
        *(Span(249, 3), Span(252, 65, 5)),
    ),
}


def allowed(over: Plan, window: int | None) -> Tensor:
    """[T, T] True where a token may look."""
    number = np.repeat(np.arange(len(over.spans)), [span.length for span in over.spans])
    parent = np.array([-1 if span.parent is None else span.parent for span in over.spans])[number]
    before = np.array([0 if span.parent is None else over.spans[span.parent].length for span in over.spans])
    starts = np.array([span.start for span in over.spans])
    position = np.arange(over.length) - starts[number] + before[number]
    is_seen = (number[:, None] == number) | (parent[:, None] == number)
    if over.causal:
        distance = position[:, None] - position
        is_seen &= (distance >= 0) & (distance < (window or over.length))
    return torch.from_numpy(is_seen)


def dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """[1, H, T, d] -> [1, T, H, d], in fp32."""
    q, k, v = query.float(), key.float(), value.float()
    return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("spans", PLANS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_equals_that_of_a_dense_mask_forward_and_backward(
    dtype: torch.dtype, spans: str, window: int | None
) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    over = plan(PLANS[spans], causal=True)

    def states(heads: int) -> Tensor:
        drawn = torch.randn(1, heads, over.length, DIM, device="cuda", generator=generator)
        return drawn.to(dtype).requires_grad_()

    query, key, value = states(HEADS), states(KEY_HEADS), states(KEY_HEADS)
    found, _ = packed_attention(
        nn.Identity(), query, key, value, None, attention_plan=over, scaling=DIM**-0.5, sliding_window=window
    )
    wanted = dense(query, key, value, allowed(over, window).cuda())
    # bf16 keeps 8 bits of a number's mantissa.
    close = {"atol": 2e-2, "rtol": 2e-2} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-4}
    torch.testing.assert_close(found.float(), wanted, **close)
    weight = torch.randn(wanted.shape, device="cuda", generator=generator)
    gradients = torch.autograd.grad((found.float() * weight).sum(), (query, key, value))
    expected = torch.autograd.grad((wanted * weight).sum(), (query, key, value))
    for gradient, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient.float(), other.float(), atol=10 * close["atol"], rtol=close["rtol"])


def test_images_look_both_ways_on_half_precision() -> None:
    lengths = [16, 64, 4, 36]
    generator = torch.Generator("cuda").manual_seed(0)
    query, key, value = (
        torch.randn(1, 8, sum(lengths), DIM, device="cuda", generator=generator).bfloat16() for _ in range(3)
    )
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    found, _ = packed_attention(
        nn.Identity(), query, key, value, None, is_causal=False, cu_seq_lens_q=starts, max_length_q=max(lengths)
    )
    over = plan(spans_of(lengths), causal=False)
    wanted = dense(query, key, value, allowed(over, None).cuda())
    torch.testing.assert_close(found.float(), wanted, atol=2e-2, rtol=2e-2)
