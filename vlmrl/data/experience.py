"""A batch of samples with all that the loss reads of each token: the last stage of a step's data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vlmrl.types import Floats, Sample


@dataclass(frozen=True, slots=True, eq=False)
class Experience:
    """A batch of samples, with all per-token inputs of the loss. Lists run over samples."""

    samples: Sequence[Sample]
    """B of them."""
    advantages: Sequence[Floats]
    """B arrays of [T]; 0 where not sampled."""
    old_logprobs: Sequence[Floats] | None
    """B arrays of [T]: by the policy before the update, recomputed by the trainer. None: the update makes one pass, and
    uses its own log-probs."""
    rollout_logprobs: Sequence[Floats]
    """B arrays of [T]: by the engine, when it sampled."""
    ref_logprobs: Sequence[Floats] | None = None
    """B arrays of [T]; None when no reference takes part in the loss."""
    values: Sequence[Floats] | None = None
    """B arrays of [T]: by the critic before the update; None without a critic."""
    returns: Sequence[Floats] | None = None
    """B arrays of [T]: the targets of the critic."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference in the loss."""
    span: tuple[float, float] | None = None
    """Progress of the run before and after this step, from 0 to 1, which the learning rate follows. With dynamic
    filtering steps take different numbers of prompts; None without it, where the schedule counts optimizer steps."""

    def __post_init__(self) -> None:
        lengths = [len(s.tokens) for s in self.samples]
        for name in _COLUMNS:
            column = getattr(self, name)
            if column is not None and [len(row) for row in column] != lengths:
                raise ValueError(f"the {name} of an experience do not match the lengths of its samples")

    def select(self, rows: Sequence[int]) -> Experience:
        """Return the experience of these samples, in this order."""
        return self.rearranged([self.samples[r] for r in rows], lambda column: [column[r] for r in rows])

    def rearranged(self, samples: Sequence[Sample], pick: Callable[[Sequence[Floats]], Sequence[Floats]]) -> Experience:
        """Return an experience of `samples`, with `pick` applied to every column that is not None."""
        picked: dict[str, Any] = {
            name: pick(getattr(self, name)) for name in _COLUMNS if getattr(self, name) is not None
        }
        return replace(self, samples=samples, **picked)


_COLUMNS = ("advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs", "values", "returns")
