from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from vlmrl.algorithms.preference_loss import (
    Offsets,
    PreferenceLoss,
    Responses,
    pair_losses,
    rewards,
    unpaired_losses,
)

# Two pairs, chosen before rejected. Means: -2, -2, -1, -3. Log-ratios: 1, -1, 0, 2.
POLICY = Responses(torch.tensor([-4.0, -8.0, -3.0, -6.0]), torch.tensor([2.0, 4.0, 3.0, 2.0]))
REFERENCE = torch.tensor([-5.0, -7.0, -3.0, -8.0])


def softplus(value: float) -> float:
    return math.log1p(math.exp(value))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"kind": "dpo"}, [softplus(-1.0), softplus(1.0)]),
        (
            {"kind": "dpo", "label_smoothing": 0.25},
            [0.75 * softplus(-1.0) + 0.25 * softplus(1.0), 0.75 * softplus(1.0) + 0.25 * softplus(-1.0)],
        ),
        # Mean log-ratios are 0.5, -0.25, 0 and 1; 1 / (2 beta) is 1.
        ({"kind": "ipo"}, [(0.75 - 1) ** 2, (-1 - 1) ** 2]),
        ({"kind": "simpo", "simpo_gamma": 0.5}, [softplus(0.5), softplus(-0.5)]),
        # beta * ratios are 0.5, -0.5, 0 and 1; delta is 0.25.
        ({"kind": "bco"}, [softplus(-0.25) + softplus(-0.75), softplus(0.25) + softplus(0.75)]),
        (
            {"kind": "mpo"},
            [
                0.8 * softplus(-1.0) + 0.2 * (softplus(-0.25) + softplus(-0.75)),
                0.8 * softplus(1.0) + 0.2 * (softplus(0.25) + softplus(0.75)),
            ],
        ),
    ],
)
def test_pairs_by_hand(settings: dict[str, Any], expected: list[float]) -> None:
    loss = PreferenceLoss(beta=0.5, **settings)
    losses = pair_losses(loss, POLICY, REFERENCE, Offsets(delta=0.25))
    torch.testing.assert_close(losses, torch.tensor(expected))


def test_orpo_of_equal_odds_by_hand() -> None:
    losses = pair_losses(PreferenceLoss(kind="orpo", beta=0.5), POLICY, REFERENCE, Offsets())
    assert losses[0].item() == pytest.approx(2 + 0.5 * math.log(2))


def test_unpaired_responses_by_hand() -> None:
    desirable = torch.tensor([True, False, True, False])
    loss = PreferenceLoss(kind="kto", beta=0.5, kto_weights=(1.0, 2.0))
    losses = unpaired_losses(loss, POLICY, REFERENCE, desirable, Offsets(baseline=1.0))
    # beta * (ratio - 1) is 0, -1, -0.5, 0.5.
    expected = torch.tensor([0.5, 2 / (1 + math.e), 1 / (1 + math.exp(-0.5)), 2 / (1 + math.exp(-0.5))])
    torch.testing.assert_close(losses, expected)


def test_rewards_are_what_the_loss_compares() -> None:
    def of(kind: str) -> list[float]:
        result: list[float] = rewards(PreferenceLoss(kind=kind, beta=0.5), POLICY, REFERENCE).tolist()
        return result

    assert of("dpo") == of("bco") == of("mpo") == of("kto") == [0.5, -0.5, 0.0, 1.0]
    assert of("ipo") == [0.25, -0.125, 0.0, 0.5]
    assert of("simpo") == of("orpo") == [-1.0, -1.0, -0.5, -1.5]
