"""The load balance loss against numbers worked out by hand, and against Transformers'."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from vlmrl.algorithms.load_balance import load_balance_loss

FIRST, SECOND = [math.log(3), 0.0], [0.0, math.log(3)]
"""Logits of two experts with probabilities of 3/4 and 1/4."""


@pytest.mark.parametrize(
    ("logits", "loss"),
    [
        # Both experts are chosen by half of the tokens, with a mean probability of a half: 2 * (1/4 + 1/4).
        ([[FIRST, SECOND]], 1.0),
        # All choose the first, whose mean probability is 3/4.
        ([[FIRST, FIRST]], 1.5),
        # Two layers, each with one favourite: even together.
        ([[FIRST, FIRST], [SECOND, SECOND]], 1.0),
        # Three of four choices, mean probability 3/4 * 3/4 + 1/4 * 1/4 = 5/8: 2 * (3/4 * 5/8 + 1/4 * 3/8).
        ([[FIRST, SECOND], [FIRST, FIRST]], 1.125),
    ],
)
def test_the_loss_is_that_of_the_formula(logits: list[list[list[float]]], loss: float) -> None:
    tensor = torch.tensor(logits)
    assert load_balance_loss(tensor, torch.tensor([True, True]), top_k=1).item() == pytest.approx(loss)
    padded = torch.cat([tensor, torch.full((len(logits), 3, 2), torch.nan)], dim=1)
    mask = torch.tensor([True, True, False, False, False])
    assert load_balance_loss(padded, mask, top_k=1).item() == pytest.approx(loss), "padding does not count"


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_the_loss_and_its_gradient_are_those_of_transformers(top_k: int) -> None:
    torch.manual_seed(0)
    layers = [torch.randn(2 * 5, 4, requires_grad=True) for _ in range(3)]
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
    theirs = load_balancing_loss_func(tuple(layers), 4, top_k, mask)
    assert isinstance(theirs, torch.Tensor)
    slopes = torch.autograd.grad(theirs, layers)
    ours = load_balance_loss(torch.stack(layers), mask.bool().flatten(), top_k=top_k)
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)
    for mine, other in zip(torch.autograd.grad(ours, layers), slopes, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=0)


def test_without_a_token_the_loss_and_its_gradient_are_zero() -> None:
    logits = torch.randn(2, 3, 4, requires_grad=True)
    loss = load_balance_loss(logits, torch.zeros(3, dtype=torch.bool), top_k=2)
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert not logits.grad.any()
