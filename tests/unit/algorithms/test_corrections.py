import math

import pytest
import torch

from vlmrl.algorithms.corrections import Correction, correct

F, T = False, True
NAN, INF = float("nan"), float("inf")
# Two rows: responses 0 and 1 in the first with a gap inside 0, response 2 and padding in the second.
SAMPLED = torch.tensor([[T, F, T, T, T], [F, T, T, F, F]])
OWNER = torch.tensor([[0, 0, 0, 1, 1], [2, 2, 2, 0, 0]])
# Weights: response 0: 2 and 8, of mean 4; response 1: 1 and 1/4, of mean 1/2; response 2: 1/8 and 8, of mean 1.
WEIGHTS = torch.tensor([[2.0, NAN, 8.0, 1.0, 0.25], [INF, 0.125, 8.0, NAN, 0.0]])
ROLLOUT = torch.tensor([[-1.0, -2.0, -3.0, -0.5, -1.5], [0.0, -0.1, -2.0, NAN, INF]])
OLD = ROLLOUT + WEIGHTS.log()


@pytest.mark.parametrize(
    ("kind", "low", "high", "expected"),
    [
        ("tis", 0.0, 2.0, [[2.0, 0, 2.0, 1.0, 0.25], [0, 0.125, 2.0, 0, 0]]),
        ("tis", 0.5, 5.0, [[2.0, 0, 5.0, 1.0, 0.5], [0, 0.5, 5.0, 0, 0]]),
        ("icepop", 0.5, 5.0, [[2.0, 0, 0, 1.0, 0], [0, 0, 0, 0, 0]]),
        ("seq-mask-tis", 0.6, 5.0, [[2.0, 0, 5.0, 0, 0], [0, 0.6, 5.0, 0, 0]]),
        ("seq-mask-tis", 0.4, 3.0, [[0, 0, 0, 1.0, 0.4], [0, 0.4, 3.0, 0, 0]]),
    ],
)
def test_each_correction_gives_its_formula(kind, low, high, expected) -> None:  # type: ignore[no-untyped-def]
    result = correct(Correction(kind, low, high), old=OLD, rollout=ROLLOUT, sampled=SAMPLED, owner=OWNER)
    torch.testing.assert_close(result, torch.tensor(expected))


@pytest.mark.parametrize("kind", ["tis", "icepop", "seq-mask-tis"])
def test_equal_engine_and_trainer_give_weights_of_1(kind) -> None:  # type: ignore[no-untyped-def]
    result = correct(Correction(kind, 0.5, 5.0), old=ROLLOUT, rollout=ROLLOUT, sampled=SAMPLED, owner=OWNER)
    assert result.tolist() == SAMPLED.float().tolist()


def test_the_bounds_of_a_correction_are_inclusive() -> None:
    old, rollout = torch.tensor([[math.log(4.0), math.log(0.25)]]), torch.zeros(1, 2)
    given = {"old": old, "rollout": rollout, "sampled": torch.tensor([[T, T]]), "owner": torch.tensor([[0, 1]])}
    expected = old.exp()
    low, high = float(expected[0, 1]), float(expected[0, 0])
    for kind in ("tis", "icepop", "seq-mask-tis"):
        torch.testing.assert_close(correct(Correction(kind, low, high), **given), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["tis", "icepop", "seq-mask-tis"])
@pytest.mark.parametrize("gap", [300.0, -300.0])
def test_an_extreme_weight_stays_finite_and_carries_no_gradient(kind, gap: float) -> None:  # type: ignore[no-untyped-def]
    old = torch.full((1, 2), gap, requires_grad=True)
    sampled, owner = torch.tensor([[T, T]]), torch.tensor([[0, 0]])
    result = correct(Correction(kind, 0.5, 5.0), old=old, rollout=torch.zeros(1, 2), sampled=sampled, owner=owner)
    outside = {"tis": 5.0 if gap > 0 else 0.5, "icepop": 0.0, "seq-mask-tis": 0.0}
    assert result.tolist() == [[outside[kind]] * 2]
    assert not result.requires_grad


def test_a_pack_without_a_sampled_token_has_no_weights() -> None:
    nothing = torch.zeros(1, 3, dtype=torch.bool)
    owner = torch.zeros(1, 3, dtype=torch.long)
    result = correct(
        Correction("seq-mask-tis", 0.5, 5.0),
        old=torch.ones(1, 3),
        rollout=torch.ones(1, 3),
        sampled=nothing,
        owner=owner,
    )
    assert result.tolist() == [[0.0] * 3]


@pytest.mark.parametrize(("low", "high"), [(5.0, 0.5), (1.0, 1.0), (-1.0, 2.0), (NAN, 1.0)])
def test_an_empty_range_of_weights_is_refused(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="cannot lie between"):
        Correction("tis", low, high)


def test_an_unknown_correction_is_refused() -> None:
    with pytest.raises(ValueError, match="no correction is called 'mis'"):
        Correction("mis", 0.5, 5.0)  # type: ignore[arg-type]
