"""Kernels for an attention plan: PyTorch's varlen on CUDA, its flash kernel on CPU, SDPA with masks anywhere.

All take q [T, H, d] and k, v [T, Hkv, d], the tokens of a pack laid end to end, and return [T, H, d].
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vlmrl.models.attention_plan import AttentionCall, AttentionPlan, key_rows


class AttentionOptions(NamedTuple):
    """Attention settings of a model's layer."""

    scaling: float | None = None
    dropout: float = 0.0
    window: int | None = None
    """A token attends to itself and the `window - 1` tokens before it; None: to all before it."""


def attend(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, options: AttentionOptions) -> Tensor:
    """Compute attention with the kernel for this device and dtype."""
    if takes_varlen(q, options) and not plan.has_blocks:
        return by_varlen(q, k, v, plan, options)
    if q.is_cuda or options.dropout or options.window is not None:
        return by_mask(q, k, v, plan, options)
    output = _Flash.apply(q, k, v, plan, options.scaling)  # type: ignore[no-untyped-call]
    assert isinstance(output, Tensor)
    return output


def takes_varlen(q: Tensor, options: AttentionOptions) -> bool:
    """Whether PyTorch's kernel for spans of different lengths applies: on CUDA, in half precision, without dropout."""
    return q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and not options.dropout


class Bounds(NamedTuple):
    """Cumulative lengths of n spans, for `varlen`."""

    queries: Tensor
    """[n + 1] int32"""
    keys: Tensor
    """[n + 1] int32"""
    max_queries: int
    max_keys: int


