import pytest
import torch

from vlmrl.algorithms.shaping import overlong_penalty, punish_truncation, shape


def test_the_overlong_penalty_rises_over_the_buffer_before_the_limit() -> None:
    lengths = torch.tensor([10, 80, 85, 100, 120])
    result = overlong_penalty(lengths, max_tokens=100, buffer=20, factor=2.0)
    assert result.tolist() == [0.0, 0.0, 0.5, 2.0, 2.0]


@pytest.mark.parametrize(("coefficient", "expected"), [(0.0, 0.0), (0.25, 1.0), (1.0, 4.0), (-0.5, -0.5)])
def test_truncated_answers_are_scaled_or_replaced(coefficient: float, expected: float) -> None:
    result = punish_truncation(torch.tensor([4.0, 4.0]), torch.tensor([True, False]), coefficient=coefficient)
    assert result.tolist() == [expected, 4.0]


def test_a_negative_reward_does_not_rise_by_truncation() -> None:
    result = punish_truncation(torch.tensor([-1.0, -1.0]), torch.tensor([True, True]), coefficient=0.5)
    assert result.tolist() == [-1.0, -1.0]


def test_the_order_is_overlong_then_truncated_then_clip() -> None:
    result = shape(
        torch.tensor([4.0, 4.0, 0.0, 9.0]),
        num_sampled=torch.tensor([100, 90, 100, 5]),
        is_truncated=torch.tensor([True, False, True, False]),
        max_tokens=100,
        overlong_buffer=20,
        overlong_factor=1.0,
        truncated_coefficient=0.5,
        clip_range=(-0.25, 3.0),
    )
    # (4 - 1) / 2; 4 - 0.5 clipped; 0 - 1, of which half would be more, clipped; 9 clipped.
    assert result.tolist() == [1.5, 3.0, -0.25, 3.0]


@pytest.mark.parametrize("coefficient", [-0.5, 0.0, 0.3, 1.0])
@pytest.mark.parametrize("buffer", [None, 200])
def test_truncation_never_raises_a_reward(coefficient: float, buffer: int | None) -> None:
    rewards = torch.tensor([-2.0, -0.5, 0.0, 0.5, 1.0])

    def shaped(num_sampled: int, *, truncated: bool) -> torch.Tensor:
        return shape(
            rewards,
            num_sampled=torch.full((5,), num_sampled),
            is_truncated=torch.full((5,), truncated),
            max_tokens=1000,
            overlong_buffer=buffer,
            overlong_factor=1.0,
            truncated_coefficient=coefficient,
            clip_range=(-10.0, 10.0),
        )

    truncated, stopped = shaped(1000, truncated=True), shaped(999, truncated=False)
    assert bool((truncated <= stopped).all())
    if buffer is not None:
        # Wrong after 999 of 1,000 tokens, and wrong and truncated: the second has the lower reward.
        assert stopped[2].item() == pytest.approx(-0.995)
        assert truncated[2].item() == -1.0


def test_unset_shaping_steps_are_skipped() -> None:
    rewards = torch.tensor([1.0, -1.0])
    result = shape(
        rewards,
        num_sampled=torch.tensor([100, 100]),
        is_truncated=torch.tensor([True, True]),
        max_tokens=100,
        overlong_buffer=None,
        overlong_factor=1.0,
        truncated_coefficient=None,
        clip_range=(-10.0, 10.0),
    )
    assert result.tolist() == rewards.tolist()
