"""Evaluate a model by the likelihood of held-out responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np

from vlmrl.trainer.protocols import Reference
from vlmrl.types import Metrics, Sample


class ScoringPolicy(Reference, Protocol):
    """The model, as this evaluation needs it."""

    def uncounted(self) -> AbstractContextManager[None]:
        """Exclude model passes within the context from the step's metrics."""


def measure_likelihood(step: int, *, sets: Mapping[str, Sequence[Sample]], policy: ScoringPolicy) -> Metrics:
    """Return `eval/<set>/loss` of each set: the mean negative log-likelihood of the tokens of its responses."""
    metrics: Metrics = {}
    with policy.uncounted():
        for name, samples in sets.items():
            rows = policy.logprobs(samples)
            tokens = np.concatenate([row[sample.sampled] for row, sample in zip(rows, samples, strict=True)])
            metrics[f"eval/{name}/loss"] = float(-tokens.astype(np.float64).mean())
    return metrics
