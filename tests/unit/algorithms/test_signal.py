import pytest
import torch

from vlmrl.algorithms.signal import has_signal, is_within


@pytest.mark.parametrize(("mean", "kept"), [(0.0, False), (0.125, True), (0.875, True), (1.0, False), (-1.0, False)])
def test_groups_on_the_bounds_are_dropped(mean: float, kept: bool) -> None:
    assert is_within(mean, 0.0, 1.0) is kept


def test_a_nan_mean_is_left_out() -> None:
    assert not is_within(float("nan"), 0.0, 1.0)


@pytest.mark.parametrize(("low", "high"), [(1.0, 0.0), (0.5, 0.5)])
def test_an_empty_range_is_refused(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="no mean lies between"):
        is_within(0.5, low, high)


def test_a_group_within_rounding_of_the_bounds_is_dropped() -> None:
    assert not is_within(0.7 + 0.2 + 0.1, 0.0, 1.0)
    assert not is_within((0.1 + 0.1 + 0.1) / 3, 0.1, 1.0)


def test_a_group_has_a_signal_when_its_rewards_differ() -> None:
    rewards = torch.tensor([[0.1, 0.1, 0.1], [-1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 1.0]])
    # All wrong but well formatted; half right of rewards in [-1, 1]; all right; one right.
    assert has_signal(rewards).tolist() == [False, True, False, True]


def test_a_difference_beyond_rounding_is_a_signal() -> None:
    assert has_signal(torch.tensor([[0.7 + 0.2 + 0.1, 1.0], [1.0, 1.0 + 4e-6]])).tolist() == [False, True]


def test_step_rewards_count_in_the_signal() -> None:
    rewards, steps = torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.tensor([[0.25, 0.5], [0.0, 1.0]])
    assert has_signal(rewards, step_rewards=steps).tolist() == [True, False]


def test_unscored_responses_give_no_signal() -> None:
    rewards = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    scored = torch.tensor([[True, True, False], [True, True, False], [True, False, False], [False] * 3])
    assert has_signal(rewards, scored=scored).tolist() == [False, True, False, False]
