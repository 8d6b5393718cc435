import pytest
import torch

from vlmrl.algorithms.aggregation import constant_mean, reduce, response_mean, sequence_mean, token_mean
from vlmrl.types import Totals

F, T = False, True
INF, NAN = float("inf"), float("nan")
# Three responses: 0 and 1 packed into the first row with a gap between them, 2 alone in the second.
LOSSES = torch.tensor([[INF, 1.0, 3.0, NAN, 8.0], [NAN, 2.0, INF, 4.0, 6.0]])
SAMPLED = torch.tensor([[F, T, T, F, T], [F, T, F, T, T]])
TOTALS = Totals(num_tokens=6, num_responses=3)
LENGTHS = torch.tensor([[2, 2, 2, 1, 1], [3, 3, 3, 3, 3]])
"""Sampled tokens of the response at each position."""


def test_token_mean_weights_tokens_equally() -> None:
    assert token_mean(LOSSES, SAMPLED, num_tokens=6).item() == 4.0


def test_sequence_mean_weights_responses_equally() -> None:
    assert sequence_mean(LOSSES, SAMPLED, LENGTHS, num_responses=3).item() == pytest.approx((2 + 8 + 4) / 3)


def test_a_response_may_lie_in_several_micro_batches() -> None:
    places = [(row, columns) for row in (0, 1) for columns in (slice(0, 2), slice(2, 5))]
    parts = [(slice(row, row + 1), columns) for row, columns in places]
    shares = [sequence_mean(LOSSES[p], SAMPLED[p], LENGTHS[p], num_responses=3).item() for p in parts]
    assert sum(shares) == pytest.approx((2 + 8 + 4) / 3)


def test_constant_mean_divides_by_the_longest_response() -> None:
    assert constant_mean(LOSSES, SAMPLED, num_responses=3, max_tokens=10).item() == pytest.approx(24 / 30)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_losses_of_micro_batches_add_up_to_the_step(aggregation) -> None:  # type: ignore[no-untyped-def]
    totals = {"totals": TOTALS, "max_tokens": 10, "aggregation": aggregation}
    whole = reduce(LOSSES, SAMPLED, lengths=LENGTHS, **totals)
    shares = [
        reduce(LOSSES[:1, :3], SAMPLED[:1, :3], lengths=LENGTHS[:1, :3], **totals),
        reduce(LOSSES[:1, 3:], SAMPLED[:1, 3:], lengths=LENGTHS[:1, 3:], **totals),
        reduce(LOSSES[1:], SAMPLED[1:], lengths=LENGTHS[1:], **totals),
    ]
    assert sum(s.item() for s in shares) == pytest.approx(whole.item())


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_the_gradient_is_zero_outside_and_finite_inside(aggregation) -> None:  # type: ignore[no-untyped-def]
    losses = LOSSES.clone().requires_grad_()
    reduce(losses, SAMPLED, lengths=LENGTHS, totals=TOTALS, max_tokens=10, aggregation=aggregation).backward()
    assert losses.grad is not None
    assert losses.grad[~SAMPLED].tolist() == [0.0] * 4
    assert losses.grad[SAMPLED].sum().item() == pytest.approx(
        {"token": 1.0, "sequence": 1.0, "constant": 0.2}[aggregation]
    )


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_a_micro_batch_without_sampled_tokens_is_zero_and_has_a_backward(aggregation) -> None:  # type: ignore[no-untyped-def]
    losses = torch.full((1, 4), NAN, requires_grad=True)
    nothing = torch.zeros(1, 4, dtype=torch.bool)
    lengths = torch.zeros(1, 4, dtype=torch.long)
    loss = reduce(losses, nothing, lengths=lengths, totals=TOTALS, max_tokens=10, aggregation=aggregation)
    loss.backward()
    assert loss.item() == 0.0
    assert losses.grad is not None
    assert losses.grad.tolist() == [[0.0] * 4]


@pytest.mark.parametrize(("aggregation", "expected"), [("token", 24 / 6), ("sequence", 14 / 4), ("constant", 24 / 40)])
def test_a_response_without_tokens_counts_as_a_response(aggregation, expected) -> None:  # type: ignore[no-untyped-def]
    totals = Totals(num_tokens=6, num_responses=4)
    result = reduce(LOSSES, SAMPLED, lengths=LENGTHS, totals=totals, max_tokens=10, aggregation=aggregation)
    assert result.item() == pytest.approx(expected)


def test_the_mean_of_a_response_is_at_its_sampled_tokens_only() -> None:
    sampled = torch.tensor([[F, T, T, F, T], [T, F, F, T, F]])
    # Response 7 has a gap; response 3 is alone in its row; owner numbers need not be dense.
    owner = torch.tensor([[7, 7, 7, 7, 7], [0, 0, 0, 3, 3]])
    values = torch.tensor([[9.0, 1.0, 2.0, float("nan"), 6.0], [5.0, float("inf"), 9.0, 4.0, 9.0]])
    assert response_mean(values, sampled, owner).tolist() == [[0, 3.0, 3.0, 0, 3.0], [5.0, 0, 0, 4.0, 0]]


def test_the_mean_where_nothing_is_sampled_is_zero() -> None:
    nothing = torch.zeros(1, 2, dtype=torch.bool)
    result = response_mean(torch.full((1, 2), float("nan")), nothing, torch.zeros(1, 2, dtype=torch.long))
    assert result.tolist() == [[0.0, 0.0]]
