import pytest
import torch

from vlmrl.algorithms.shaping import overlong_penalty, punish_truncation, shape


def test_the_overlong_penalty_rises_over_the_buffer_before_the_limit() -> None:
    lengths = torch.tensor([10, 80, 85, 100, 120])
    found = overlong_penalty(lengths, max_new_tokens=100, buffer=20, factor=2.0)
    assert found.tolist() == [0.0, 0.0, 0.5, 2.0, 2.0]


@pytest.mark.parametrize(("coefficient", "expected"), [(0.0, 0.0), (0.25, 1.0), (1.0, 4.0), (-0.5, -0.5)])
def test_truncated_answers_are_scaled_or_replaced(coefficient: float, expected: float) -> None:
    found = punish_truncation(torch.tensor([4.0, 4.0]), torch.tensor([True, False]), coefficient=coefficient)
    assert found.tolist() == [expected, 4.0]


def test_a_negative_reward_does_not_shrink_by_being_cut_off() -> None:
    found = punish_truncation(torch.tensor([-1.0, -1.0]), torch.tensor([True, True]), coefficient=0.5)
    assert found.tolist() == [-1.0, -1.0]


def test_the_order_is_overlong_then_truncated_then_clip() -> None:
    found = shape(
        torch.tensor([4.0, 4.0, 0.0, 9.0]),
        num_sampled=torch.tensor([100, 90, 100, 5]),
        is_truncated=torch.tensor([True, False, True, False]),
        max_new_tokens=100,
        overlong_buffer=20,
        overlong_factor=1.0,
        truncated_coefficient=0.5,
        clip_range=(-0.25, 3.0),
    )
    # (4 - 1) / 2; 4 - 0.5 clipped; 0 - 1, of which half would be more, clipped; 9 clipped.
    assert found.tolist() == [1.5, 3.0, -0.25, 3.0]


@pytest.mark.parametrize("coefficient", [-0.5, 0.0, 0.3, 1.0])
@pytest.mark.parametrize("buffer", [None, 200])
def test_a_truncated_response_never_gains_by_it(coefficient: float, buffer: int | None) -> None:
    rewards = torch.tensor([-2.0, -0.5, 0.0, 0.5, 1.0])

    def shaped(num_sampled: int, *, truncated: bool) -> torch.Tensor:
        return shape(
            rewards,
            num_sampled=torch.full((5,), num_sampled),
            is_truncated=torch.full((5,), truncated),
            max_new_tokens=1000,
            overlong_buffer=buffer,
            overlong_factor=1.0,
            truncated_coefficient=coefficient,
            clip_range=(-10.0, 10.0),
        )

    truncated, stopped = shaped(1000, truncated=True), shaped(999, truncated=False)
    assert bool((truncated <= stopped).all())
    if buffer is not None:
        # Wrong and stopped at 999 of 1,000, and wrong and cut off: the second is the worse.
        assert stopped[2].item() == pytest.approx(-0.995)
        assert truncated[2].item() == -1.0


def test_steps_that_are_not_set_are_left_out() -> None:
    rewards = torch.tensor([1.0, -1.0])
    found = shape(
        rewards,
        num_sampled=torch.tensor([100, 100]),
        is_truncated=torch.tensor([True, True]),
        max_new_tokens=100,
        overlong_buffer=None,
        overlong_factor=1.0,
        truncated_coefficient=None,
        clip_range=(-10.0, 10.0),
    )
    assert found.tolist() == rewards.tolist()
