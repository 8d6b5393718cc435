import math

import torch

from vlmrl.algorithms.aggregation import token_mean
from vlmrl.algorithms.losses import log_ratio
from vlmrl.algorithms.policy_losses import ppo

F, T = False, True
HALF, SAME, DOUBLE = math.log(0.5), 0.0, math.log(2.0)
RATIOS = torch.tensor([[HALF, SAME, DOUBLE], [HALF, SAME, DOUBLE]])
ADVANTAGES = torch.tensor([[2.0, 2.0, 2.0], [-2.0, -2.0, -2.0]])


def test_good_tokens_are_clipped_above_and_bad_ones_below() -> None:
    result = ppo(RATIOS, ADVANTAGES, clip_low=0.2, clip_high=0.3)
    # Good: -min(1, 1.6), -2, -min(4, 2.6). Bad: -min(-1, -1.6), 2, -min(-4, -2.6).
    torch.testing.assert_close(result.losses, torch.tensor([[-1.0, -2.0, -2.6], [1.6, 2.0, 4.0]]))
    assert result.clipped.tolist() == [[F, F, T], [T, F, F]]


def test_a_clipped_token_has_no_gradient() -> None:
    ratios = RATIOS.clone().requires_grad_()
    ppo(ratios, ADVANTAGES, clip_low=0.2, clip_high=0.2).losses.sum().backward()
    # d(-ratio A) = -ratio A where nothing is clipped.
    torch.testing.assert_close(ratios.grad, torch.tensor([[-1.0, -2.0, 0.0], [0.0, 2.0, 4.0]]))


def test_dual_clip_bounds_the_loss_of_bad_tokens_only() -> None:
    ratios = torch.tensor([[math.log(10.0), SAME], [math.log(10.0), DOUBLE]], requires_grad=True)
    signs = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    result = ppo(ratios, signs, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    torch.testing.assert_close(result.losses, torch.tensor([[-1.2, -1.0], [3.0, 2.0]]))
    assert result.clipped.tolist() == [[T, F], [T, F]]
    result.losses.sum().backward()
    torch.testing.assert_close(ratios.grad, torch.tensor([[0.0, -1.0], [0.0, 2.0]]))


def test_an_advantage_of_zero_is_neither_a_loss_nor_clipped() -> None:
    result = ppo(RATIOS, torch.zeros(2, 3), clip_low=0.2, clip_high=0.2, dual_clip=2.0)
    assert result.losses.abs().sum() == 0
    assert not result.clipped.any()


def test_padding_never_reaches_the_gradient_even_when_its_ratio_overflows() -> None:
    logprobs = torch.tensor([[-1.0, 500.0, float("inf")]], requires_grad=True)
    sampled = torch.tensor([[T, F, F]])
    ratios = log_ratio(logprobs, torch.tensor([[-1.0, -500.0, 0.0]]), sampled)
    losses = ppo(ratios, torch.tensor([[2.0, 0.0, 0.0]]), clip_low=0.2, clip_high=0.2).losses
    token_mean(losses, sampled, num_tokens=1).backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-2.0, 0.0, 0.0]]
