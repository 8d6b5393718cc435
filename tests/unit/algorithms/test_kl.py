import math

import pytest
import torch

from vlmrl.algorithms.kl import KlController, kl_from_old, kl_to_reference

LOGPROBS = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]])
REFERENCE = torch.tensor([[-1.5, -2.0], [-1.5, -1.0]])


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [[0.5, 0.0], [1.0, -2.0]]),
        ("k2", [[0.125, 0.0], [0.5, 2.0]]),
        # exp(-0.5) - 1 + 0.5, 0, exp(-1) - 1 + 1, exp(2) - 1 - 2
        ("k3", [[0.1065307, 0.0], [0.3678794, 4.3890561]]),
    ],
)
def test_each_estimator_gives_its_formula(estimator, expected) -> None:  # type: ignore[no-untyped-def]
    torch.testing.assert_close(kl_to_reference(LOGPROBS, REFERENCE, estimator=estimator), torch.tensor(expected))


def test_k3_keeps_its_digits_where_the_models_are_close() -> None:
    near = torch.tensor([[1e-3]])
    result = kl_to_reference(torch.zeros(1, 1), near, estimator="k3").item()
    assert result == pytest.approx(1e-6 / 2 + 1e-9 / 6, rel=1e-3)


def test_all_three_estimate_the_same_divergence() -> None:
    torch.manual_seed(0)
    policy = torch.randn(6).log_softmax(0)
    reference = (policy + 0.05 * torch.randn(6)).log_softmax(0)
    exact = (policy.exp() * (policy - reference)).sum()
    for estimator, tolerance in (("k1", 1e-6), ("k2", 0.05), ("k3", 1e-5)):
        expected = (policy.exp() * kl_to_reference(policy, reference, estimator=estimator)).sum()  # type: ignore[arg-type]
        assert expected.item() == pytest.approx(exact.item(), rel=tolerance, abs=1e-6)


def test_k3_of_distant_models_is_clamped_with_zero_gradient() -> None:
    logprobs = torch.tensor([[-500.0, 0.0]], requires_grad=True)
    result = kl_to_reference(logprobs, torch.tensor([[0.0, -500.0]]), estimator="k3")
    torch.testing.assert_close(result, torch.tensor([[math.exp(20) - 21, math.exp(-20) + 19]]))
    result.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0.0, 0.0]]


def test_the_coefficient_adapts_to_the_target() -> None:
    controller = KlController(coef=0.1, target=0.5, horizon=100)
    # 0.55 / 0.5 - 1 = 0.1 over 20 of 100 responses; twice the target counts as 20 % above, 0 as 20 % below.
    assert controller.updated(0.55, num_samples=20).coef == pytest.approx(0.1 * (1 + 0.1 * 0.2))
    assert controller.updated(1.0, num_samples=50).coef == pytest.approx(0.1 * 1.1)
    assert controller.updated(-3.0, num_samples=50).coef == pytest.approx(0.1 * 0.9)
    assert controller.updated(0.5, num_samples=50) == controller
    assert controller.updated(1.0, 50).updated(1.0, 50).coef == pytest.approx(0.1 * 1.1**2)


def test_without_a_target_the_coefficient_is_constant() -> None:
    controller = KlController(coef=0.1)
    assert controller.updated(99.0, num_samples=10**6) is controller


@pytest.mark.parametrize(("kl", "num_samples"), [(float("nan"), 1), (0.1, 50)])
def test_a_step_too_large_for_the_controller_is_refused(kl: float, num_samples: int) -> None:
    with pytest.raises(ValueError, match="cannot steer a horizon of 10"):
        KlController(coef=0.1, target=0.5, horizon=10).updated(kl, num_samples)


def test_kl_from_the_old_policy_is_an_expectation_under_it() -> None:
    old, new = torch.tensor([[0.5, 0.49, 0.01]]), torch.tensor([[0.9, 0.08, 0.02]])
    expected = 0.5 * math.log(0.5 / 0.9) + 0.49 * math.log(0.49 / 0.08) + 0.01 * math.log(0.01 / 0.02)
    assert (old * kl_from_old(new.log(), old.log())).sum().item() == pytest.approx(expected, rel=1e-5)
    # The reverse KL would be very different.
    assert (old * kl_from_old(old.log(), new.log())).sum().item() > 2 * expected
