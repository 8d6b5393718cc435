from typing import Any

import pytest
import torch
from torch import Tensor

from vlmrl.algorithms.aggregation import reduce
from vlmrl.algorithms.corrections import Correction
from vlmrl.algorithms.losses import PolicyLoss, PolicyTerms, policy_loss, value_loss
from vlmrl.errors import ConfigError
from vlmrl.types import Totals

F, T = False, True
NAN, INF = float("nan"), float("inf")
TOTALS = Totals(num_tokens=6, num_responses=3)


# Two packs' worth: responses 0 and 1 in the first row with a gap inside 0, response 2 behind its prompt in the second.
SAMPLED = torch.tensor([[T, F, T, T, T], [F, T, T, F, F]])
OWNER = torch.tensor([[0, 0, 0, 1, 1], [2, 2, 2, 0, 0]])
LENGTHS = torch.tensor([[2, 2, 2, 2, 2], [2, 2, 2, 2, 2]])
OLD = torch.tensor([[-1.0, NAN, -2.0, -0.5, -3.0], [NAN, -1.5, -2.5, INF, -INF]])
# Log-ratios: log 2 and log 8 (mean log 4), 0 and -log 4 (mean -log 2), log 3 and -log 3 (mean 0).
LOG_RATIOS = torch.tensor([[2.0, 1, 8.0, 1.0, 0.25], [1, 3.0, 1 / 3, 1, 1]]).log()
SIGNS = torch.tensor([[1.0, NAN, 1.0, -2.0, -2.0], [NAN, 0.5, 0.5, INF, NAN]])
KNOBS = {"aggregation": "token", "max_tokens": 8, "clip_low": 0.2, "clip_high": 0.3}


def terms(knobs: dict[str, Any], *, logprobs: Tensor | None = None, **given: Any) -> PolicyTerms:
    arguments: dict[str, Any] = {"old": OLD, "rollout": None, "advantages": SIGNS, "sampled": SAMPLED, "owner": OWNER}
    logprobs = OLD + LOG_RATIOS if logprobs is None else logprobs
    return policy_loss(PolicyLoss(**(KNOBS | knobs)), logprobs=logprobs, **(arguments | given))


def kept(values: Tensor) -> list[float]:
    """The values at sampled tokens, row by row."""
    return values[SAMPLED].tolist()


def test_ppo_clips_each_token() -> None:
    result = terms({})
    # -min(2, 1.3), -min(8, 1.3); 2 max(1, 1), 2 max(1/4, 0.8); -0.5 min(3, 1.3), -0.5 min(1/3, 0.8)
    assert kept(result.losses) == pytest.approx([-1.3, -1.3, 2.0, 1.6, -0.65, -1 / 6])
    assert kept(result.clipped) == [T, T, F, T, T, F]
    assert kept(result.ratio) == pytest.approx([2.0, 8.0, 1.0, 0.25, 3.0, 1 / 3])
    assert result.weights.tolist() == SAMPLED.float().tolist()
    assert result.kl.tolist() == [[0.0] * 5] * 2
    assert not result.clipped[~SAMPLED].any()
    assert result.losses[~SAMPLED].abs().sum() == 0


def test_gspo_has_one_ratio_per_response() -> None:
    result = terms({"kind": "gspo"})
    # -min(4, 1.3) twice; 2 max(1/2, 0.8) twice; -0.5 twice.
    assert kept(result.losses) == pytest.approx([-1.3, -1.3, 1.6, 1.6, -0.5, -0.5])
    assert kept(result.clipped) == [T, T, T, T, F, F]
    assert kept(result.ratio) == pytest.approx([4.0, 4.0, 0.5, 0.5, 1.0, 1.0])


def test_gspo_has_the_gradient_of_the_response_ratio() -> None:
    shift = torch.zeros(2, 5, requires_grad=True)
    logprobs = torch.where(SAMPLED, OLD + LOG_RATIOS, 0.0) + shift
    result = terms({"kind": "gspo", "clip_low": 0.9, "clip_high": 9.0}, logprobs=logprobs)
    reduce(result.losses, SAMPLED, aggregation="sequence", lengths=LENGTHS, totals=TOTALS, max_tokens=8).backward()
    assert shift.grad is not None
    # d/dx of -s A with s = exp(mean): -s A / 2 for each of a response's two tokens, a third of it in the mean of three.
    expected = [-4 / 6, -4 / 6, 2 * 0.5 / 6, 2 * 0.5 / 6, -0.5 / 6, -0.5 / 6]
    assert kept(shift.grad) == pytest.approx(expected)
    assert shift.grad[~SAMPLED].tolist() == [0.0] * 4


def test_gspo_lets_each_token_learn_from_its_own_advantage() -> None:
    shift = torch.zeros(1, 2, requires_grad=True)
    result = policy_loss(
        PolicyLoss(aggregation="sequence", max_tokens=8, kind="gspo"),
        logprobs=torch.tensor([[-1.0, -2.0]]) + shift,
        old=torch.tensor([[-1.0, -2.0]]),
        rollout=None,
        advantages=torch.tensor([[3.0, -1.0]]),
        sampled=torch.tensor([[T, T]]),
        owner=torch.zeros(1, 2, dtype=torch.long),
    )
    result.losses.sum().backward()
    assert shift.grad is not None
    assert shift.grad.tolist() == [[-3.0, 1.0]]


