"""`vlmrl bench dpo`: an optimizer step of DPO in each layout, on the same model and pairs; see `bench.step`.

The reference is known, as with `dpo.precompute_reference`: its passes are no part of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vlmrl.algorithms.preference_loss import Offsets, PreferenceLoss
from vlmrl.commands.bench.step import Measurement, TimedPolicy
from vlmrl.commands.bench.step import step as measure_step
from vlmrl.config.bench_verbs import DpoBench, StepBench
from vlmrl.config.train import Layout
from vlmrl.data.experience import Experience
from vlmrl.data.packing import Pack
from vlmrl.data.preference_step import PreferenceStep, chosen_tokens, kept_together, summed
from vlmrl.learning.base import PackLoss
from vlmrl.observe.metrics import reduce

_BETA = 0.1


def step(config: DpoBench) -> None:
    """Measure every layout; print a line of JSON for each, and a table."""
    measure_step(config, TimedLearner)


class TimedLearner(TimedPolicy):
    """The policy of training, whose update is a step of DPO."""

    whole_responses = True

    def pack(self, samples: Sequence[Any], layout: Layout, config: StepBench) -> list[Pack]:
        return super().pack(kept_together(samples), layout, config)

    def step(self, measurement: Measurement, experience: Experience) -> dict[str, float]:
        samples, old = list(experience.samples), experience.old_logprobs
        assert old is not None, "the log-probs of the first weights are the reference"
        preference = PreferenceStep(
            settings=PreferenceLoss(kind="dpo", beta=_BETA),
            reference=summed(samples, [np.asarray(row) for row in old]),
            desirable=None,
            offsets=Offsets(),
            num_chosen_tokens=chosen_tokens(samples),
        )
        return reduce([self.fit_preferences(measurement.packs, preference)])

    def _preference_loss(self, pack: Pack, step: PreferenceStep) -> PackLoss:
        with self.clock("forward"):
            return super()._preference_loss(pack, step)
