"""The teacher's term of the advantages."""

import pytest
import torch

from vlmrl.algorithms.distillation import teacher_gap
from vlmrl.algorithms.losses import PolicyLoss, policy_loss
from vlmrl.config.built_in import POLICY_LOSSES

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


@pytest.mark.parametrize("kind", sorted(POLICY_LOSSES))
def test_a_policy_of_a_few_logits_becomes_its_teacher(kind: str) -> None:
    torch.manual_seed(0)
    places, vocabulary, responses = 3, 5, 64
    teacher = (2 * torch.randn(places, vocabulary)).log_softmax(-1)
    logits = torch.zeros(places, vocabulary, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.1)
    loss = PolicyLoss(aggregation="token", max_tokens=places, kind=kind)
    sampled = torch.ones(responses, places, dtype=torch.bool)
    owner = torch.arange(responses)[:, None].expand(-1, places)
    for _ in range(150):
        log_p = logits.log_softmax(-1)
        tokens = torch.multinomial(log_p.detach().exp(), responses, replacement=True).T[..., None]
        scores, grades = (table.expand(responses, -1, -1).gather(2, tokens)[..., 0] for table in (log_p, teacher))
        old = scores.detach()
        terms = policy_loss(
            loss,
            logprobs=scores,
            old=old,
            rollout=None,
            advantages=teacher_gap(old, grades, sampled),
            sampled=sampled,
            owner=owner,
        )
        optimizer.zero_grad()
        terms.losses.mean().backward()
        optimizer.step()
    log_p = logits.detach().log_softmax(-1)
    before = (torch.full_like(teacher, 1 / vocabulary) * (-torch.log(torch.tensor(vocabulary)) - teacher)).sum(-1)
    after = (log_p.exp() * (log_p - teacher)).sum(-1)
    assert before.min() > 0.2
    assert after.max() < 0.02
