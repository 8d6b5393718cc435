from __future__ import annotations

import numpy as np

from vlmrl.algorithms.preference_loss import Offsets, PreferenceLoss
from vlmrl.data.balance import spread
from vlmrl.data.preference_step import PreferenceStep, chosen_tokens, kept_together, summed
from vlmrl.types import Sample


def pairs(count: int) -> list[Sample]:
    """Prompts of 2 tokens; responses of 1 and 3."""
    return [
        Sample(np.arange(2 + length), np.arange(2 + length) > 1, group=number // 2, response=number)
        for number, length in enumerate([1, 3] * count)
    ]


def test_both_responses_of_a_pair_stay_in_one_pack() -> None:
    for num_ranks, max_tokens in ((1, 1), (2, 10), (3, 1000)):
        ranks = spread(
            kept_together(pairs(4)),
            num_ranks=num_ranks,
            layout="shared",
            max_tokens=max_tokens,
            max_samples=1,
            image_cost=lambda image: 0.0,
            filler=None,
            whole_responses=True,
        )
        packs = [[i for i in pack.ids if i >= 0] for rank in ranks for pack in rank]
        assert sorted(i for pack in packs for i in pack) == list(range(8))
        for pack in packs:
            assert all(i ^ 1 in pack for i in pack)


def test_counts_and_sums_by_hand() -> None:
    samples = pairs(2)
    assert chosen_tokens(samples) == 2
    rows = [np.full(len(sample.tokens), -2.0, dtype=np.float32) for sample in samples]
    assert summed(samples, rows).tolist() == [-2.0, -6.0, -2.0, -6.0]
    settings = PreferenceLoss(kind="dpo", beta=0.1)
    step = PreferenceStep(settings, np.zeros(4), None, Offsets(), 2)
    assert step.num_losses == 2
    assert PreferenceStep(settings, np.zeros(4), np.ones(4, dtype=np.bool_), Offsets(), 2).num_losses == 4
