"""The teacher's term of the advantages."""

import torch

from vlmrl.algorithms.distillation import teacher_gap

NAN = float("nan")


def test_the_gap_is_that_of_each_sampled_token_alone() -> None:
    old = torch.tensor([[0.0, -1.0, -2.0], [0.0, -0.5, 9.0]])
    teacher = torch.tensor([[7.0, -0.25, -3.0], [NAN, NAN, 8.0]])
    sampled = torch.tensor([[False, True, True], [False, True, False]])
    # The second response's only token is one that the teacher does not have.
    assert teacher_gap(old, teacher, sampled).tolist() == [[0.0, 0.75, -1.0], [0.0, 0.0, 0.0]]


def test_its_policy_gradient_is_the_negative_gradient_of_the_reverse_kl() -> None:
    torch.manual_seed(0)
    logits, other = torch.randn(5, dtype=torch.float64, requires_grad=True), torch.randn(5, dtype=torch.float64)
    log_p, log_q = logits.log_softmax(-1), other.log_softmax(-1)
    (of_kl,) = torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), logits, retain_graph=True)
    advantages = teacher_gap(log_p.detach()[None], log_q[None], torch.ones(1, 5, dtype=torch.bool))[0]
    # The expectation over samples: each token with its probability.
    (of_policy,) = torch.autograd.grad((log_p.detach().exp() * advantages * log_p).sum(), logits)
    torch.testing.assert_close(of_policy, -of_kl)
