"""Each row has an implementation of the same name, with the properties that it states."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from vlmrl.algorithms import estimators, policy_losses
from vlmrl.algorithms.advantages import advantages
from vlmrl.algorithms.losses import PolicyLoss, PolicyTerms, policy_loss
from vlmrl.config.built_in import ESTIMATORS, POLICY_LOSSES, REWARD_FUNCTIONS

# Two groups of two; the second response of each has two tokens.
REWARDS = torch.tensor([[1.0, 0.0], [2.0, 4.0]])
SAMPLED = torch.tensor([[True, False], [True, True], [True, False], [True, True]])


def functions(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Public functions defined in a module."""
    functions = inspect.getmembers(module, inspect.isfunction)
    return {name: f for name, f in functions if f.__module__ == module.__name__ and not name.startswith("_")}


def test_every_row_has_a_function_and_every_function_a_row() -> None:
    assert functions(estimators).keys() == ESTIMATORS.keys()
    assert functions(policy_losses).keys() == POLICY_LOSSES.keys()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_row_of_an_estimator_matches_its_arguments(name: str) -> None:
    row = ESTIMATORS[name]

    def estimate(rewards: Tensor = REWARDS, *, gamma: float = 1.0) -> Tensor:
        values = torch.zeros(4, 2) if row.needs_critic else None
        return advantages(rewards, SAMPLED, estimator=name, gamma=gamma, values=values).advantages

    assert torch.equal(estimate(), estimate(gamma=0.5)) != row.discounts
    assert torch.equal(estimate(), estimate(REWARDS + torch.tensor([[8.0], [0.0]]))) == row.compares_group
    if row.needs_critic:
        with pytest.raises(ValueError, match="needs the values of a critic"):
            advantages(REWARDS, SAMPLED, estimator=name)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_the_row_of_a_policy_loss_matches_its_arguments(name: str) -> None:
    row = POLICY_LOSSES[name]

    def loss(dual_clip: float | None = None) -> PolicyTerms:
        return policy_loss(
            PolicyLoss(aggregation="token", max_tokens=2, kind=name, dual_clip=dual_clip),
            logprobs=torch.tensor([[-1.0, -3.0]]),
            old=torch.tensor([[-3.0, -3.0]]),
            rollout=None,
            advantages=torch.tensor([[-1.0, -1.0]]),
            sampled=torch.tensor([[True, True]]),
            owner=torch.zeros(1, 2, dtype=torch.long),
        )

    # The first token's ratio is e^2.
    assert torch.equal(loss().losses, loss(dual_clip=2.0).losses) != row.has_dual_clip
    assert (float(loss().ratio[0, 0]) == float(loss().ratio[0, 1])) == row.weighs_responses


@pytest.mark.parametrize("name", REWARD_FUNCTIONS)
def test_the_row_of_a_reward_function_matches_its_label_argument(name: str) -> None:
    score = import_module(f"vlmrl.rewards.{name}").score
    assert ("label" in inspect.signature(score).parameters) == REWARD_FUNCTIONS[name].needs_label
