import pytest
import torch

from vlmrl.algorithms.kl import kl_to_reference

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
    found = kl_to_reference(torch.zeros(1, 1), near, estimator="k3").item()
    assert found == pytest.approx(1e-6 / 2 + 1e-9 / 6, rel=1e-3)


def test_all_three_estimate_the_same_divergence() -> None:
    torch.manual_seed(0)
    policy = torch.randn(6).log_softmax(0)
    reference = (policy + 0.05 * torch.randn(6)).log_softmax(0)
    exact = (policy.exp() * (policy - reference)).sum()
    for estimator, tolerance in (("k1", 1e-6), ("k2", 0.05), ("k3", 1e-5)):
        expected = (policy.exp() * kl_to_reference(policy, reference, estimator=estimator)).sum()  # type: ignore[arg-type]
        assert expected.item() == pytest.approx(exact.item(), rel=tolerance, abs=1e-6)
