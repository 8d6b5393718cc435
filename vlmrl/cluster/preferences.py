"""A policy over ranks that learns from preferences, with its reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vlmrl.algorithms.preference_loss import Offsets, PreferenceLoss
from vlmrl.cluster.models import RemotePolicy
from vlmrl.cluster.sequence_groups import each_group
from vlmrl.data.judgements import Judged, mismatched
from vlmrl.data.pairs import Pairs
from vlmrl.data.preference_step import PreferenceStep, chosen_tokens, kept_together, summed
from vlmrl.data.reference_cache import ReferenceCache
from vlmrl.errors import ConfigError
from vlmrl.observe.metrics import reduce
from vlmrl.types import Bools, Floats, Metrics, Sample

_WITH_DELTA = ("bco", "mpo")


class Reference(Protocol):
    """Log-probs under the frozen reference."""

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """Return one array of [T] per sample."""


class PreferencePolicy(RemotePolicy):
    """The trained model over ranks. Its checkpoints hold the running mean of BCO's rewards."""

    def __init__(
        self,
        policy: RemotePolicy,
        loss: PreferenceLoss,
        reference: Reference | None,
        cache: ReferenceCache | None,
        *,
        max_len: int,
    ) -> None:
        """Learn as the ranks of `policy`.

        Args:
            max_len: most tokens of a prompt with its response.
            reference: scores every batch; None without one, or if `cache` has all values.
            cache: values that were computed before training.
        """
        super().__init__(policy.ranks, policy._step_plan)
        self.loss = loss
        self._reference = reference
        self._cache = cache
        self._max_len = max_len
        self._num_rewards, self._sum_of_rewards = 0.0, 0.0

    @property
    def delta(self) -> float:
        """Mean reward of all responses so far."""
        return self._sum_of_rewards / self._num_rewards if self._num_rewards else 0.0

    def reference_sums(self, samples: Sequence[Sample]) -> NDArray[np.float64]:
        """Return the log-probs of responses under the reference, summed over each: [N]; 0 without a reference.

        Raises:
            ConfigError: the reference was computed before training, but not for these responses.
        """
        if self._cache is not None:
            if missing := self._cache.missing(samples):
                raise ConfigError(
                    f"the precomputed reference lacks {len(missing)} responses, the first of row {missing[0].source}: "
                    "give the same data.* settings, model and train.batch_size as before, or start in a new output "
                    "folder"
                )
            return self._cache.values(samples)
        if self._reference is None:
            return np.zeros(len(samples))
        return summed(samples, self._reference.logprobs(samples))

    def fit_pairs(self, pairs: Pairs) -> Metrics:
        """Take one optimizer step on pairs; return its metrics."""
        metrics = self._fit(
            kept_together(pairs.samples),
            None,
            Offsets(delta=self.delta),
            self.reference_sums(pairs.samples),
        )
        if self.loss.kind in _WITH_DELTA:
            metrics["dpo/delta"] = self.delta
            self._num_rewards += 2 * len(pairs)
            self._sum_of_rewards += len(pairs) * (metrics["dpo/reward_chosen"] + metrics["dpo/reward_rejected"])
        return metrics

    def fit_judged(self, judged: Judged) -> Metrics:
        """Take one optimizer step on desirable and undesirable responses; return its metrics."""
        baseline = self.kto_baseline(judged.samples)
        metrics = self._fit(
            judged.samples, judged.desirable, Offsets(baseline=baseline), self.reference_sums(judged.samples)
        )
        return metrics | {"dpo/kl": baseline}

    def kto_baseline(self, samples: Sequence[Sample]) -> float:
        """Return the mean log-ratio of policy to reference of each prompt with a response to another, at least 0."""
        others = mismatched(samples, max_len=self._max_len)
        ratios = summed(others, self.logprobs(others)) - self.reference_sums(others)
        return max(0.0, float(ratios.mean()))

    def _fit(
        self,
        samples: Sequence[Sample],
        desirable: Bools | None,
        offsets: Offsets,
        reference: NDArray[np.float64],
    ) -> Metrics:
        step = PreferenceStep(self.loss, reference, desirable, offsets, chosen_tokens(samples))
        packs = self.ranks.packing.spread(samples, self.ranks.num_groups, whole_responses=True)
        return reduce(each_group(self._group, lambda policy, share: policy.fit_preferences(share, step), packs))

    def save_checkpoint(self, folder: Path, extra: dict[str, Any]) -> None:
        rewards = {"rewards": [self._num_rewards, self._sum_of_rewards]} if self.loss.kind in _WITH_DELTA else {}
        super().save_checkpoint(folder, extra | rewards)

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        extra = super().load_checkpoint(folder)
        self._num_rewards, self._sum_of_rewards = extra.get("rewards", (0.0, 0.0))
        return extra