def test_cispo_weights_log_probs_and_keeps_every_gradient() -> None:
    logprobs = (OLD + LOG_RATIOS).requires_grad_()
    result = terms({"kind": "cispo"}, logprobs=logprobs)
    weights = torch.tensor([1.3, 1.3, 1.0, 0.25, 1.3, 1 / 3])
    expected = -weights * SIGNS[SAMPLED] * (OLD + LOG_RATIOS)[SAMPLED]
    torch.testing.assert_close(result.losses[SAMPLED], expected)
    assert kept(result.clipped) == [T, T, F, F, T, F]
    reduce(result.losses, SAMPLED, aggregation="token", lengths=LENGTHS, totals=TOTALS, max_tokens=8).backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad[SAMPLED], -weights * SIGNS[SAMPLED] / 6)
    assert logprobs.grad[~SAMPLED].tolist() == [0.0] * 4


def test_the_kl_is_added_with_its_weight_and_its_gradient() -> None:
    logprobs = (OLD + LOG_RATIOS).requires_grad_()
    reference = (OLD + LOG_RATIOS).detach() - torch.tensor([[0.5, 1, -1.0, 0.0, 2.0], [1, 0.25, 0.0, 1, 1]])
    plain = terms({})
    result = terms({"kl_estimator": "k2"}, logprobs=logprobs, reference=reference, kl_coef=0.1)
    gap = [0.125, 0.5, 0.0, 2.0, 0.03125, 0.0]
    assert kept(result.kl) == pytest.approx(gap)
    assert kept(result.losses.detach()) == pytest.approx(
        [p + 0.1 * k for p, k in zip(kept(plain.losses), gap, strict=True)]
    )
    assert result.kl[~SAMPLED].tolist() == [0.0] * 4
    result.losses[SAMPLED].sum().backward()
    assert logprobs.grad is not None
    # k2's gradient is the log-ratio to the reference, the only gradient of clipped tokens.
    assert kept(logprobs.grad)[:2] == pytest.approx([0.05, -0.1])


def test_the_entropy_is_subtracted_with_its_gradient() -> None:
    entropy = torch.tensor([[1.0, NAN, 2.0, 3.0, 4.0], [INF, 5.0, 6.0, NAN, NAN]], requires_grad=True)
    result = terms({"entropy_coef": 0.5}, logprobs=(OLD + LOG_RATIOS).requires_grad_(), entropy=entropy)
    expected = [p - 0.5 * h for p, h in zip(kept(terms({}).losses), [1, 2, 3, 4, 5, 6], strict=True)]
    assert kept(result.losses.detach()) == pytest.approx(expected)
    assert result.losses[~SAMPLED].tolist() == [0.0] * 4
    reduce(result.losses, SAMPLED, aggregation="token", lengths=LENGTHS, totals=TOTALS, max_tokens=8).backward()
    assert entropy.grad is not None
    torch.testing.assert_close(entropy.grad, -0.5 / 6 * SAMPLED)


def test_a_correction_weights_the_surrogate_but_not_kl_or_entropy() -> None:
    # Probabilities in the trainer are 2 times the engine's at the first token, 8 times at the last; else equal.
    rollout = OLD - torch.tensor([[2.0, 1, 1, 1, 1], [1, 1, 8.0, 1, 1]]).log()
    knobs = {"correction": Correction("tis", 0.5, 5.0), "entropy_coef": 0.5, "kl_estimator": "k2"}
    given = {"reference": OLD + LOG_RATIOS - 1.0, "entropy": torch.ones(2, 5), "kl_coef": 0.1}
    result = terms(knobs, rollout=rollout, **given)
    weights = [2.0, 1, 1, 1, 1, 5.0]
    assert kept(result.weights) == pytest.approx(weights)
    expected = [w * p + 0.1 * 0.5 - 0.5 for w, p in zip(weights, kept(terms({}).losses), strict=True)]
    assert kept(result.losses) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo"])
@pytest.mark.parametrize("gap", [400.0, -400.0])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_an_extreme_ratio_neither_overflows_nor_gives_nan_gradients(kind, gap, sign) -> None:  # type: ignore[no-untyped-def]
    logprobs = (torch.where(SAMPLED, OLD, 0.0) + gap).requires_grad_()
    result = terms({"kind": kind}, logprobs=logprobs, advantages=torch.full((2, 5), sign))
    assert bool(result.losses.isfinite().all())
    assert bool(result.ratio.isfinite().all())
    result.losses.sum().backward()
    assert logprobs.grad is not None
    assert bool(logprobs.grad.isfinite().all())


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo"])
def test_a_pack_without_sampled_tokens_has_zero_loss_and_a_backward(kind: str) -> None:
    logprobs = torch.full((2, 5), NAN, requires_grad=True)
    nothing = torch.zeros(2, 5, dtype=torch.bool)
    correction = Correction("seq-mask-tis", 0.5, 5.0)
    result = terms({"kind": kind, "correction": correction}, logprobs=logprobs, sampled=nothing, rollout=OLD)
    reduce(result.losses, nothing, aggregation="token", lengths=LENGTHS, totals=TOTALS, max_tokens=8).backward()
    assert result.losses.tolist() == [[0.0] * 5] * 2
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0.0] * 5] * 2


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo"])
def test_the_loss_of_a_response_does_not_depend_on_its_pack(kind: str) -> None:
    whole = terms({"kind": kind})
    first = terms(
        {"kind": kind},
        logprobs=(OLD + LOG_RATIOS)[:1, 3:],
        old=OLD[:1, 3:],
        advantages=SIGNS[:1, 3:],
        sampled=SAMPLED[:1, 3:],
        owner=torch.zeros(1, 2, dtype=torch.long),
    )
    torch.testing.assert_close(first.losses, whole.losses[:1, 3:])


