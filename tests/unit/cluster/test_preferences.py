from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vlmrl.algorithms.preference_loss import PreferenceLoss
from vlmrl.cluster.models import PackingPlan, PassMetrics, Ranks, RemotePolicy, StepPlan
from vlmrl.cluster.preferences import PreferencePolicy
from vlmrl.cluster.remote_call import record_call
from vlmrl.data.judgements import Judged
from vlmrl.data.packing import Pack
from vlmrl.data.pairs import Pairs
from vlmrl.data.preference_step import PreferenceStep
from vlmrl.data.reference_cache import ReferenceCache
from vlmrl.errors import ConfigError
from vlmrl.observe.metrics import Mean
from vlmrl.types import Floats, Sample


class FakeRanks:
    """Ranks whose log-prob of each token is -1, and whose rewards are 3 for chosen and 1 for rejected responses."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.steps: list[tuple[list[Pack], PreferenceStep]] = []
        self.extra: dict[str, Any] = {}

    def __len__(self) -> int:
        return self.number

    def call(self, function: Any) -> list[Any]:
        method, args, _ = record_call(function)
        if method == "save_checkpoint":
            self.extra = args[1]
            return [None] * self.number
        assert method == "load_checkpoint"
        return [dict(self.extra)] * self.number

    def each(self, function: Any, items: list[Any]) -> list[Any]:
        return [self._call(function, item) for item in items]

    def _call(self, function: Any, item: Any) -> Any:
        method, args, _ = record_call(function, item)
        if method == "logprobs":
            rows = [
                (i, np.full(len(sample.tokens), -1.0, dtype=np.float32))
                for pack in args[0]
                for i, sample in zip(pack.ids, pack.samples, strict=True)
                if i >= 0
            ]
            return rows, {}
        assert method == "fit_preferences"
        self.steps.append(args)
        return {"dpo/reward_chosen": Mean(3.0), "dpo/reward_rejected": Mean(1.0)}


class Halves:
    """A reference whose log-prob of each token is -0.5."""

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        return [np.full(len(sample.tokens), -0.5, dtype=np.float32) for sample in samples]


def sample(number: int, length: int = 2) -> Sample:
    tokens = np.arange(3 + length) + 10 * number
    return Sample(tokens, np.arange(3 + length) >= 3, group=number // 2, response=number, source=f"toy:{number}")


def pairs(count: int) -> Pairs:
    return Pairs([sample(n, 1 + n % 2) for n in range(2 * count)], np.zeros(count, dtype=np.float32))


def policy(kind: str, ranks: FakeRanks, **options: Any) -> PreferencePolicy:
    packing = PackingPlan("packed", 1, max_samples=None, image_cost=lambda image: 0.0, filler=None)
    remote = RemotePolicy(
        Ranks(ranks, packing, 1, PassMetrics()),  # type: ignore[arg-type]
        StepPlan(4, epochs=1, seed=0),
    )
    return PreferencePolicy(
        remote, PreferenceLoss(kind=kind, beta=0.1), **({"reference": Halves(), "cache": None, "max_len": 16} | options)
    )


def test_both_responses_of_a_pair_reach_the_same_rank_with_the_reference() -> None:
    ranks = FakeRanks(2)
    policy("dpo", ranks).fit_pairs(pairs(3))
    packs = [pack.ids for of_rank, _ in ranks.steps for pack in of_rank if max(pack.ids) >= 0]
    assert sorted(packs) == [(0, 1), (2, 3), (4, 5)]
    _, step = ranks.steps[0]
    assert step.reference.tolist() == [-0.5, -1.0] * 3
    assert (step.num_losses, step.num_chosen_tokens) == (3, 3)


def test_losses_without_a_reference_read_zeros() -> None:
    ranks = FakeRanks(1)
    policy("simpo", ranks, reference=None).fit_pairs(pairs(1))
    assert ranks.steps[0][1].reference.tolist() == [0.0, 0.0]


def test_delta_is_the_mean_of_all_earlier_rewards_and_in_the_checkpoint(tmp_path: Path) -> None:
    ranks = FakeRanks(1)
    learner = policy("bco", ranks)
    deltas = [learner.fit_pairs(pairs(2))["dpo/delta"] for _ in range(3)]
    assert deltas == [0.0, 2.0, 2.0]
    learner.save_checkpoint(tmp_path, {"step": 3})
    resumed = policy("bco", ranks)
    assert resumed.delta == 0.0
    assert resumed.load_checkpoint(tmp_path)["step"] == 3
    assert resumed.delta == learner.delta == 2.0
    other = FakeRanks(1)
    policy("dpo", other).save_checkpoint(tmp_path, {"step": 3})
    assert other.extra == {"step": 3}


def test_ktos_baseline_is_the_mean_ratio_of_mismatched_responses() -> None:
    ranks = FakeRanks(2)
    judged = Judged([sample(n, 2) for n in range(4)], np.array([True, False, True, True]))
    # Each response has 2 tokens: -2 under the policy, -1 under the reference; a ratio below 0 counts as 0.
    assert policy("kto", ranks).fit_judged(judged)["dpo/kl"] == 0.0

    class Twice(Halves):
        def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
            return [4 * row for row in super().logprobs(samples)]

    metrics = policy("kto", ranks, reference=Twice()).fit_judged(judged)
    assert metrics["dpo/kl"] == 2.0
    step = ranks.steps[-1][1]
    assert step.offsets.baseline == 2.0
    assert step.desirable is judged.desirable
    assert step.num_losses == 4


def test_a_precomputed_reference_is_read_from_its_cache() -> None:
    ranks, batch = FakeRanks(1), pairs(2)
    cache = ReferenceCache(None, reference="m")
    cache.add(batch.samples, np.array([-1.0, -2.0, -3.0, -4.0]))
    learner = policy("dpo", ranks, reference=None, cache=cache)
    learner.fit_pairs(batch)
    assert ranks.steps[0][1].reference.tolist() == [-1.0, -2.0, -3.0, -4.0]
    with pytest.raises(ConfigError, match="lacks 2 responses, the first of row toy:4"):
        learner.fit_pairs(pairs(3))