def varlen(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, options: AttentionOptions, *, causal: bool) -> Tensor:
    """Compute all spans in one call. The queries of a span with fewer queries than keys are at the end of its keys."""
    from torch.nn.attention.varlen import varlen_attn

    lookback = -1 if options.window is None else options.window - 1
    output = varlen_attn(
        *(q, k, v, *bounds),
        scale=options.scaling,
        window_size=(lookback, 0 if causal else -1),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(output, Tensor), "varlen_attn returns a tuple only on request"
    return output


def by_varlen(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, options: AttentionOptions) -> Tensor:
    """Call `varlen` with a prompt's keys copied before those of each of its responses."""
    bounds, index = _varlen_layout(plan, q.device)
    if index is not None:
        k, v = k.index_select(0, index), v.index_select(0, index)
    return varlen(q, k, v, bounds, options, causal=plan.causal)


@lru_cache(maxsize=8)
def _varlen_layout(plan: AttentionPlan, device: torch.device) -> tuple[Bounds, Tensor | None]:
    """Bounds and rows of the keys. Cached: they are the same for all layers of a pass."""
    rows, num_keys = key_rows(plan.spans)
    num_queries = [span.length for span in plan.spans]
    index = torch.from_numpy(rows).to(device) if plan.to_parents else None
    return Bounds(_bounds(num_queries, device), _bounds(num_keys, device), max(num_queries), max(num_keys)), index


def by_mask(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, options: AttentionOptions) -> Tensor:
    """Call SDPA with a mask for every pair of lengths: slow, but it runs anywhere; the baseline of the tests."""
    rows, num_keys = key_rows(plan.spans)
    starts = np.cumsum([0, *num_keys])
    by_shape: dict[tuple[int, int, tuple[tuple[int, int], ...]], list[int]] = {}
    for i, span in enumerate(plan.spans):
        by_shape.setdefault((span.length, num_keys[i], span.blocks), []).append(i)
    outputs, output_rows = [], []
    for (length, width, blocks), members in by_shape.items():
        query_index = np.stack([np.arange(plan.spans[i].start, plan.spans[i].start + length) for i in members])
        key_index = np.stack([rows[starts[i] : starts[i] + width] for i in members])
        output = nn.functional.scaled_dot_product_attention(
            _gather(q, query_index),
            _gather(k, key_index),
            _gather(v, key_index),
            attn_mask=visible(length, width, causal=plan.causal, window=options.window, device=q.device, blocks=blocks),
            dropout_p=options.dropout,
            scale=options.scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
        output_rows.append(query_index.ravel())
    order = torch.from_numpy(np.argsort(np.concatenate(output_rows))).to(q.device)
    return torch.cat(outputs).index_select(0, order)


def visible(
    length: int,
    width: int,
    *,
    causal: bool,
    window: int | None,
    device: torch.device,
    blocks: tuple[tuple[int, int], ...] = (),
) -> Tensor | None:
    """[length, width] mask, True where a query attends; the queries are at the end of the keys. None: no mask.

    A window holds for `blocks` too (`Span.blocks`), of which it hides the first tokens from the last ones.
    """
    if not causal:
        return None
    offset = torch.arange(width - length, width, device=device)[:, None] - torch.arange(width, device=device)
    mask = offset >= 0
    for first, size in blocks:
        mask[first : first + size, width - length + first : width - length + first + size] = True
    return mask if window is None else mask & (offset < window)


def _gather(flat: Tensor, rows: Any) -> Tensor:
    """[T, H, d] -> [n, H, m, d]"""
    index = torch.from_numpy(rows.ravel()).to(flat.device)
    return flat.index_select(0, index).reshape(*rows.shape, *flat.shape[1:]).transpose(1, 2)


def _bounds(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32).to(device)


class _Flash(torch.autograd.Function):
    """PyTorch's flash kernel for CPU, once per call of a plan. A token's outputs of several calls are merged by their
    log-sum-exps.

    The kernel's backward pass recomputes the probabilities from the log-sum-exp that it is given. Given that of the
    merged row, and the merged output, it returns the exact gradient of one call, so that no prompt is copied per
    response.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float | None) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        exact = torch.float64 if q.dtype == torch.float64 else torch.float32
        lse = torch.empty(q.shape[:2], dtype=exact)
        for call in plan.within_spans:
            call_out, call_lse = _kernel(call, q, k, v, scale)
            call.outputs.put(out, call_out)
            call.outputs.put(lse, call_lse)
        for call in (*plan.to_earlier, *plan.to_parents):
            call_out, call_lse = _kernel(call, q, k, v, scale)
            span_out, span_lse = call.outputs.take(out)[0], call.outputs.take(lse)[0]
            both = torch.logaddexp(span_lse, call_lse)
            merged = span_out * (span_lse - both).exp()[..., None] + call_out * (call_lse - both).exp()[..., None]
            call.outputs.put(out, merged.to(out.dtype))
            call.outputs.put(lse, both)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        d_out = gradients[0].contiguous()
        d_q, d_k, d_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for call in (*ctx.plan.within_spans, *ctx.plan.to_earlier, *ctx.plan.to_parents):
            call_d_out = call.queries.take(d_out)
            if call.is_real is not None:
                # Padding must not add to the gradients of the keys.
                call_d_out = call_d_out * call.is_real.view(*call.queries.shape, 1, 1)
            call_q, call_k, call_v, call_out = (
                rows.take(states).transpose(1, 2)
                for rows, states in ((call.queries, q), (call.keys, k), (call.keys, v), (call.queries, out))
            )
            shares = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                call_d_out.transpose(1, 2),
                call_q,
                call_k,
                call_v,
                call_out,
                call.queries.take(lse).transpose(1, 2),
                0.0,
                call.causal,
                scale=ctx.scale,
            )
            for rows, sums, share in zip((call.queries, call.keys, call.keys), (d_q, d_k, d_v), shares, strict=True):
                rows.add(sums, share.transpose(1, 2))
        return d_q, d_k, d_v, None, None


def _kernel(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Run one call; returns outputs [queries, H, d] and log-sum-exps [queries, H], without padding."""
    call_q, call_k, call_v = (
        rows.take(states).transpose(1, 2) for rows, states in ((call.queries, q), (call.keys, k), (call.keys, v))
    )
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        call_q, call_k, call_v, 0.0, call.causal, scale=scale
    )
    return call.drop_padding(out.transpose(1, 2)), call.drop_padding(lse.transpose(1, 2))
