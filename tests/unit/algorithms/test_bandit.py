"""Every estimator with every loss on a bandit: a policy of a few logits must find the one rewarded token per place.

Answers have up to three tokens and one prompt token in front; two optimizer steps are made per experience, so that the
ratios leave 1 and the clips act. All that is learnt goes through the same functions as in a run.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vlmrl.algorithms.advantages import advantages
from vlmrl.algorithms.aggregation import Aggregation, reduce, token_mean
from vlmrl.algorithms.corrections import Correction
from vlmrl.algorithms.kl import kl_to_reference
from vlmrl.algorithms.losses import PolicyLoss, policy_loss, value_loss
from vlmrl.config.built_in import ESTIMATORS, POLICY_LOSSES
from vlmrl.types import Totals

PROMPTS, GROUP, PLACES, VOCABULARY = 4, 6, 3, 5
REWARDED = torch.tensor([2, 0, 4])
CLIPS = {"ppo": (0.2, 0.2), "gspo": (0.1, 0.1), "cispo": (0.2, 0.2)}
DEFAULT_AGGREGATION: dict[str, Aggregation] = {"gspo": "sequence", "dr_grpo": "constant"}


def learnt(
    estimator: str | Callable[..., Tensor],
    kind: str | Callable[..., Tensor],
    *,
    steps: int = 40,
    sign: float = 1.0,
    kl_in_reward: float = 0.0,
    kl_in_loss: float = 0.0,
    **knobs: Any,
) -> float:
    """Mean final probability of the rewarded token over the places; initially 0.2."""
    torch.manual_seed(0)
    logits = torch.zeros(PLACES, VOCABULARY, requires_grad=True)
    expected = torch.zeros(PLACES, requires_grad=True)
    optimizer = torch.optim.Adam([logits, expected], lr=0.15)
    low, high = CLIPS.get(str(kind), (0.2, 0.2))
    aggregation = DEFAULT_AGGREGATION.get(str(kind)) or DEFAULT_AGGREGATION.get(str(estimator), "token")
    settings = {"aggregation": aggregation, "max_tokens": PLACES, "clip_low": low, "clip_high": high}
    loss = PolicyLoss(kind=kind, **(settings | knobs))
    responses = PROMPTS * GROUP
    owner = torch.arange(responses)[:, None].expand(-1, PLACES + 1)
    for _ in range(steps):
        lengths = torch.randint(1, PLACES + 1, (responses, 1))
        sampled = (torch.arange(PLACES + 1) > 0) & (torch.arange(PLACES + 1) <= lengths)
        totals = Totals(num_tokens=int(sampled.sum()), num_responses=responses)
        with torch.no_grad():
            tokens = torch.multinomial(logits.softmax(1).repeat(responses, 1), 1).reshape(responses, PLACES)
            old, _ = scored(logits, tokens)
        rewards = ((tokens == REWARDED) & sampled[:, 1:]).sum(1) / lengths[:, 0]
        values = shifted(expected.detach().expand(responses, -1))
        uniform = torch.full_like(old, 1 / VOCABULARY).log()
        result = advantages(
            rewards.reshape(PROMPTS, GROUP),
            sampled,
            estimator=estimator,
            lambd=0.95,
            values=values if estimator == "gae" else None,
            kl_penalty=kl_in_reward * kl_to_reference(old, uniform, estimator="k1") if kl_in_reward else None,
        )
        for _ in range(2):
            logprobs, entropy = scored(logits, tokens)
            terms = policy_loss(
                loss,
                logprobs=logprobs,
                old=old,
                rollout=old + 0.02 * torch.randn_like(old),
                advantages=sign * result.advantages,
                sampled=sampled,
                owner=owner,
                entropy=entropy,
                reference=uniform,
                kl_coef=kl_in_loss,
            )
            share = reduce(
                terms.losses,
                sampled,
                aggregation=loss.aggregation,
                lengths=sampled.sum(dim=1, keepdim=True).expand_as(sampled),
                totals=totals,
                max_tokens=PLACES,
            )
            if result.returns is not None:
                now = shifted(expected.expand(responses, -1))
                share = share + token_mean(
                    value_loss(now, values, result.returns, clip=0.5).losses, sampled, num_tokens=totals.num_tokens
                )
            optimizer.zero_grad()
            share.backward()
            optimizer.step()
    return float(logits.detach().softmax(1)[torch.arange(PLACES), REWARDED].mean())


def scored(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of each token, [B, T], behind the prompt's token."""
    table = logits.log_softmax(1)
    chosen = table.expand(len(tokens), -1, -1).gather(2, tokens[:, :, None])[:, :, 0]
    entropy = -(table.exp() * table).sum(1).expand(len(tokens), -1)
    return shifted(chosen), shifted(entropy)


