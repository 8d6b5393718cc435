"""The kernels that carry out an attention plan: PyTorch's varlen on CUDA, its flash kernel on CPU, masks anywhere.

All take q [T, H, d] and k, v [T, Hkv, d], the tokens of a pack laid end to end, and return [T, H, d].
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vlmrl.models.attention_plan import Look, Plan, key_rows


class How(NamedTuple):
    """What a model says of its attention."""

    scaling: float | None = None
    dropout: float = 0.0
    window: int | None = None
    """A token sees itself and `window - 1` before it; None: all before it."""


def attend(q: Tensor, k: Tensor, v: Tensor, plan: Plan, how: How) -> Tensor:
    """Attention by the kernel that suits device and type."""
    if takes_varlen(q, how):
        return by_varlen(q, k, v, plan, how)
    if q.is_cuda or how.dropout or how.window is not None:
        return by_mask(q, k, v, plan, how)
    attended = _Flash.apply(q, k, v, plan, how.scaling)  # type: ignore[no-untyped-call]
    assert isinstance(attended, Tensor)
    return attended


def takes_varlen(q: Tensor, how: How) -> bool:
    """Whether PyTorch's kernel for spans of different lengths can do it: on CUDA, in half precision."""
    return q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and not how.dropout


class Bounds(NamedTuple):
    """Where spans begin and end, for `varlen`."""

    queries: Tensor
    """[n + 1] int32"""
    keys: Tensor
    """[n + 1] int32"""
    most_queries: int
    most_keys: int


def varlen(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, how: How, *, causal: bool) -> Tensor:
    """One call for all spans; where a span has fewer queries than keys, they are the last ones."""
    from torch.nn.attention.varlen import varlen_attn

    behind = -1 if how.window is None else how.window - 1
    attended = varlen_attn(
        *(q, k, v, *bounds),
        scale=how.scaling,
        window_size=(behind, 0 if causal else -1),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(attended, Tensor), "only the attended values were asked for"
    return attended


def by_varlen(q: Tensor, k: Tensor, v: Tensor, plan: Plan, how: How) -> Tensor:
    """A prompt's keys are laid before those of each of its answers."""
    bounds, index = _laid(plan, q.device)
    if index is not None:
        k, v = k.index_select(0, index), v.index_select(0, index)
    return varlen(q, k, v, bounds, how, causal=plan.causal)


@lru_cache(maxsize=8)
def _laid(plan: Plan, device: torch.device) -> tuple[Bounds, Tensor | None]:
    """The same for all layers of a pass: bounds, and which rows of the keys go where."""
    rows, num_keys = key_rows(plan.spans)
    num_queries = [span.length for span in plan.spans]
    index = torch.from_numpy(rows).to(device) if plan.before else None
    return Bounds(_bounds(num_queries, device), _bounds(num_keys, device), max(num_queries), max(num_keys)), index


def by_mask(q: Tensor, k: Tensor, v: Tensor, plan: Plan, how: How) -> Tensor:
    """SDPA with a mask for every pair of lengths: the slow yardstick, and what works anywhere."""
    rows, num_keys = key_rows(plan.spans)
    starts = np.cumsum([0, *num_keys])
    alike: dict[tuple[int, int], list[int]] = {}
    for i, span in enumerate(plan.spans):
        alike.setdefault((span.length, num_keys[i]), []).append(i)
    attended, places = [], []
    for (length, width), members in alike.items():
        asking = np.stack([np.arange(plan.spans[i].start, plan.spans[i].start + length) for i in members])
        asked = np.stack([rows[starts[i] : starts[i] + width] for i in members])
        found = nn.functional.scaled_dot_product_attention(
            _gather(q, asking),
            _gather(k, asked),
            _gather(v, asked),
            attn_mask=visible(length, width, causal=plan.causal, window=how.window, device=q.device),
            dropout_p=how.dropout,
            scale=how.scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        attended.append(found.transpose(1, 2).flatten(0, 1))
        places.append(asking.ravel())
    order = torch.from_numpy(np.argsort(np.concatenate(places))).to(q.device)
    return torch.cat(attended).index_select(0, order)


def visible(length: int, width: int, *, causal: bool, window: int | None, device: torch.device) -> Tensor | None:
    """[length, width] True where a query may look; the queries are the last of the keys. None: they see everything."""
    if not causal:
        return None
    offset = torch.arange(width - length, width, device=device)[:, None] - torch.arange(width, device=device)
    return (offset >= 0) if window is None else (offset >= 0) & (offset < window)


def _gather(flat: Tensor, rows: Any) -> Tensor:
    """[T, H, d] -> [n, H, m, d]"""
    index = torch.from_numpy(rows.ravel()).to(flat.device)
    return flat.index_select(0, index).reshape(*rows.shape, *flat.shape[1:]).transpose(1, 2)


def _bounds(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32).to(device)


class _Flash(torch.autograd.Function):
    """PyTorch's flash kernel for CPU, once per look of a plan; what a token finds in several looks is merged by the
    logarithms of their sums of exponentials.

    The kernel's backward pass recomputes the probabilities from the logarithm that it is given. Given that of the whole
    row, and the whole output, it returns the exact share of one look, so that nothing is copied per answer.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float | None) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        exact = torch.float64 if q.dtype == torch.float64 else torch.float32
        total = torch.empty(q.shape[:2], dtype=exact)
        for look in plan.own:
            found, weight = _kernel(look, q, k, v, scale)
            look.own.put(out, found)
            look.own.put(total, weight)
        for look in plan.before:
            found, weight = _kernel(look, q, k, v, scale)
            own, own_weight = look.own.take(out)[0], look.own.take(total)[0]
            both = torch.logaddexp(own_weight, weight)
            merged = own * (own_weight - both).exp()[..., None] + found * (weight - both).exp()[..., None]
            look.own.put(out, merged.to(out.dtype))
            look.own.put(total, both)
        ctx.save_for_backward(q, k, v, out, total)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, total = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        d_q, d_k, d_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for look in (*ctx.plan.own, *ctx.plan.before):
            of_out = look.queries.take(gradient)
            if look.is_own is not None:
                # Stand-ins have no gradient, so that nothing of them reaches a key.
                of_out = of_out * look.is_own.view(*look.queries.shape, 1, 1)
            asking, asked, values, found = (
                rows.take(states).transpose(1, 2)
                for rows, states in ((look.queries, q), (look.keys, k), (look.keys, v), (look.queries, out))
            )
            shares = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                of_out.transpose(1, 2),
                asking,
                asked,
                values,
                found,
                look.queries.take(total).transpose(1, 2),
                0.0,
                look.causal,
                scale=ctx.scale,
            )
            for rows, sums, share in zip((look.queries, look.keys, look.keys), (d_q, d_k, d_v), shares, strict=True):
                rows.add(sums, share.transpose(1, 2))
        return d_q, d_k, d_v, None, None


def _kernel(look: Look, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """What each query finds, [number, H, d], and the logarithm of its sum of exponentials, [number, H]."""
    asking, asked, values = (
        rows.take(states).transpose(1, 2) for rows, states in ((look.queries, q), (look.keys, k), (look.keys, v))
    )
    found, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        asking, asked, values, 0.0, look.causal, scale=scale
    )
    return look.without_stand_ins(found.transpose(1, 2)), look.without_stand_ins(weight.transpose(1, 2))
