"""Check packed attention, as runs on this machine compute it, against a dense mask in fp32, forward and backward."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vlmrl.commands.self_test.outcome import Broken
from vlmrl.models.attention import packed_attention
from vlmrl.models.attention_plan import AttentionPlan, Span, plan_attention, spans_of

HEADS, KEY_HEADS = 8, 2
HEAD_DIMS = (64, 72, 80, 128)
"""Head dims of the supported families' language models and vision towers."""
PLANS = {
    "samples": spans_of([5, 130, 1, 64]),
    "a group, a sample, another group": (
        *(Span(0, 70), Span(70, 33, 0), Span(103, 1, 0), Span(104, 128, 0)),
        Span(232, 17),
        *(Span(249, 3), Span(252, 65, 5)),
    ),
}
IMAGES = (16, 64, 4, 36)
"""Patches of each image in a vision tower, where attention is not causal."""
TOLERANCES = {torch.bfloat16: (2e-2, 2e-2), torch.float32: (1e-5, 1e-4)}
"""Absolute and relative: the mantissa of bf16 has 8 bits."""
_GRADIENT_FACTOR = 10
"""A gradient sums over all tokens that attend to one: its tolerance is this many times a value's."""


class Errors(NamedTuple):
    """The largest errors of packed attention, as multiples of the tolerance: above 1 the check fails."""

    forward: float
    backward: float


def compare(
    dim: int, dtype: torch.dtype, spans: tuple[Span, ...], where: torch.device, *, window: int | None = None
) -> Errors:
    """Compare attention of a language model, with heads of `dim` channels, grouped as in GQA, over a pack's spans."""
    layout = plan_attention(spans, causal=True)
    query, key, value = _states(layout.length, dim, dtype, where)
    output, _ = packed_attention(
        nn.Identity(), query, key, value, None, attention_plan=layout, scaling=dim**-0.5, sliding_window=window
    )
    return _errors(output, dense(query, key, value, allowed(layout, window).to(where)), (query, key, value))


def compare_images(dim: int, dtype: torch.dtype, where: torch.device) -> Errors:
    """Compare attention of a vision tower over all images at once: as many key heads as heads, not causal."""
    query, key, value = _states(sum(IMAGES), dim, dtype, where, key_heads=HEADS)
    starts = torch.tensor([0, *IMAGES], device=where).cumsum(0).int()
    output, _ = packed_attention(
        nn.Identity(), query, key, value, None, is_causal=False, cu_seq_lens_q=starts, max_length_q=max(IMAGES)
    )
    layout = plan_attention(spans_of(list(IMAGES)), causal=False)
    return _errors(output, dense(query, key, value, allowed(layout, None).to(where)), (query, key, value))


def check(_: object) -> str:
    """Compare every head dim and layout, in bf16 and fp32. Raise Broken, naming it, at the first that fails."""
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    worst = 0.0
    for dtype in (torch.bfloat16, torch.float32):
        for dim in HEAD_DIMS:
            for name, spans in PLANS.items():
                worst = max(worst, _largest(compare(dim, dtype, spans, where), f"{name}, head dim {dim}, {dtype}"))
            worst = max(worst, _largest(compare_images(dim, dtype, where), f"images, head dim {dim}, {dtype}"))
    return f"at most {worst:.2f} of the tolerance on {where.type}, head dims {', '.join(map(str, HEAD_DIMS))}"


def allowed(layout: AttentionPlan, window: int | None) -> Tensor:
    """[T, T] mask, True where the token of the row attends to that of the column."""
    number = np.repeat(np.arange(len(layout.spans)), [span.length for span in layout.spans])
    parent = np.array([-1 if span.parent is None else span.parent for span in layout.spans])[number]
    before = np.array([0 if span.parent is None else layout.spans[span.parent].length for span in layout.spans])
    starts = np.array([span.start for span in layout.spans])
    position = np.arange(layout.length) - starts[number] + before[number]
    mask = (number[:, None] == number) | (parent[:, None] == number)
    if layout.causal:
        distance = position[:, None] - position
        mask &= (distance >= 0) & (distance < (window or layout.length))
    return torch.from_numpy(mask)


def dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention with a dense mask in fp32, [1, H, T, d] -> [1, T, H, d]."""
    q, k, v = query.float(), key.float(), value.float()
    attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return attended.transpose(1, 2)


def _states(
    length: int, dim: int, dtype: torch.dtype, where: torch.device, *, key_heads: int = KEY_HEADS
) -> tuple[Tensor, Tensor, Tensor]:
    """Random query, key and value, [1, H, T, d], equal on every device."""
    generator = torch.Generator().manual_seed(0)

    def random(heads: int) -> Tensor:
        return torch.randn(1, heads, length, dim, generator=generator).to(where, dtype).requires_grad_()

    return random(HEADS), random(key_heads), random(key_heads)


def _errors(output: Tensor, expected: Tensor, states: tuple[Tensor, Tensor, Tensor]) -> Errors:
    absolute, relative = TOLERANCES[output.dtype]
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(expected.device)
    gradients = torch.autograd.grad((output.float() * weight).sum(), states)
    expected_gradients = torch.autograd.grad((expected * weight).sum(), states)
    return Errors(
        _excess(output, expected, absolute, relative),
        max(
            _excess(gradient, reference, _GRADIENT_FACTOR * absolute, relative)
            for gradient, reference in zip(gradients, expected_gradients, strict=True)
        ),
    )


def _excess(actual: Tensor, expected: Tensor, absolute: float, relative: float) -> float:
    """Return the largest error as a multiple of the tolerance; infinite if any is not finite."""
    actual, expected = actual.detach().float(), expected.detach().float()
    error = (actual - expected).abs() / (absolute + relative * expected.abs())
    return float(error.max()) if bool(torch.isfinite(error).all()) else float("inf")


def _largest(errors: Errors, case: str) -> float:
    """Return the larger error. Raises Broken when it exceeds the tolerance."""
    worst = max(errors)
    if not worst <= 1:
        direction = "forward" if errors.forward > 1 else "backward"
        raise Broken(f"{case}: {worst:.1f} times the tolerance {direction}")
    return worst