def shifted(responses: Tensor) -> Tensor:
    return torch.nn.functional.pad(responses, (1, 0))


@pytest.mark.parametrize("kind", POLICY_LOSSES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_policy_finds_the_rewarded_tokens(estimator: str, kind: str) -> None:
    assert learnt(estimator, kind) > 0.9


@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_a_policy_with_reversed_rewards_avoids_the_rewarded_tokens(kind: str) -> None:
    assert learnt("group_norm", kind, sign=-1.0) < 0.1


@pytest.mark.parametrize(
    "knobs",
    [
        {"correction": Correction("tis", 0.5, 5.0)},
        {"correction": Correction("icepop", 0.5, 5.0)},
        {"correction": Correction("seq-mask-tis", 0.5, 5.0)},
        {"dual_clip": 3.0},
        {"entropy_coef": 0.01},
        {"kl_in_reward": 0.01},
        {"kl_in_loss": 0.01},
        {"aggregation": "sequence"},
        {"aggregation": "constant"},
    ],
    ids=str,
)
def test_options_of_ppo_keep_it_learning(knobs: dict[str, Any]) -> None:
    assert learnt("group_norm", "ppo", **knobs) > 0.9


@pytest.mark.parametrize("knobs", [{"entropy_coef": 1.0}, {"kl_in_reward": 2.0}, {"kl_in_loss": 2.0}], ids=str)
def test_large_entropy_and_kl_terms_hold_the_policy_back(knobs: dict[str, Any]) -> None:
    assert learnt("dr_grpo", "ppo", **knobs) < 0.6


def test_a_users_estimator_and_loss_learn() -> None:
    def above_average(rewards: Tensor) -> Tensor:
        return rewards - rewards.mean()

    def likelihood(logprobs: Tensor, advantages: Tensor) -> Tensor:
        return -advantages * logprobs

    assert learnt(above_average, likelihood) > 0.9


def test_the_corrected_gradient_of_a_bandit_sampled_by_two_older_policies_is_exact() -> None:
    """Every action of a one-token bandit, with the probability that each of two behaviour policies chooses it."""
    logits = torch.tensor([0.3, -0.5, 1.1], dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    behaviours = torch.log_softmax(torch.tensor([[0.0, 1.0, -1.0], [2.0, 0.0, 0.5]], dtype=torch.float64), dim=-1)
    logprobs = torch.log_softmax(logits, dim=-1).expand(2, 3)
    sampled = torch.ones(2, 3, dtype=torch.bool)

    def gradient(correction: Correction | None) -> torch.Tensor:
        terms = policy_loss(
            PolicyLoss(aggregation="token", max_tokens=1, clip_low=1.0, clip_high=1e6, correction=correction),
            logprobs=logprobs,
            old=logprobs.detach(),
            rollout=behaviours,
            advantages=rewards.expand(2, 3),
            sampled=sampled,
            owner=torch.arange(6).reshape(2, 3),
        )
        expected = (behaviours.exp() * terms.losses).sum() / 2
        (result,) = torch.autograd.grad(expected, logits, retain_graph=True)
        return result

    (exact,) = torch.autograd.grad(-(logits.softmax(dim=-1) * rewards).sum(), logits, retain_graph=True)
    torch.testing.assert_close(gradient(Correction("tis", 0.0, 1e9)), exact, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(gradient(None), exact, atol=1e-2), "without the correction it is another"
    # The ratios of the third action are 0.61 / 0.09 and 0.61 / 0.16: clipped at 1 the gradient is another.
    assert not torch.allclose(gradient(Correction("tis", 0.0, 1.0)), exact, atol=1e-2)
