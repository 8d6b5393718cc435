from __future__ import annotations

import math

import pytest
import torch

from vlmrl.algorithms.preferences import (
    bco_loss,
    bradley_terry_loss,
    dpo_loss,
    ipo_loss,
    kto_loss,
    orpo_loss,
    response_means,
    response_sums,
    simpo_loss,
    step_loss,
)

# Two rows: the first holds responses 0 and 1 with a gap in each, the second response 3; response 2 has no token.
VALUES = torch.tensor([[9.0, -1.0, 9.0, -2.0, -4.0, -8.0], [-3.0, 9.0, -5.0, -7.0, 9.0, 9.0]])
SAMPLED = torch.tensor([[0, 1, 0, 1, 1, 1], [1, 0, 1, 1, 0, 0]], dtype=torch.bool)
OWNER = torch.tensor([[0, 0, 0, 0, 1, 1], [3, 3, 3, 3, 3, 3]])


def test_sums_and_means_ignore_gaps_padding_and_empty_responses() -> None:
    sums = response_sums(VALUES, SAMPLED, OWNER, num_responses=4)
    torch.testing.assert_close(sums, torch.tensor([-3.0, -12.0, 0.0, -15.0]))
    means = response_means(VALUES, SAMPLED, OWNER, num_responses=4)
    torch.testing.assert_close(means, torch.tensor([-1.5, -6.0, 0.0, -5.0]))


def test_a_sum_has_equal_gradients_for_its_tokens() -> None:
    values = VALUES.clone().requires_grad_()
    response_sums(values, SAMPLED, OWNER, num_responses=4)[1].backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0]]


def pair(*numbers: float) -> dict[str, torch.Tensor]:
    """Two pairs; in the second the policy equals the reference."""
    chosen, rejected, ref_chosen, ref_rejected = numbers
    return {
        "chosen": torch.tensor([chosen, -4.0]),
        "rejected": torch.tensor([rejected, -9.0]),
        "ref_chosen": torch.tensor([ref_chosen, -4.0]),
        "ref_rejected": torch.tensor([ref_rejected, -9.0]),
    }


def test_dpo_by_hand() -> None:
    # h = (-10 - -14) - (-11 - -12) = 4 - 1 = 3.
    result = dpo_loss(**pair(-10, -14, -11, -12), beta=0.5)
    torch.testing.assert_close(result, torch.tensor([math.log1p(math.exp(-1.5)), math.log(2)]))
    smoothed = dpo_loss(**pair(-10, -14, -11, -12), beta=0.5, label_smoothing=0.1)
    expected = 0.9 * math.log1p(math.exp(-1.5)) + 0.1 * math.log1p(math.exp(1.5))
    torch.testing.assert_close(smoothed, torch.tensor([expected, math.log(2)]))


def test_ipo_by_hand() -> None:
    # h = 3, and 1 / (2 * 0.25) = 2.
    torch.testing.assert_close(ipo_loss(**pair(-10, -14, -11, -12), beta=0.25), torch.tensor([1.0, 4.0]))


def test_bradley_and_terry_by_hand() -> None:
    chosen, rejected = torch.tensor([2.0, -1.0, 0.5]), torch.tensor([0.5, 1.0, 0.5])
    result = bradley_terry_loss(chosen, rejected)
    torch.testing.assert_close(result, torch.log1p(torch.exp(torch.tensor([-1.5, 2.0, 0.0]))))
    marked = bradley_terry_loss(chosen, rejected, margin=torch.tensor([1.0, 0.0, 1.0]))
    torch.testing.assert_close(marked, torch.log1p(torch.exp(torch.tensor([-0.5, 2.0, 1.0]))))


def test_the_loss_of_steps_is_the_cross_entropy_of_their_labels() -> None:
    result = step_loss(torch.tensor([2.0, 2.0, -1.0]), torch.tensor([1.0, 0.0, 0.25]))
    softplus = [math.log(1 + math.exp(x)) for x in (-2, 2, -1)]
    # log(1 + e^x) - label x
    torch.testing.assert_close(result, torch.tensor([softplus[0], softplus[1], softplus[2] + 0.25]))


def test_extreme_pairs_stay_finite() -> None:
    far = pair(1e4, -1e4, 0.0, 0.0)
    far["chosen"].requires_grad_()
    loss = dpo_loss(**far, beta=1.0)
    assert loss[0] == 0.0
    dpo_loss(**{**far, "chosen": far["rejected"], "rejected": far["chosen"]}, beta=1.0).sum().backward()
    assert far["chosen"].grad is not None
    assert far["chosen"].grad.isfinite().all()


@pytest.mark.parametrize("smoothing", [-0.1, 0.5, 1.0])
def test_a_label_smoothing_of_half_or_more_is_refused(smoothing: float) -> None:
    with pytest.raises(ValueError, match="label_smoothing"):
        dpo_loss(**pair(0, 0, 0, 0), beta=0.1, label_smoothing=smoothing)


def test_simpo_by_hand() -> None:
    # 2 * (-0.5 - -1.5) - 0.5 = 1.5; 2 * 0 - 0.5 = -0.5.
    result = simpo_loss(torch.tensor([-0.5, -1.0]), torch.tensor([-1.5, -1.0]), beta=2.0, gamma=0.5)
    torch.testing.assert_close(result, torch.log1p(torch.exp(torch.tensor([-1.5, 0.5]))))


def test_orpo_by_hand() -> None:
    # Probabilities 3/4 and 1/2 have odds 3 and 1: the sigmoid of log 3 is 3/4. Equal ones have the sigmoid 1/2.
    chosen, rejected = torch.tensor([0.75, 0.2]).log(), torch.tensor([0.5, 0.2]).log()
    result = orpo_loss(chosen, rejected, weight=0.1)
    expected = [-math.log(0.75) - 0.1 * math.log(0.75), -math.log(0.2) - 0.1 * math.log(0.5)]
    torch.testing.assert_close(result, torch.tensor(expected))


def test_orpo_of_certain_and_impossible_responses_stays_finite() -> None:
    chosen = torch.tensor([0.0, -1e-9, -1e4], requires_grad=True)
    loss = orpo_loss(chosen, torch.tensor([-1e4, -1.0, 0.0]), weight=0.1)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert chosen.grad is not None
    assert chosen.grad.isfinite().all()


def test_bco_by_hand() -> None:
    # 0.5 * 3 - 0.25 = 1.25 and 0.25 - 0.5 * -1 = 0.75; 0 - 0.25 and 0.25 - 0.
    result = bco_loss(torch.tensor([3.0, 0.0]), torch.tensor([-1.0, 0.0]), beta=0.5, delta=0.25)
    expected = [
        math.log1p(math.exp(-1.25)) + math.log1p(math.exp(-0.75)),
        math.log1p(math.exp(0.25)) + math.log1p(math.exp(-0.25)),
    ]
    torch.testing.assert_close(result, torch.tensor(expected))


def test_kto_by_hand() -> None:
    # 0.5 * (3 - 1) = 1 and 0.5 * (-1 - 1) = -1, each as desirable and as undesirable.
    ratios, desirable = torch.tensor([3.0, 3.0, -1.0, -1.0]), torch.tensor([True, False, True, False])
    result = kto_loss(ratios, desirable, baseline=1.0, beta=0.5, desirable_weight=2.0, undesirable_weight=3.0)
    low, high = 1 / (1 + math.e), 1 / (1 + 1 / math.e)
    torch.testing.assert_close(result, torch.tensor([2 * low, 3 * high, 2 * high, 3 * low]))
