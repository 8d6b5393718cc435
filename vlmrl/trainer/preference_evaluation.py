"""Evaluate a model by its preference among held-out responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vlmrl.algorithms.preference_loss import (
    Offsets,
    PreferenceLoss,
    Responses,
    pair_losses,
    rewards,
    unpaired_losses,
)
from vlmrl.data.judgements import Judged
from vlmrl.data.pairs import Pairs
from vlmrl.data.preference_step import chosen_tokens, summed
from vlmrl.types import Floats, Metrics, Sample


class PreferenceModel(Protocol):
    """The model, as this evaluation needs it."""

    @property
    def loss(self) -> PreferenceLoss:
        """Settings of the loss."""

    @property
    def delta(self) -> float:
        """BCO's running mean of rewards."""

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """Return one array of [T] per sample."""

    def reference_sums(self, samples: Sequence[Sample]) -> NDArray[np.float64]:
        """Return the log-probs of responses under the reference: [N]."""

    def kto_baseline(self, samples: Sequence[Sample]) -> float:
        """Return the baseline of KTO."""

    def uncounted(self) -> AbstractContextManager[None]:
        """Exclude model passes within the context from the step's metrics."""


class PreferenceEvaluation:
    """Evaluates a model on sets of held-out pairs, or of single responses with labels."""

    def __init__(self, sets: Mapping[str, Pairs | Judged], model: PreferenceModel) -> None:
        self._sets = sets
        self._model = model
        self._references: dict[str, NDArray[np.float64]] = {}

    def measure(self, step: int) -> Metrics:
        """Return `eval/<set>/loss`, `eval/<set>/margin` and `eval/<set>/accuracy` of each set.

        The loss is the trained one, with its NLL term. Accuracy is the share of pairs whose chosen response has the
        larger reward, where equal ones count as half. Single responses are compared with those of the other class: all
        of them with all.
        """
        metrics: Metrics = {}
        with self._model.uncounted():
            for name, rows in self._sets.items():
                if name not in self._references:  # the reference does not change
                    self._references[name] = self._model.reference_sums(rows.samples)
                metrics |= self._of_set(name, rows, torch.from_numpy(self._references[name]))
        return metrics

    def _of_set(self, name: str, rows: Pairs | Judged, reference: torch.Tensor) -> Metrics:
        model, samples = self._model, rows.samples
        lengths = torch.tensor([float(sample.sampled.sum()) for sample in samples], dtype=torch.float64)
        policy = Responses(torch.from_numpy(summed(samples, model.logprobs(samples))), lengths)
        values = rewards(model.loss, policy, reference)
        if isinstance(rows, Pairs):
            losses = pair_losses(model.loss, policy, reference, Offsets(delta=model.delta))
            nll = -float(policy.sums[0::2].sum()) / chosen_tokens(samples)
            margins = values[0::2] - values[1::2]
        else:
            desirable = torch.tensor(rows.desirable)  # a copy: arrays from other processes cannot be written to
            offsets = Offsets(baseline=model.kto_baseline(samples) if len(rows) > 1 else 0.0)
            losses = unpaired_losses(model.loss, policy, reference, desirable, offsets)
            return {f"eval/{name}/loss": float(losses.mean())} | _compared(name, values[desirable], values[~desirable])
        right = (margins > 0).double() + 0.5 * (margins == 0).double()
        return {
            f"eval/{name}/loss": float(losses.mean()) + model.loss.nll_coef * nll,
            f"eval/{name}/accuracy": float(right.mean()),
            f"eval/{name}/margin": float(margins.mean()),
        }


def _compared(name: str, desirable: torch.Tensor, undesirable: torch.Tensor) -> Metrics:
    """Compare each desirable response's reward with that of each undesirable one, without a table of all pairs."""
    if not len(desirable) or not len(undesirable):
        return {}
    order = undesirable.sort().values
    below, not_above = (torch.searchsorted(order, desirable, right=right).double() for right in (False, True))
    return {
        f"eval/{name}/accuracy": float(((below + not_above) / 2).mean() / len(order)),
        f"eval/{name}/margin": float(desirable.mean() - undesirable.mean()),
    }
