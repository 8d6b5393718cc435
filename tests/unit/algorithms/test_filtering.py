import pytest

from vlmrl.algorithms.filtering import keeps


@pytest.mark.parametrize(("mean", "kept"), [(0.0, False), (0.125, True), (0.875, True), (1.0, False), (-1.0, False)])
def test_groups_on_the_bounds_are_left_out(mean: float, kept: bool) -> None:
    assert keeps(mean, 0.0, 1.0) is kept


def test_a_mean_that_is_no_number_is_left_out() -> None:
    assert not keeps(float("nan"), 0.0, 1.0)


@pytest.mark.parametrize(("low", "high"), [(1.0, 0.0), (0.5, 0.5)])
def test_an_empty_range_is_refused(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="no mean lies between"):
        keeps(0.5, low, high)


def test_rounding_keeps_no_group() -> None:
    assert not keeps(0.7 + 0.2 + 0.1, 0.0, 1.0)
    assert not keeps((0.1 + 0.1 + 0.1) / 3, 0.1, 1.0)
