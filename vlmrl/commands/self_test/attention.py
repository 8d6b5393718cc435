"""Packed attention, as this machine's runs would compute it, against a dense mask in fp32, forward and backward."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vlmrl.commands.self_test.outcome import Broken
from vlmrl.models.attention import packed_attention
from vlmrl.models.attention_plan import Plan, Span, plan, spans_of

HEADS, KEY_HEADS = 8, 2
HEAD_DIMS = (64, 72, 80, 128)
"""Of the language models and vision towers of the families that we serve."""
PLANS = {
    "samples": spans_of([5, 130, 1, 64]),
    "a group, a sample, another group": (
        *(Span(0, 70), Span(70, 33, 0), Span(103, 1, 0), Span(104, 128, 0)),
        Span(232, 17),
        *(Span(249, 3), Span(252, 65, 5)),
    ),
}
IMAGES = (16, 64, 4, 36)
"""Patches of the images of a vision tower, which look both ways."""
TOLERANCES = {torch.bfloat16: (2e-2, 2e-2), torch.float32: (1e-5, 1e-4)}
"""Of a value, and relative to it: bf16 keeps 8 bits of a number's mantissa."""
_SUMS = 10
"""A gradient is a sum over the tokens that look at one: its error is so many times that of a value."""


class Errors(NamedTuple):
    """How far packed attention is from the yardstick, at most, in tolerances: above 1 it is another function."""

    forward: float
    backward: float


def compare(
    dim: int, dtype: torch.dtype, spans: tuple[Span, ...], where: torch.device, *, window: int | None = None
) -> Errors:
    """Attention of a language model with heads of `dim` channels, grouped as in GQA, over the spans of a pack."""
    over = plan(spans, causal=True)
    query, key, value = _states(over.length, dim, dtype, where)
    found, _ = packed_attention(
        nn.Identity(), query, key, value, None, attention_plan=over, scaling=dim**-0.5, sliding_window=window
    )
    return _errors(found, dense(query, key, value, allowed(over, window).to(where)), (query, key, value))


def compare_images(dim: int, dtype: torch.dtype, where: torch.device) -> Errors:
    """Attention of a vision tower, all images at once: as many key heads as heads, no token waits for another."""
    query, key, value = _states(sum(IMAGES), dim, dtype, where, key_heads=HEADS)
    starts = torch.tensor([0, *IMAGES], device=where).cumsum(0).int()
    found, _ = packed_attention(
        nn.Identity(), query, key, value, None, is_causal=False, cu_seq_lens_q=starts, max_length_q=max(IMAGES)
    )
    over = plan(spans_of(list(IMAGES)), causal=False)
    return _errors(found, dense(query, key, value, allowed(over, None).to(where)), (query, key, value))


def check(_: object) -> str:
    """Every head dim and layout, in the types that runs compute in. The first that is off names itself."""
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    worst = 0.0
    for dtype in (torch.bfloat16, torch.float32):
        for dim in HEAD_DIMS:
            for name, spans in PLANS.items():
                worst = max(worst, _judged(compare(dim, dtype, spans, where), f"{name}, head dim {dim}, {dtype}"))
            worst = max(worst, _judged(compare_images(dim, dtype, where), f"images, head dim {dim}, {dtype}"))
    return f"at most {worst:.2f} of the tolerance on {where.type}, head dims {', '.join(map(str, HEAD_DIMS))}"


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
    attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return attended.transpose(1, 2)


def _states(
    length: int, dim: int, dtype: torch.dtype, where: torch.device, *, key_heads: int = KEY_HEADS
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, [1, H, T, d]; the same numbers on every device."""
    generator = torch.Generator().manual_seed(0)

    def drawn(heads: int) -> Tensor:
        return torch.randn(1, heads, length, dim, generator=generator).to(where, dtype).requires_grad_()

    return drawn(HEADS), drawn(key_heads), drawn(key_heads)


def _errors(found: Tensor, wanted: Tensor, states: tuple[Tensor, Tensor, Tensor]) -> Errors:
    absolute, relative = TOLERANCES[found.dtype]
    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)).to(wanted.device)
    gradients = torch.autograd.grad((found.float() * weight).sum(), states)
    expected = torch.autograd.grad((wanted * weight).sum(), states)
    return Errors(
        _excess(found, wanted, absolute, relative),
        max(_excess(g, e, _SUMS * absolute, relative) for g, e in zip(gradients, expected, strict=True)),
    )


def _excess(found: Tensor, wanted: Tensor, absolute: float, relative: float) -> float:
    """The largest difference in units of what is allowed; infinite where it is not a number."""
    one, other = found.detach().float(), wanted.detach().float()
    error = (one - other).abs() / (absolute + relative * other.abs())
    return float(error.max()) if bool(torch.isfinite(error).all()) else float("inf")


def _judged(errors: Errors, what: str) -> float:
    worst = max(errors)
    if not worst <= 1:
        forward = errors.forward > 1
        raise Broken(f"{what}: {worst:.1f} times the tolerance {'forward' if forward else 'backward'}")
    return worst
