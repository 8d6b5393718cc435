"""The factor between matrices held and sent. The rest needs vLLM: tests/end_to_end/test_adapter_engine.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vlmrl.rollout.adapter_loader import common_factor

SENT = [torch.tensor([[1.0, -2.0], [0.0, 4.0]]), torch.tensor([[3.0], [0.5]])]


def pairs(*factors: float) -> list[tuple[Tensor, Tensor]]:
    return [(sent * factor, sent) for sent, factor in zip(SENT, factors, strict=True)]


@pytest.mark.parametrize("factor", [2.0, 1.41, 0.5, -1.0])
def test_a_common_factor_of_all_matrices_is_found(factor: float) -> None:
    assert common_factor(pairs(factor, factor)) == pytest.approx(factor)


def test_a_factor_is_found_in_spite_of_bf16_rounding() -> None:
    torch.manual_seed(0)
    sent = torch.randn(32, 8)
    held = (sent * 1.7).bfloat16()
    assert common_factor([(held, sent)]) == pytest.approx(1.7, rel=1e-2)


@pytest.mark.parametrize("factors", [(2.0, 3.0), (0.0, 0.0), (1.0, 1.001)])
def test_other_changes_have_no_common_factor(factors: tuple[float, float]) -> None:
    assert common_factor(pairs(*factors)) is None


def test_one_wrong_number_has_no_common_factor() -> None:
    held = SENT[0].clone()
    held[1, 1] += 0.5
    assert common_factor([(held, SENT[0]), (SENT[1], SENT[1])]) is None
