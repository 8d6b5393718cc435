"""KL divergence between the output layers of two models, per token over the vocabulary, without [T, V] logits.

As `models.logprobs`: slices run one after the other, and the backward pass recomputes them. With the student's
p = softmax(z) and the teacher's q,

    forward KL(q || p) = sum q (log q - log p)        d / d z = p - q
    reverse KL(p || q) = sum p (log p - log q)        d / d z = p (log p - log q - KL)
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from vlmrl.models.logprobs import SLICE, slices

Direction = Literal["forward", "reverse"]


class TeacherRows(NamedTuple):
    """The teacher's side of a divergence: constants, without gradients."""

    hidden: Tensor
    """[T, D'] its states before the same tokens."""
    weight: Tensor
    """[V', D']"""
    bias: Tensor | None
    direction: Direction


def token_divergence(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, teacher: TeacherRows, *, slice_size: int | None = None
) -> Tensor:
    """Return the KL divergence [T] of softmax(hidden W' + bias) and the teacher's distribution, for hidden [T, D] and
    weight [V, D].

    If one output layer has more rows than the other, both distributions are over the ids that both have. Gradients
    reach hidden, weight and bias. At most `slice_size` logits of each model (but at least a row or a column) exist at a
    time, by default half of `SLICE` of the device. Sums are in fp32, or fp64 for fp64 inputs.
    """
    divergence: Tensor = _TokenDivergence.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, teacher, slice_size or SLICE.get(hidden.device.type, 2**25) // 2
    )
    return divergence


class _TokenDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, teacher: TeacherRows, slice_size: int
    ) -> Tensor:
        exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        common = slice(0, min(len(weight), len(teacher.weight)))
        divergence = torch.empty(len(hidden), dtype=exact, device=hidden.device)
        normalizer, of_teacher = torch.empty_like(divergence), torch.empty_like(divergence)
        for rows in slices(len(hidden), slice_size // common.stop):
            log_p = _logits(hidden[rows], weight, bias, common, exact)
            log_q = _logits(teacher.hidden[rows], teacher.weight, teacher.bias, common, exact)
            normalizer[rows], of_teacher[rows] = log_p.logsumexp(-1), log_q.logsumexp(-1)
            log_p -= normalizer[rows, None]
            log_q -= of_teacher[rows, None]
            left, right = (log_q, log_p) if teacher.direction == "forward" else (log_p, log_q)
            divergence[rows] = torch.sub(left, right).mul_(left.exp()).sum(-1)
        # The parameters themselves, as in `models.logprobs`.
        constants = (teacher.hidden, teacher.weight, teacher.bias)
        ctx.save_for_backward(hidden, weight, bias, *constants, normalizer, of_teacher, divergence)
        ctx.direction, ctx.common, ctx.slice_size = teacher.direction, common, slice_size
        return divergence

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = gradients
        hidden, weight, bias, states, head, head_bias, normalizer, of_teacher, divergence = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        exact = normalizer.dtype
        d_hidden = torch.zeros_like(hidden, dtype=exact) if needs_hidden else None
        # Zeros: rows that the teacher does not have get no gradient.
        d_weight = torch.zeros_like(weight) if needs_weight else None
        d_bias = torch.zeros_like(bias) if needs_bias else None
        for columns in slices(ctx.common.stop, ctx.slice_size // max(1, len(hidden))):
            log_p = _logits(hidden, weight, bias, columns, exact).sub_(normalizer[:, None])
            log_q = _logits(states, head, head_bias, columns, exact).sub_(of_teacher[:, None])
            if ctx.direction == "forward":
                d_logits = log_p.exp_().sub_(log_q.exp_())
            else:
                d_logits = log_p.exp().mul_(log_p.sub_(log_q).sub_(divergence[:, None]))
            d_logits *= scale[:, None]
            if d_bias is not None:
                d_bias[columns] = d_logits.sum(0).to(d_bias.dtype)
            d_logits = d_logits.to(weight.dtype)
            if d_weight is not None:
                d_weight[columns] = d_logits.T @ hidden
            if d_hidden is not None:
                d_hidden += d_logits @ weight[columns]
        return None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight, d_bias, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, columns: slice, exact: torch.dtype) -> Tensor:
    logits = (hidden @ weight[columns].T).to(exact)
    return logits if bias is None else logits.add_(bias[columns].to(exact))
