from __future__ import annotations

from typing import Any

import pytest

from vlmrl.report.symptoms import symptoms


def steps(name: str, *values: float | None, **others: float) -> list[dict[str, Any]]:
    return [{"step": step, name: value, **others} for step, value in enumerate(values, start=1)]


@pytest.mark.parametrize(
    ("records", "metric", "text"),
    [
        (
            steps("policy/entropy", *[1.0] * 10, *[0.05] * 10, **{"reward/mean": 1.0}),
            "policy/entropy",
            "from 1 to 0.05",
        ),
        (steps("response/tokens_mean", *[20.0] * 10, *[90.0] * 10), "response/tokens_mean", "from 20 to 90 tokens"),
        (steps("group/constant_fraction", *[0.9] * 3), "group/constant_fraction", "is 0.9"),
        (steps("response/truncated_fraction", *[0.5] * 3), "response/truncated_fraction", "is 0.5"),
        (steps("reward/failed", 0.0, 2.0, 1.0), "reward/failed", "3 responses could not be scored"),
        (steps("data/rows_dropped", 0.0, 4.0), "data/rows_dropped", "is 2"),
        (steps("policy/loss", 1.0, None), "policy/loss", "Not a number"),
        (steps("eval/toy/truncated_fraction", 0.0, 0.0, 0.3), "eval/toy/truncated_fraction", "is 0.3"),
    ],
)
def test_a_sign_of_trouble_names_the_metric(records: list[dict[str, Any]], metric: str, text: str) -> None:
    (found,) = symptoms(records)
    assert found.metric == metric
    assert text in found.text
    assert found.advice


def test_a_sum_over_some_steps_says_so() -> None:
    (found,) = symptoms([{"step": step, "reward/failed": 2.0} for step in (10, 20, 30)])
    assert found.text == "6 responses could not be scored in the 3 logged steps of 30."


def test_a_healthy_run_has_no_warning() -> None:
    healthy = {"reward/mean": 0.5, "policy/entropy": 1.0, "group/constant_fraction": 0.2, "reward/failed": 0.0}
    assert symptoms([{"step": step, **healthy, "response/tokens_mean": 20.0 + step} for step in range(30)]) == []
    assert symptoms([]) == []


def test_supervised_training_may_lower_the_entropy() -> None:
    assert symptoms(steps("policy/entropy", *[1.0] * 10, *[0.05] * 10)) == []


@pytest.mark.parametrize("values", [[0.0] * 20, [-0.01] * 20, [-0.5] * 10 + [-1.0] * 10])
def test_an_entropy_that_was_never_above_zero_has_not_fallen(values: list[float]) -> None:
    found = symptoms(steps("policy/entropy", *values, **{"reward/mean": 1.0}))
    assert not [symptom for symptom in found if "fell" in symptom.text]


def test_an_entropy_that_falls_to_zero_has_fallen() -> None:
    (found,) = symptoms(steps("policy/entropy", *[1.0] * 10, *[0.0] * 10, **{"reward/mean": 1.0}))
    assert "from 1 to 0" in found.text
