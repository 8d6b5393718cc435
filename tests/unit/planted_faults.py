"""Faults of the layouts that share prompts, which several checks must find."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from torch import Tensor

from vlmrl.models import attention, inputs
from vlmrl.models.attention_kernels import AttentionOptions
from vlmrl.models.attention_plan import AttentionPlan


def shift_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the responses to a shared prompt positions that are off by one."""
    sound = inputs._position_ids

    def shifted(net: Any, read: Any, pack: Any) -> Tensor:
        positions = sound(net, read, pack).clone()
        for piece in pack.pieces:
            if piece.parent is not None:
                row, columns = piece.place
                positions[..., row, columns] += 1
        return positions

    monkeypatch.setattr(inputs, "_position_ids", shifted)


def leak_between_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a response to a shared prompt pay a thousandth of its attention to the response before it."""
    sound = attention.attend

    def leaky(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, options: AttentionOptions) -> Tensor:
        attended = sound(q, k, v, plan, options)
        out = attended.clone()
        children = [span for span in plan.spans if span.parent is not None]
        for one, two in itertools.pairwise(children):
            if one.parent == two.parent:
                other = v[one.start : one.start + one.length].mean(0).repeat_interleave(q.shape[1] // v.shape[1], 0)
                place = slice(two.start, two.start + two.length)
                out[place] = 0.999 * attended[place] + 0.001 * other
        return out

    monkeypatch.setattr(attention, "attend", leaky)
