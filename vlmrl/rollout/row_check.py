"""Compare rows of a weight with those that were sent, and describe a difference."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class SentRows(NamedTuple):
    """Numbers kept of R rows of a weight that was sent."""

    columns: Tensor
    """[K, R], some of its columns."""
    signs: Tensor
    """[R], its product with a vector of 1 and -1."""
    norms: Tensor
    """[R], the length of each row."""
    width: int
    """Columns of the weight."""


def describe_mismatch(
    held: Tensor, sent: SentRows, *, before: Tensor, others: Iterable[tuple[str, Tensor]]
) -> str | None:
    """None when the rows hold what was sent; otherwise what they hold, as the predicate of a sentence.

    Args:
        held: [K + 1, R], products with the one-hot vectors of the columns and with the vector of signs.
        before: the same products, before the update.
        others: names and columns, [K, R], of other rows that were sent; the name is empty for rows of the same weight.
    """
    columns, expected = held[:-1], sent.columns.to("cpu", held.dtype)
    # A row with an infinity yields no column: 0 times infinity is NaN.
    is_finite = sent.norms.cpu().isfinite()
    if _equal(columns[:, is_finite], expected[:, is_finite]):
        is_near = (held[-1].float() - sent.signs.cpu().float()).abs() <= _rounding(sent)
        return None if bool(is_near[is_finite].all()) else "holds other numbers outside of the columns that were read"
    if _equal(columns, before[:-1]):
        return "holds the weights from before"
    if not bool(columns[:, is_finite].isfinite().all()):
        return "holds numbers that are not finite"
    if not bool(columns.any()):
        return "holds nothing but zeros"
    for name, other in others:
        if other.shape == columns.shape and _equal(columns, other.to("cpu", held.dtype)):
            return f"holds another layer's weights: {name}" if name else "holds its own rows in another order"
    factor = common_factor(columns[:, is_finite], expected[:, is_finite])
    if factor is not None:
        return f"is scaled by {factor:.4g}"
    changed = float((columns != expected).float().mean())
    return f"holds other numbers than were sent ({changed:.1%} of those read)"


def common_factor(held: Tensor, sent: Tensor) -> float | None:
    """Return the factor by which `held` is a multiple of `sent`, within rounding; None without one other than about
    1."""
    step = torch.finfo(held.dtype).eps
    held_flat, sent_flat = held.double().reshape(-1), sent.double().reshape(-1)
    if not bool(sent_flat.any()):
        return None
    factor = float(held_flat @ sent_flat / (sent_flat @ sent_flat))
    is_fit = bool((held_flat - factor * sent_flat).norm() <= step * held_flat.norm())
    return factor if is_fit and abs(factor - 1) > step / 2 else None


def _equal(held: Tensor, sent: Tensor) -> bool:
    """Whether both are equal bit for bit, except that -0 and subnormal numbers are 0: bf16 units flush those to
    zero."""
    tiny = torch.finfo(held.dtype).tiny
    return bool(((held == sent) | ((held.abs() < tiny) & (sent.abs() < tiny))).all())


def _rounding(sent: SentRows) -> Tensor:
    """[R], the largest rounding difference of two sums of a row's numbers, whose partial sums are about its norm.

    In fp32 the error of n additions grows with the square root of n; in half precision the parts of a split product are
    rounded too.
    """
    steps = 8 * math.sqrt(sent.width) if sent.signs.dtype == torch.float32 else 4
    return torch.finfo(sent.signs.dtype).eps * (steps * sent.norms.cpu() + sent.signs.cpu().float().abs())
