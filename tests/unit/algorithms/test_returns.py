import random

import pytest
import torch
from torch import Tensor

from vlmrl.algorithms.returns import gae, normalise, returns, reward_per_token, time_first

F, T = False, True
NAN, INF = float("nan"), float("inf")
# One response over two turns, one short one with padding, one without a sampled token.
SAMPLED = torch.tensor([[F, T, F, F, T, T], [T, T, F, F, F, F], [F, F, F, F, F, F]])


def test_a_response_is_rewarded_at_its_last_sampled_token() -> None:
    result = reward_per_token(torch.tensor([8.0, 4.0, 9.0]), SAMPLED)
    assert result.tolist() == [[0, 0, 0, 0, 0, 8.0], [0, 4.0, 0, 0, 0, 0], [0] * 6]


def test_penalties_and_token_rewards_stay_on_their_tokens() -> None:
    kl_penalty = torch.tensor([[NAN, 1.0, 7.0, INF, 2.0, 3.0], [0.5, 0.0, 9.0, 9.0, 9.0, 9.0], [NAN] * 6])
    steps = torch.tensor([[0, 0.25, 0, 0, 0, 1.0], [0.0] * 6, [0.0] * 6])
    result = reward_per_token(torch.tensor([8.0, 4.0, 9.0]), SAMPLED, kl_penalty=kl_penalty, token_rewards=steps)
    assert result.tolist() == [[0, -0.75, 0, 0, -2.0, 6.0], [-0.5, 4.0, 0, 0, 0, 0], [0] * 6]


def test_a_token_reward_outside_the_mask_is_refused() -> None:
    steps = torch.zeros(3, 6)
    steps[0, 2] = 1.0
    with pytest.raises(ValueError, match="did not sample"):
        reward_per_token(torch.zeros(3), SAMPLED, token_rewards=steps)


def test_a_return_discounts_by_sampled_tokens_only() -> None:
    result = returns(reward_per_token(torch.tensor([8.0, 4.0, 9.0]), SAMPLED), SAMPLED, gamma=0.5)
    assert result.tolist() == [[0, 2.0, 0, 0, 4.0, 8.0], [2.0, 4.0, 0, 0, 0, 0], [0] * 6]


def test_a_penalty_counts_for_its_token_and_earlier_ones() -> None:
    sampled = torch.tensor([[F, T, F, T, T], [T, T, F, F, F]])
    kl_penalty = torch.tensor([[9.0, 1.0, NAN, 2.0, 4.0], [1.0, 0.0, 9.0, 9.0, 9.0]])
    result = returns(reward_per_token(torch.tensor([8.0, 2.0]), sampled, kl_penalty=kl_penalty), sampled, gamma=0.5)
    # Backwards: 8 - 4 = 4; 4/2 - 2 = 0; 0/2 - 1 = -1. Second row: 2 - 0 = 2; 2/2 - 1 = 0.
    assert result.tolist() == [[0.0, -1.0, 0.0, 0.0, 4.0], [0.0, 2.0, 0.0, 0.0, 0.0]]


def test_gae_by_hand_over_a_gap() -> None:
    sampled = torch.tensor([[T, F, T, T, F], [F, T, F, F, F]])
    values = torch.tensor([[1.0, NAN, 2.0, 4.0, INF], [NAN, 3.0, NAN, NAN, NAN]])
    paid = reward_per_token(torch.tensor([8.0, 5.0]), sampled)
    result = gae(paid, values, sampled, gamma=0.5, lambd=0.5)
    # d = 0 + 2/2 - 1 = 0, 0 + 4/2 - 2 = 0, 8 - 4 = 4; A backwards: 4, 0 + 4/4 = 1, 0 + 1/4. Second row: 5 - 3.
    assert result.advantages.tolist() == [[0.25, 0, 1.0, 4.0, 0], [0, 2.0, 0, 0, 0]]
    assert result.returns is not None
    assert result.returns.tolist() == [[1.25, 0, 3.0, 8.0, 0], [0, 5.0, 0, 0, 0]]


def test_lambda_of_1_is_the_return_and_of_0_one_step() -> None:
    sampled = torch.tensor([[T, T, T]])
    values = torch.tensor([[1.0, 2.0, 4.0]])
    paid = torch.tensor([[1.0, 0.0, 8.0]], dtype=torch.float64)
    whole = gae(paid, values, sampled, gamma=0.5, lambd=1.0)
    assert whole.returns is not None
    assert whole.returns.tolist() == [[3.0, 4.0, 8.0]]  # 8; 8/2; 1 + 4/2
    assert whole.advantages.tolist() == [[2.0, 2.0, 4.0]]
    # 1 + 2/2 - 1, 0 + 4/2 - 2, 8 - 4
    assert gae(paid, values, sampled, gamma=0.5, lambd=0.0).advantages.tolist() == [[1.0, 0.0, 4.0]]


