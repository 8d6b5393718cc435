"""The attention check of the self-test: it passes on this machine, and detects a leak."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from vlmrl.commands.self_test import attention
from vlmrl.commands.self_test.outcome import Broken
from vlmrl.models.attention import packed_attention

CPU = torch.device("cpu")


def test_every_head_dim_and_layout_is_within_its_tolerance_here() -> None:
    figure = attention.check(None)
    assert figure.endswith("head dims 64, 72, 80, 128")


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("spans", attention.PLANS)
def test_windows_and_shared_prompts_equal_a_dense_mask(spans: str, window: int | None) -> None:
    assert max(attention.compare(64, torch.float32, attention.PLANS[spans], CPU, window=window)) <= 1


def test_a_leak_between_samples_is_detected_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaks(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any
    ) -> tuple[Tensor, None]:
        output, _ = packed_attention(module, query, key, value, *rest, **options)
        # A thousandth of the first token's value reaches every token.
        leak = value[:, :, :1].repeat_interleave(output.shape[2] // value.shape[1], dim=1).transpose(1, 2)
        return output + 1e-3 * leak, None

    monkeypatch.setattr(attention, "packed_attention", leaks)
    errors = attention.compare(64, torch.float32, attention.PLANS["samples"], CPU)
    assert min(errors) > 1
    with pytest.raises(Broken, match=r"samples, head dim 64, torch\.float32: .* times the tolerance"):
        attention.check(None)


def test_nan_is_an_infinite_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def overflows(*states: Any, **options: Any) -> tuple[Tensor, None]:
        output, _ = packed_attention(*states, **options)
        return output * float("nan"), None

    monkeypatch.setattr(attention, "packed_attention", overflows)
    assert attention.compare(64, torch.bfloat16, attention.PLANS["samples"], CPU).forward == float("inf")
