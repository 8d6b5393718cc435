import math

import pytest
import torch

from vlmrl.algorithms.baselines import normalize_by_group, step_advantages, subtract_group_mean, subtract_mean_of_others

F, T = False, True
REWARDS = torch.tensor([[1.0, 0.0, 0.0], [5.0, 3.0, 1.0]])


def test_each_group_is_its_own_baseline() -> None:
    third = 1 / 3
    expected = torch.tensor([[2 * third, -third, -third], [2.0, 0.0, -2.0]])
    torch.testing.assert_close(subtract_group_mean(REWARDS), expected)


def test_group_norm_divides_by_the_unbiased_deviation_of_its_own_group() -> None:
    deviation = math.sqrt(1 / 3)  # of 1, 0, 0: (4/9 + 1/9 + 1/9) / 2
    first = [2 / 3 / deviation, -1 / 3 / deviation, -1 / 3 / deviation]
    second = [1.0, 0.0, -1.0]  # of 5, 3, 1: (4 + 0 + 4) / 2 = 2 squared
    torch.testing.assert_close(normalize_by_group(REWARDS), torch.tensor([first, second]), rtol=1e-5, atol=1e-5)


def test_rloo_compares_each_response_with_the_others() -> None:
    expected = torch.tensor([[1.0, -0.5, -0.5], [3.0, 0.0, -3.0]])  # 5 - (3 + 1) / 2 = 3
    torch.testing.assert_close(subtract_mean_of_others(REWARDS), expected)


@pytest.mark.parametrize("estimate", [subtract_group_mean, normalize_by_group, subtract_mean_of_others])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e8 + 1, -0.7])
def test_a_group_of_equal_rewards_is_exactly_zero(estimate, value) -> None:  # type: ignore[no-untyped-def]
    rewards = torch.tensor([[value] * 7, [value] * 6 + [0.0]])
    assert estimate(rewards)[0].tolist() == [0.0] * 7
    assert estimate(rewards)[1].abs().min() > 0


@pytest.mark.parametrize("estimate", [subtract_group_mean, normalize_by_group, subtract_mean_of_others])
def test_a_group_of_one_is_zero_and_not_nan(estimate) -> None:  # type: ignore[no-untyped-def]
    assert estimate(torch.tensor([[3.0], [4.0]])).tolist() == [[0.0], [0.0]]


def test_a_response_without_a_score_is_in_no_baseline() -> None:
    rewards = torch.tensor([[1.0, 1.0, 0.0, -9.0]])
    scored = torch.tensor([[T, T, T, F]])
    third, deviation = 1 / 3, math.sqrt(1 / 3)
    expected = {
        subtract_group_mean: [third, third, -2 * third, 0.0],
        normalize_by_group: [third / deviation, third / deviation, -2 * third / deviation, 0.0],
        subtract_mean_of_others: [0.5, 0.5, -1.0, 0.0],
    }
    for estimate, values in expected.items():
        torch.testing.assert_close(estimate(rewards, scored)[0], torch.tensor(values), rtol=0, atol=1e-5)


STEPS = torch.tensor([[0.5, 0, 1.5], [0, 0, 2.0], [0, 0.5, 0], [0.5, 0, 0]])


def test_reasoning_steps_are_compared_with_those_of_their_group() -> None:
    # First group: mean 2, deviation 1 (of -1, 1, 0, unbiased), and a half of each. Second: all the same.
    centred = [[-0.5, 0, 0.5], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert step_advantages(STEPS, group_size=2, divide_by_std=False).tolist() == centred
    result = step_advantages(STEPS, group_size=2, divide_by_std=True)
    torch.testing.assert_close(result, torch.tensor(centred, dtype=torch.float64), rtol=0, atol=2e-6)
    assert result[2:].abs().max() == 0


@pytest.mark.parametrize("divide_by_std", [True, False])
def test_equal_reasoning_steps_are_exactly_zero(divide_by_std: bool) -> None:
    # Four steps and three, of 0.3 each.
    steps = 0.3 * torch.tensor([[1 / 4, 1 / 4, 1 / 4, 1 / 4], [1 / 3, 0.0, 1 / 3, 1 / 3]])
    assert step_advantages(steps, group_size=2, divide_by_std=divide_by_std).abs().max() == 0


def test_a_single_reasoning_step_has_no_advantage() -> None:
    steps = torch.tensor([[0.0, 0.3], [0.0, 0.0]])
    assert step_advantages(steps, group_size=2, divide_by_std=True).tolist() == [[0, 0], [0, 0]]