def definition(
    paid: Tensor, values: Tensor, sampled: Tensor, *, gamma: float, lambd: float
) -> tuple[list[list[float]], list[list[float]]]:
    """Discounted returns and generalised advantages, written as the double sums of their definitions."""
    every_return, every_advantage = [], []
    for row in range(len(sampled)):
        places = [t for t in range(sampled.shape[1]) if sampled[row, t]]
        r = [float(paid[row, t]) for t in places]
        v = [float(values[row, t]) for t in places] + [0.0]
        deltas = [r[i] + gamma * v[i + 1] - v[i] for i in range(len(places))]
        result, advantages = [0.0] * sampled.shape[1], [0.0] * sampled.shape[1]
        for i, t in enumerate(places):
            result[t] = sum(gamma ** (k - i) * r[k] for k in range(i, len(places)))
            advantages[t] = sum((gamma * lambd) ** (k - i) * deltas[k] for k in range(i, len(places)))
        every_return.append(result)
        every_advantage.append(advantages)
    return every_return, every_advantage


@pytest.mark.parametrize("seed", range(12))
def test_ragged_responses_with_gaps_agree_with_the_definitions(seed: int) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    rows, columns = draw.randint(1, 7), draw.randint(1, 24)
    gamma, lambd = draw.choice([1.0, 0.99, 0.5, 0.0]), draw.choice([1.0, 0.95, 0.3, 0.0])
    sampled = torch.rand(rows, columns) < draw.choice([0.0, 0.3, 0.7, 1.0])
    values = torch.where(sampled, torch.randn(rows, columns), NAN)
    kl_penalty = torch.where(sampled, torch.randn(rows, columns), INF)
    steps = torch.where(sampled & (torch.rand(rows, columns) < 0.2), torch.randn(rows, columns), 0.0)
    paid = reward_per_token(torch.randn(rows), sampled, kl_penalty=kl_penalty, token_rewards=steps)
    expected_returns, expected = definition(paid, values, sampled, gamma=gamma, lambd=lambd)
    for layout in (lambda x: x, time_first):
        given = [layout(x) for x in (paid, values, sampled)]
        result = gae(*given, gamma=gamma, lambd=lambd)
        torch.testing.assert_close(result.advantages.tolist(), expected)
        assert result.returns is not None
        torch.testing.assert_close(result.returns, torch.where(sampled, result.advantages + values.double(), 0.0))
        torch.testing.assert_close(returns(given[0], given[2], gamma=gamma).tolist(), expected_returns)


def test_given_values_are_kept() -> None:
    paid = torch.ones(1, 2, dtype=torch.float64)
    values = torch.ones(1, 2, dtype=torch.float64)
    gae(paid, values, torch.tensor([[T, F]]), gamma=1.0, lambd=1.0)
    normalise(values, torch.tensor([[T, F]]), divide_by_std=True)
    assert paid.tolist() == values.tolist() == [[1.0, 1.0]]


def test_normalising_ignores_the_padding() -> None:
    values = torch.tensor([[1.0, NAN], [3.0, INF], [NAN, NAN]])
    result = normalise(values, torch.tensor([[T, F], [T, F], [F, F]]), divide_by_std=True)
    torch.testing.assert_close(result, torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]))


def test_a_tiny_deviation_is_replaced_by_1e_4() -> None:
    values = torch.tensor([[1.0, 1.0 + 2e-6]], dtype=torch.float64)
    result = normalise(values, torch.tensor([[T, T]]), divide_by_std=True)
    torch.testing.assert_close(result, torch.tensor([[-0.01, 0.01]], dtype=torch.float64))


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e8 + 1, -0.7])
def test_normalising_equal_values_leaves_exactly_zero(value: float) -> None:
    sampled = torch.tensor([[F, T, T, T], [T, T, T, T]])
    values = torch.full((2, 4), value, dtype=torch.float64)
    assert normalise(values, sampled, divide_by_std=True).tolist() == [[0.0] * 4] * 2


def test_normalising_without_samples_gives_zeros() -> None:
    result = normalise(torch.full((2, 2), NAN), torch.zeros(2, 2, dtype=torch.bool), divide_by_std=True)
    assert result.tolist() == [[0.0, 0.0], [0.0, 0.0]]
