"""Whether rows of a weight hold what was sent, and if not, what they look like."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class Values(NamedTuple):
    """What is known of R rows of a weight that was sent."""

    columns: Tensor
    """[K, R], some of its columns."""
    signs: Tensor
    """[R], its product with a vector of 1 and -1."""
    norms: Tensor
    """[R], the length of each row."""
    width: int
    """Columns of the weight."""


def verdict(held: Tensor, sent: Values, *, before: Tensor, others: Iterable[tuple[str, Tensor]]) -> str | None:
    """None when the rows hold what was sent; else what they hold, as the rest of a sentence.

    Args:
        held: [K + 1, R], products with the one-hot vectors of the columns and with the vector of signs.
        before: the same, of what was held before the update.
        others: names and columns, [K, R], of other rows that were sent; no name for those of the same weight.
    """
    columns, wanted = held[:-1], sent.columns.to("cpu", held.dtype)
    # A row that holds one infinity gives no column back: 0 times infinity is not a number.
    is_finite = sent.norms.cpu().isfinite()
    if _equal(columns[:, is_finite], wanted[:, is_finite]):
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
    factor = common_factor(columns[:, is_finite], wanted[:, is_finite])
    if factor is not None:
        return f"is scaled by {factor:.4g}"
    changed = float((columns != wanted).float().mean())
    return f"holds other numbers than were sent ({changed:.1%} of those read)"


def common_factor(held: Tensor, sent: Tensor) -> float | None:
    """The number that makes the first of the second, up to its rounding; None when there is none but about 1."""
    step = torch.finfo(held.dtype).eps
    ones, others = held.double().reshape(-1), sent.double().reshape(-1)
    if not bool(others.any()):
        return None
    factor = float(ones @ others / (others @ others))
    is_fit = bool((ones - factor * others).norm() <= step * ones.norm())
    return factor if is_fit and abs(factor - 1) > step / 2 else None


def _equal(held: Tensor, sent: Tensor) -> bool:
    """Bit for bit, but that -0 is 0, and so are numbers too small to be normal: units for bf16 take them for zero."""
    tiny = torch.finfo(held.dtype).tiny
    return bool(((held == sent) | ((held.abs() < tiny) & (sent.abs() < tiny))).all())


def _rounding(sent: Values) -> Tensor:
    """[R], how far two sums of a row's numbers may lie apart: their partial sums are about as long as the row.

    In fp32 the error of n additions grows with the root of n; in half precision the parts of a split product are
    rounded too.
    """
    steps = 8 * math.sqrt(sent.width) if sent.signs.dtype == torch.float32 else 4
    return torch.finfo(sent.signs.dtype).eps * (steps * sent.norms.cpu() + sent.signs.cpu().float().abs())
