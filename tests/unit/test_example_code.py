"""The Python files in examples/ do what they say, through the loaders that a run uses."""

from pathlib import Path

import pytest
import torch

from vlmrl.algorithms.advantages import FLAG, advantages
from vlmrl.algorithms.losses import PolicyLoss, policy_loss
from vlmrl.plugins import user_function

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_estimator_counts_answers_above_the_mean_of_their_group() -> None:
    own = user_function(f"{EXAMPLES}/own_algorithm.py:best_of_group", FLAG)
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5]])
    sampled = torch.tensor([[False, True, True]] * 8)
    found = advantages(rewards, sampled, estimator=own).advantages
    assert found[:4].tolist() == [[0.0, 0.5, 0.5], [0.0] * 3, [0.0] * 3, [0.0, 0.5, 0.5]]
    assert found[4:].count_nonzero() == 0


def test_the_loss_is_a_policy_gradient_with_a_spring() -> None:
    own = user_function(f"{EXAMPLES}/own_algorithm.py:squared_ratio", "actor.policy_loss_type")
    knobs = PolicyLoss(aggregation="token", max_new_tokens=2, kind=own, clip_low=0.2, clip_high=0.25)
    old = torch.tensor([[-1.0, -2.0, -5.0]])
    logprobs = torch.tensor([[-1.0, -2.5, 3.0]], requires_grad=True)
    terms = policy_loss(
        knobs,
        logprobs=logprobs,
        old=old,
        rollout=None,
        advantages=torch.tensor([[2.0, -1.0, 7.0]]),
        sampled=torch.tensor([[True, True, False]]),
        owner=torch.zeros(1, 3, dtype=torch.long),
    )
    # -1 * 2; then e^-0.5 + 0.25 / (2 * 0.25).
    expected = [-2.0, float(torch.tensor(-0.5).exp()) + 0.5]
    assert terms.losses[0, :2].tolist() == pytest.approx(expected)
    terms.losses[0, :2].sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([-2.0, expected[1] - 0.5 - 2.0, 0.0])


@pytest.mark.parametrize(
    ("response", "reward"),
    [("7", 1.0), (" 8\n", 0.5), ("5", 1 / 3), ("-7", 0.0), ("seven", 0.0), ("²", 0.0), ("", 0.0)],
)
def test_the_reward_falls_with_the_distance(response: str, reward: float) -> None:
    own = user_function(f"{EXAMPLES}/own_reward.py:close_counts", "reward.remote_url")
    assert own(response=response, label="7") == pytest.approx(reward)
