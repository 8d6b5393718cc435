"""Explained variance from sums. That a critic learns, on ranks with DeepSpeed: end_to_end/test_learning_critic.py."""

from __future__ import annotations

import numpy as np
import pytest

from vlmrl.data.experience import Experience
from vlmrl.learning.critic import _moments, explained_variance
from vlmrl.types import Floats, Sample


def experience(*rows: tuple[str, list[float], list[float]]) -> Experience:
    """Make an experience from rows (sampled tokens as `..xx`, returns, values)."""
    samples = [Sample(np.arange(len(flags)), np.array([flag == "x" for flag in flags])) for flags, _, _ in rows]

    def column(n: int) -> list[Floats]:
        return [np.array(row[n], np.float32) for row in rows]

    blank = [np.zeros(len(s.tokens), np.float32) for s in samples]
    return Experience(
        samples, advantages=blank, old_logprobs=None, rollout_logprobs=blank, returns=column(1), values=column(2)
    )


def explained(*rows: tuple[str, list[float], list[float]]) -> float | None:
    return explained_variance(*_moments(experience(*rows)).tolist())


def test_sums_are_over_sampled_tokens_only() -> None:
    nan = float("nan")
    one = (".x.x", [nan, 1.0, nan, 2.0], [nan, 0.5, nan, 2.0])
    other = ("..x", [9.0, 9.0, -1.0], [5.0, 5.0, -3.0])
    # Returns 1, 2, -1; errors 0.5, 0, 2.
    assert _moments(experience(one, other)).tolist() == [3.0, 2.0, 6.0, 2.5, 4.25]
    assert _moments(experience((".", [1.0], [2.0]))).tolist() == [0.0] * 5


def test_explained_variance_matches_its_definition() -> None:
    # Returns 1, 2, 3, 6 have a variance of 14 / 4; errors 1, -1, 1, -1 one of 1.
    rows = ("xx", [1.0, 2.0], [0.0, 3.0]), (".xx", [0.0, 3.0, 6.0], [0.0, 2.0, 7.0])
    assert explained(*rows) == pytest.approx(1 - 1 / 3.5)


def test_exact_values_explain_all_variance_and_the_mean_none() -> None:
    assert explained(("xxx", [1.0, 2.0, 5.0], [1.0, 2.0, 5.0])) == 1.0
    # An offset is not variance.
    assert explained(("xxx", [1.0, 2.0, 5.0], [3.0, 4.0, 7.0])) == 1.0
    assert explained(("xxx", [1.0, 2.0, 6.0], [3.0, 3.0, 3.0])) == pytest.approx(0.0)
    wrong = explained(("xx", [1.0, -1.0], [-1.0, 1.0]))
    assert wrong == pytest.approx(1 - 4)


def test_equal_returns_have_no_explained_variance() -> None:
    assert explained(("xxx", [0.3, 0.3, 0.3], [1.0, 2.0, 3.0])) is None
    assert explained(("...", [1.0, 2.0, 3.0], [1.0, 2.0, 3.0])) is None
    # Rounding errors of the sums are no variance.
    row = np.full(1000, 1e3 / 3, np.float32).tolist()
    assert explained(("x" * 1000, row, [0.0] * 1000)) is None
