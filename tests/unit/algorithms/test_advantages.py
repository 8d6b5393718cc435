import math

import pytest
import torch

from vlmrl.algorithms.advantages import advantages, group_norm, normalise, returns, reward_minus_group_mean, rloo

F, T = False, True
REWARDS = torch.tensor([[1.0, 0.0, 0.0], [5.0, 3.0, 1.0]])
# Two prompts, three answers each: prompts of different lengths, one answer over two turns, padding behind.
SAMPLED = torch.tensor(
    [[F, T, T, F, F], [F, T, T, T, F], [F, T, F, F, F], [F, F, T, T, T], [F, F, T, F, T], [F, F, T, T, F]]
)


def test_each_group_is_its_own_baseline() -> None:
    third = 1 / 3
    expected = torch.tensor([[2 * third, -third, -third], [2.0, 0.0, -2.0]])
    torch.testing.assert_close(reward_minus_group_mean(REWARDS), expected)


def test_group_norm_divides_by_the_unbiased_deviation_of_its_own_group() -> None:
    deviation = math.sqrt(1 / 3)  # of 1, 0, 0: (4/9 + 1/9 + 1/9) / 2
    first = [2 / 3 / deviation, -1 / 3 / deviation, -1 / 3 / deviation]
    second = [1.0, 0.0, -1.0]  # of 5, 3, 1: (4 + 0 + 4) / 2 = 2 squared
    torch.testing.assert_close(group_norm(REWARDS), torch.tensor([first, second]), rtol=1e-5, atol=1e-5)


def test_rloo_compares_each_answer_with_the_others() -> None:
    expected = torch.tensor([[1.0, -0.5, -0.5], [3.0, 0.0, -3.0]])  # 5 - (3 + 1) / 2 = 3
    torch.testing.assert_close(rloo(REWARDS), expected)


@pytest.mark.parametrize("estimate", [reward_minus_group_mean, group_norm, rloo])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e8 + 1, -0.7])
def test_a_group_of_equal_rewards_is_exactly_zero(estimate, value) -> None:  # type: ignore[no-untyped-def]
    rewards = torch.tensor([[value] * 7, [value] * 6 + [0.0]])
    assert estimate(rewards)[0].tolist() == [0.0] * 7
    assert estimate(rewards)[1].abs().min() > 0


@pytest.mark.parametrize("estimate", [reward_minus_group_mean, group_norm, rloo])
def test_a_group_of_one_is_zero_and_not_nan(estimate) -> None:  # type: ignore[no-untyped-def]
    assert estimate(torch.tensor([[3.0], [4.0]])).tolist() == [[0.0], [0.0]]


def test_group_estimators_put_the_scalar_on_every_sampled_token_and_nowhere_else() -> None:
    found = advantages(REWARDS, SAMPLED, estimator="rloo", gamma=0.5)
    expected = torch.tensor([[1.0], [-0.5], [-0.5], [3.0], [0.0], [-3.0]]) * SAMPLED
    torch.testing.assert_close(found, expected)


def test_a_return_discounts_by_sampled_tokens_only() -> None:
    found = returns(torch.tensor([8.0, 4.0]), torch.tensor([[F, T, F, F, T, T], [T, T, F, F, F, F]]), gamma=0.5)
    assert found.tolist() == [[0.0, 2.0, 0.0, 0.0, 4.0, 8.0], [2.0, 4.0, 0.0, 0.0, 0.0, 0.0]]


def test_a_penalty_is_charged_to_its_token_and_to_those_before_it() -> None:
    sampled = torch.tensor([[F, T, F, T, T], [T, T, F, F, F]])
    penalty = torch.tensor([[9.0, 1.0, float("nan"), 2.0, 4.0], [1.0, 0.0, 9.0, 9.0, 9.0]])
    found = returns(torch.tensor([8.0, 2.0]), sampled, gamma=0.5, penalty=penalty)
    # Backwards: 8 - 4 = 4; 4/2 - 2 = 0; 0/2 - 1 = -1. Second row: 2 - 0 = 2; 2/2 - 1 = 0.
    assert found.tolist() == [[0.0, -1.0, 0.0, 0.0, 4.0], [0.0, 2.0, 0.0, 0.0, 0.0]]


def test_a_group_of_equal_rewards_still_feels_the_penalty() -> None:
    sampled = torch.tensor([[T, T], [T, F]])
    penalty = torch.tensor([[0.25, 0.5], [1.0, 0.0]])
    found = advantages(torch.ones(1, 2), sampled, estimator="group_norm", penalty=penalty)
    assert found.tolist() == [[-0.75, -0.5], [-1.0, 0.0]]


def test_reinforce_baseline_normalises_over_all_sampled_tokens_of_the_step() -> None:
    rewards = torch.tensor([[1.0, 0.0], [3.0, 1.0]])
    sampled = torch.tensor([[T, T, F], [T, F, F], [F, T, F], [T, T, T]])
    # Scalars 0.5, -0.5, 1, -1 on 2, 1, 1, 3 tokens: mean (1 - 0.5 + 1 - 3) / 7, mean square (0.5 + 0.25 + 1 + 3) / 7.
    mean = -1.5 / 7
    deviation = math.sqrt(4.75 / 7 - mean**2)
    scalars = torch.tensor([[0.5], [-0.5], [1.0], [-1.0]])
    centred = (scalars - mean) * sampled
    found = advantages(rewards, sampled, estimator="reinforce_baseline")
    torch.testing.assert_close(found, centred / deviation)
    only_centred = advantages(rewards, sampled, estimator="reinforce_baseline", no_std_norm=True)
    torch.testing.assert_close(only_centred, centred)


def test_reinforce_baseline_discounts_before_it_normalises() -> None:
    rewards = torch.tensor([[4.0, 0.0]])
    sampled = torch.tensor([[T, T, F], [F, T, T]])
    # Scalars 2 and -2: returns 1, 2 and -1, -2, of mean 0.
    found = advantages(rewards, sampled, estimator="reinforce_baseline", gamma=0.5, no_std_norm=True)
    assert found.tolist() == [[1.0, 2.0, 0.0], [0.0, -1.0, -2.0]]


def test_reinforce_baseline_stays_at_zero_when_every_group_is_constant() -> None:
    rewards = torch.tensor([[0.1, 0.1, 0.1], [0.7, 0.7, 0.7]])
    assert advantages(rewards, SAMPLED, estimator="reinforce_baseline").abs().max() == 0


def test_normalising_ignores_what_stands_in_the_padding() -> None:
    values = torch.tensor([[1.0, float("nan")], [3.0, float("inf")]])
    found = normalise(values, torch.tensor([[T, F], [T, F]]), by_deviation=True)
    assert found.tolist() == [[-1.0, 0.0], [1.0, 0.0]]
