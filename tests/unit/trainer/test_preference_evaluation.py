from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from vlmrl.algorithms.preference_loss import PreferenceLoss
from vlmrl.data.judgements import Judged
from vlmrl.data.pairs import Pairs
from vlmrl.trainer.preference_evaluation import PreferenceEvaluation, _compared
from vlmrl.types import Floats, Sample


class Scripted:
    """A model whose log-prob of every token is the response's number times -1, and whose reference is -2 in all."""

    delta = 0.0

    def __init__(self, kind: str, *, nll_coef: float = 0.0) -> None:
        self.loss = PreferenceLoss(kind=kind, beta=1.0, nll_coef=nll_coef)
        self.num_references = 0

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        return [np.full(3, -float(sample.response or 0), dtype=np.float32) for sample in samples]

    def reference_sums(self, samples: Sequence[Sample]) -> NDArray[np.float64]:
        self.num_references += 1
        return np.full(len(samples), -2.0)

    def kto_baseline(self, samples: Sequence[Sample]) -> float:
        return 0.0

    def uncounted(self) -> Any:
        return nullcontext()


def samples(*numbers: int) -> list[Sample]:
    return [Sample(np.zeros(3, dtype=np.int64), np.arange(3) > 1, response=number) for number in numbers]


def test_accuracy_counts_equal_rewards_as_half() -> None:
    # Log-probs -1, -2 | -3, -1 | -2, -2: margins of 1, -2 and 0.
    pairs = Pairs(samples(1, 2, 3, 1, 2, 2), np.zeros(3, dtype=np.float32))
    model = Scripted("dpo")
    evaluation = PreferenceEvaluation({"toy": pairs}, model)
    expected = {
        "eval/toy/accuracy": 0.5,
        "eval/toy/margin": pytest.approx(-1 / 3),
        "eval/toy/loss": pytest.approx(sum(math.log1p(math.exp(-margin)) for margin in (1.0, -2.0, 0.0)) / 3, abs=1e-6),
    }
    assert evaluation.measure(1) == expected
    assert evaluation.measure(2) == expected
    assert model.num_references == 1


def test_the_loss_has_the_nll_term_that_is_trained() -> None:
    # The chosen responses have one token each, with log-probs -1, -3 and -2: their mean NLL is 2.
    pairs = Pairs(samples(1, 2, 3, 1, 2, 2), np.zeros(3, dtype=np.float32))
    plain, with_nll = (
        PreferenceEvaluation({"toy": pairs}, Scripted("dpo", nll_coef=coef)).measure(1)["eval/toy/loss"]
        for coef in (0.0, 0.5)
    )
    assert with_nll - plain == pytest.approx(0.5 * 2)


def test_single_responses_are_compared_with_all_of_the_other_class() -> None:
    # Rewards 1 and -1 of desirable responses, 0 and -2 of the others: margins 1, 3, -1, 1.
    desirable = np.array([True, True, False, False])
    desirable.flags.writeable = False  # as it comes from another process
    judged = Judged(samples(1, 3, 2, 4), desirable)
    metrics = PreferenceEvaluation({"toy": judged}, Scripted("kto")).measure(0)
    assert metrics["eval/toy/accuracy"] == 0.75
    assert metrics["eval/toy/margin"] == 1.0
    sigmoid = [1 / (1 + math.exp(value)) for value in (1.0, -1.0, 0.0, 2.0)]
    assert metrics["eval/toy/loss"] == pytest.approx(sum(sigmoid) / 4, abs=1e-6)


def test_nothing_held_out_measures_nothing() -> None:
    assert PreferenceEvaluation({}, Scripted("dpo")).measure(0) == {}


def test_classes_are_compared_as_a_table_of_all_pairs_would() -> None:
    generator = torch.Generator().manual_seed(0)
    good, bad = (torch.randint(0, 5, (size,), generator=generator).double() for size in (7, 4))
    table = (good[:, None] - bad[None, :]).flatten()
    expected = ((table > 0).double() + 0.5 * (table == 0).double()).mean()
    metrics = _compared("toy", good, bad)
    assert metrics["eval/toy/accuracy"] == pytest.approx(float(expected), abs=1e-12)
    assert metrics["eval/toy/margin"] == pytest.approx(float(table.mean()), abs=1e-12)
    assert _compared("toy", good, bad[:0]) == {}
