"""Accuracy, loss and calibration of reward models, against numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from vlmrl.data.labelled_steps import LabelledSteps
from vlmrl.data.pairs import Pairs
from vlmrl.trainer.reward_evaluation import calibration_error, measure_pairs, measure_steps, responses_of_scale
from vlmrl.types import Floats, Sample

NAN = float("nan")


class Scores:
    """A model whose score of a response is its last token, and whose log-odds of a step are the token that ends it."""

    def scores(self, samples: Sequence[Sample]) -> list[float]:
        return [float(sample.tokens[-1]) for sample in samples]

    def step_odds(self, samples: Sequence[Sample], labels: Sequence[Floats]) -> list[Floats]:
        return [sample.tokens[np.isfinite(row)].astype(np.float32) for sample, row in zip(samples, labels, strict=True)]


def sample(*tokens: int) -> Sample:
    return Sample(np.array(tokens), np.ones(len(tokens), dtype=np.bool_))


def test_pairs_are_right_if_the_chosen_response_scores_higher() -> None:
    # Differences 2, -1 and 0: a tie is not right.
    samples = [sample(9, value) for value in (3, 1, 0, 1, 5, 5)]
    pairs = Pairs(samples, np.array([0.0, 0.0, 1.0], dtype=np.float32))
    metrics = measure_pairs(0, sets={"toy": pairs}, model=Scores())
    assert metrics["eval/toy/accuracy"] == pytest.approx(1 / 3)
    expected = (math.log(1 + math.exp(-2)) + math.log(1 + math.e) + math.log(1 + math.e)) / 3
    assert metrics["eval/toy/loss"] == pytest.approx(expected)
    # Confidences 0.881, 0.731 and 0.5, each in a bin of its own.
    gaps = (1 - 1 / (1 + math.exp(-2))) + 1 / (1 + math.exp(-1)) + 0.5
    assert metrics["eval/toy/calibration_error"] == pytest.approx(gaps / 3)


def test_steps_are_right_where_the_sign_of_the_odds_is_the_labels() -> None:
    labels = [np.array([NAN, 1.0, NAN, 0.0]), np.array([NAN, 0.75])]
    steps = LabelledSteps([sample(0, 2, 0, 1), sample(0, -1)], [row.astype(np.float32) for row in labels])
    metrics = measure_steps(0, sets={"toy": steps}, model=Scores())
    # Log-odds 2, 1 and -1 for labels 1, 0 and 0.75.
    assert metrics["eval/toy/accuracy"] == pytest.approx(1 / 3)
    softplus = [math.log(1 + math.exp(x)) for x in (2, 1, -1)]
    assert metrics["eval/toy/loss"] == pytest.approx((softplus[0] - 2 + softplus[1] + softplus[2] + 0.75) / 3)


def test_the_calibration_error_is_the_mean_gap_of_the_bins() -> None:
    confidence = np.array([0.92, 0.92, 0.92, 0.92, 0.6, 1.0])
    is_right = np.array([True, True, True, False, True, True])
    # Bins: four with an accuracy of 0.75, one of 0.6 that is right, and the last, to which 1 belongs.
    assert calibration_error(confidence, is_right) == pytest.approx((4 * 0.17 + 0.4 + 0.0) / 6)
    assert calibration_error(np.array([0.75, 0.75]), np.array([True, False])) == pytest.approx(0.25)


def test_mean_and_deviation_are_of_a_bounded_number_of_responses() -> None:
    pairs = Pairs([sample(1)] * 4000, np.zeros(2000, dtype=np.float32))
    assert len(responses_of_scale({"a": pairs, "b": Pairs([sample(1)] * 2, np.zeros(1, dtype=np.float32))})) == 1026
