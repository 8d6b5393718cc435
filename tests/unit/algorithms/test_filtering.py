import pytest
import torch

from vlmrl.algorithms.filtering import is_within, teaches


@pytest.mark.parametrize(("mean", "kept"), [(0.0, False), (0.125, True), (0.875, True), (1.0, False), (-1.0, False)])
def test_groups_on_the_bounds_are_left_out(mean: float, kept: bool) -> None:
    assert is_within(mean, 0.0, 1.0) is kept


def test_a_mean_that_is_no_number_is_left_out() -> None:
    assert not is_within(float("nan"), 0.0, 1.0)


@pytest.mark.parametrize(("low", "high"), [(1.0, 0.0), (0.5, 0.5)])
def test_an_empty_range_is_refused(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="no mean lies between"):
        is_within(0.5, low, high)


def test_rounding_keeps_no_group() -> None:
    assert not is_within(0.7 + 0.2 + 0.1, 0.0, 1.0)
    assert not is_within((0.1 + 0.1 + 0.1) / 3, 0.1, 1.0)


def test_a_group_teaches_when_its_responses_are_worth_different_amounts() -> None:
    rewards = torch.tensor([[0.1, 0.1, 0.1], [-1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 1.0]])
    # All wrong but well formatted; half right of rewards in [-1, 1]; all right; one right.
    assert teaches(rewards).tolist() == [False, True, False, True]


def test_rounding_teaches_nothing_and_a_little_more_does() -> None:
    assert teaches(torch.tensor([[0.7 + 0.2 + 0.1, 1.0], [1.0, 1.0 + 4e-6]])).tolist() == [False, True]


def test_rewards_of_steps_count_with_those_of_the_response() -> None:
    rewards, steps = torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.tensor([[0.25, 0.5], [0.0, 1.0]])
    assert teaches(rewards, step_rewards=steps).tolist() == [True, False]


def test_what_was_not_scored_tells_nothing_apart() -> None:
    rewards = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    scored = torch.tensor([[True, True, False], [True, True, False], [True, False, False], [False] * 3])
    assert teaches(rewards, scored=scored).tolist() == [False, True, False, False]
