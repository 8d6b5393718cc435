"""Evaluate a reward model on held-out pairs of responses, or on held-out steps with labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vlmrl.data.labelled_steps import LabelledSteps
from vlmrl.data.pairs import Pairs
from vlmrl.types import Floats, Metrics, Sample

_NUM_BINS = 10
_NUM_SCALE_PAIRS = 512
"""Pairs of each set whose scores give mean and deviation."""


class PairScorer(Protocol):
    """A reward model, as the evaluation on pairs needs it."""

    def scores(self, samples: Sequence[Sample]) -> list[float]:
        """Return the score of each response."""


class StepScorer(Protocol):
    """A process reward model, as the evaluation on steps needs it."""

    def step_odds(self, samples: Sequence[Sample], labels: Sequence[Floats]) -> list[Floats]:
        """Return the log-odds of the labelled steps of each sample, in order."""


def measure_pairs(step: int, *, sets: Mapping[str, Pairs], model: PairScorer) -> Metrics:
    """Return accuracy, loss and calibration error of the model on each set.

    `accuracy` is the share of pairs whose chosen response has the higher score; `loss` is the mean of `-log sigmoid`
    of the differences less their margins; `calibration_error` compares the model's probabilities, the sigmoid of the
    differences, with the accuracy.
    """
    metrics: Metrics = {}
    for name, pairs in sets.items():
        scores = np.array(model.scores(pairs.samples), dtype=np.float64)
        difference = scores[0::2] - scores[1::2]
        metrics |= {
            f"eval/{name}/accuracy": float((difference > 0).mean()),
            f"eval/{name}/loss": float(np.logaddexp(0.0, pairs.margins - difference).mean()),
            f"eval/{name}/calibration_error": calibration_error(_sigmoid(np.abs(difference)), difference > 0),
        }
    return metrics


def measure_steps(step: int, *, sets: Mapping[str, LabelledSteps], model: StepScorer) -> Metrics:
    """Return accuracy, loss and calibration error of the model on the steps of each set.

    `accuracy` is the share of steps that the model takes for correct (log-odds above 0) or wrong as their labels do
    (above a half); `loss` is the mean cross-entropy.
    """
    metrics: Metrics = {}
    for name, steps in sets.items():
        rows = model.step_odds(steps.samples, steps.labels)
        odds = np.concatenate(rows).astype(np.float64)
        labels = np.concatenate([row[np.isfinite(row)] for row in steps.labels]).astype(np.float64)
        is_right = (odds > 0) == (labels > 0.5)
        metrics |= {
            f"eval/{name}/accuracy": float(is_right.mean()),
            f"eval/{name}/loss": float((np.logaddexp(0.0, odds) - labels * odds).mean()),
            f"eval/{name}/calibration_error": calibration_error(_sigmoid(np.abs(odds)), is_right),
        }
    return metrics


def calibration_error(confidence: NDArray[np.float64], is_right: NDArray[np.bool_]) -> float:
    """The expected calibration error (arXiv:1706.04599) in ten bins of confidence, from 0.5 to 1: the mean difference
    between confidence and accuracy of a bin, weighted by its size.

    Example: four predictions with confidence 0.9, of which three are right, have an error of 0.15.

    Args:
        confidence: [N] probability that the model gives to its own prediction, at least a half.
        is_right: [N] whether the prediction is right.
    """
    bins = np.minimum(((confidence - 0.5) * 2 * _NUM_BINS).astype(np.int64), _NUM_BINS - 1)
    gaps = [abs(float((confidence[bins == n] - is_right[bins == n]).sum())) for n in range(_NUM_BINS)]
    return sum(gaps) / len(confidence)


def responses_of_scale(sets: Mapping[str, Pairs]) -> list[Sample]:
    """Return the responses whose scores give the mean and deviation that are saved with the model."""
    return [sample for pairs in sets.values() for sample in pairs.samples[: 2 * _NUM_SCALE_PAIRS]]


def _sigmoid(odds: NDArray[np.float64]) -> NDArray[np.float64]:
    probabilities: NDArray[np.float64] = 1.0 / (1.0 + np.exp(-odds))
    return probabilities
