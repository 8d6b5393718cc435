"""The responses of one optimizer step on preferences, with what does not change in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vlmrl.algorithms.preference_loss import Offsets, PreferenceLoss
from vlmrl.types import Bools, Sample


@dataclass(frozen=True, slots=True, eq=False)
class PreferenceStep:
    """Everything that the loss of a step needs besides its packs, the same on all ranks.

    The id of a sample in a pack is its row here; in pairs the chosen response has an even one, and the rejected one
    the next.
    """

    settings: PreferenceLoss
    reference: NDArray[np.float64]
    """[N] log-probs of the responses under the reference, summed over each; 0 without a reference."""
    desirable: Bools | None
    """[N] of single responses; None for pairs."""
    offsets: Offsets
    num_chosen_tokens: int
    """Tokens of all chosen responses of the step, over all ranks."""

    @property
    def num_losses(self) -> int:
        """Pairs, or single responses, over all ranks."""
        return len(self.reference) // 2 if self.desirable is None else len(self.reference)


def kept_together(samples: Sequence[Sample]) -> list[Sample]:
    """Return copies that packing keeps together by pair: both responses of a group count as one."""
    return [replace(sample, response=sample.group) for sample in samples]


def summed(samples: Sequence[Sample], rows: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
    """Sum log-probs, [T] per sample, over the sampled tokens of each response: [N]."""
    sums = [row[sample.sampled].sum(dtype=np.float64) for row, sample in zip(rows, samples, strict=True)]
    return np.array(sums, dtype=np.float64)


def chosen_tokens(samples: Sequence[Sample]) -> int:
    """Return the tokens of all chosen responses of pairs; at least 1."""
    return max(sum(int(sample.sampled.sum()) for sample in samples[0::2]), 1)