def test_an_input_that_a_knob_needs_is_required() -> None:
    with pytest.raises(ValueError, match="engine's log-probs"):
        terms({"correction": Correction("tis", 0.5, 5.0)})
    with pytest.raises(ValueError, match="reference's log-probs"):
        terms({}, kl_coef=0.1)
    with pytest.raises(ValueError, match="entropy, with its gradient"):
        terms({"entropy_coef": 0.1})
    with pytest.raises(ValueError, match="entropy, with its gradient"):
        terms({"entropy_coef": 0.1}, logprobs=torch.zeros(2, 5, requires_grad=True), entropy=torch.ones(2, 5))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"dual_clip": 1.0}, "must be above 1"),
        ({"clip_low": -0.1}, "must not be negative"),
    ],
)
def test_invalid_knobs_are_refused(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyLoss(**(KNOBS | knobs))


def test_a_users_loss_receives_declared_arguments_without_padding() -> None:
    def likelihood(logprobs: Tensor, advantages: Tensor, clip_high: float) -> Tensor:
        assert clip_high == 0.3
        assert bool(logprobs.isfinite().all())
        return -advantages * logprobs + torch.where(SAMPLED, 0.0, INF)

    logprobs = (OLD + LOG_RATIOS).requires_grad_()
    result = terms({"kind": likelihood}, logprobs=logprobs)
    torch.testing.assert_close(result.losses[SAMPLED], (-SIGNS * (OLD + LOG_RATIOS))[SAMPLED])
    assert not result.clipped.any()
    assert kept(result.ratio) == pytest.approx([2.0, 8.0, 1.0, 0.25, 3.0, 1 / 3])
    result.losses.sum().backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.where(SAMPLED, -SIGNS, 0.0))


def test_a_users_loss_is_corrected_like_any_other() -> None:
    rollout = OLD - torch.tensor([[2.0, 1, 1, 1, 1], [1, 1, 8.0, 1, 1]]).log()
    result = terms(
        {"kind": lambda logprobs: logprobs + 1.0, "correction": Correction("icepop", 0.5, 5.0)}, rollout=rollout
    )
    expected = (OLD + LOG_RATIOS + 1.0)[SAMPLED] * torch.tensor([2.0, 1, 1, 1, 1, 0])
    torch.testing.assert_close(result.losses[SAMPLED], expected)


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        (lambda logprobs: logprobs.sum(), r"returned float32 \[\], not numbers \[2, 5\]"),
        (lambda logprobs: logprobs.detach(), "have no gradient: do not detach logprobs"),
        (lambda logprobs: None, "returned a NoneType"),
        (lambda logprobs, rewards: logprobs, "requires rewards"),
        (lambda logprobs: 1 / 0, "failed: ZeroDivisionError: division by zero"),
    ],
)
def test_a_users_loss_that_is_wrong_is_one_line(mine, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=f"^actor.policy_loss_type: .*{message}") as caught:
        terms({"kind": mine}, logprobs=torch.zeros(2, 5, requires_grad=True))
    assert "\n" not in str(caught.value)


def test_the_critics_loss_is_the_larger_of_unclipped_and_clipped() -> None:
    values = torch.tensor([[1.0, 3.0], [0.0, 2.0]], requires_grad=True)
    old = torch.tensor([[1.0, 1.0], [1.0, 1.0]])
    targets = torch.tensor([[2.0, 4.0], [4.0, 1.0]])
    result = value_loss(values, old, targets, clip=0.5)
    # Clipped values 1, 1.5, 0.5, 1.5. Unclipped: 1, 1, 16, 1. Clipped: 1, 6.25, 12.25, 0.25.
    assert result.losses.tolist() == [[0.5, 3.125], [8.0, 0.5]]
    assert result.clipped.tolist() == [[F, T], [F, F]]
    result.losses.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[-1.0, 0.0], [-4.0, 1.0]]


def test_without_a_clip_the_critics_loss_is_half_the_squared_error() -> None:
    result = value_loss(torch.tensor([[1.0, 9.0]]), torch.zeros(1, 2), torch.tensor([[3.0, 9.0]]), clip=None)
    assert result.losses.tolist() == [[2.0, 0.0]]
    assert result.clipped.tolist() == [[F, F]]
