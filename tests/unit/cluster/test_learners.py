"""Models over ranks: what they share with the policy's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from scripted_loop import config

from vlmrl.cluster.learners import Trained, packing_plan, remote_critic, remote_reference, remote_reward_models
from vlmrl.cluster.models import PackingPlan, PassMetrics, PolicyWithoutAdapter, Ranks, RemotePolicy, StepPlan
from vlmrl.config.train import Loop


class LocalWorker:
    """A worker group of one role in this process."""

    def __init__(self, **results: Any) -> None:
        """`results`: method -> result."""
        self.results = results

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.results[method]

    def __len__(self) -> int:
        return 1

    def call(self, function: Callable[[Any], Any]) -> list[Any]:
        return [function(self)]


class ImageProcessor:
    """A processor whose patches are 14 pixels wide and high."""

    resize_factor = 28

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        return size[0] // 14, size[1] // 14

    def dummy_sample(self) -> None:
        return None


def ranks(group: Any) -> Ranks[Any]:
    return Ranks(group, PackingPlan("packed", 1, None, lambda image: 0.0, None), 1, PassMetrics())


@pytest.mark.parametrize(("shares", "lines"), [(True, 1), (False, 0)])
def test_a_critic_that_shares_the_actors_image_features_is_reported(shares: bool, lines: int) -> None:
    pair: Any = LocalWorker(shares_features=shares)
    messages: list[str] = []
    critic = remote_critic(Trained(pair, pair, pair), ranks(pair), StepPlan(1, 1, 0), messages.append)
    assert critic is not None
    assert (critic._group, len(messages)) == (pair, lines)


def test_a_critic_on_its_own_ranks_shares_packing_and_pass_metrics_with_the_policy() -> None:
    policy, critic_group = LocalWorker(), LocalWorker()
    policy_ranks = ranks(policy)
    critic = remote_critic(Trained(policy, critic_group, None), policy_ranks, StepPlan(1, 1, 0), print)  # type: ignore[arg-type]
    assert critic is not None
    assert critic._group is critic_group  # type: ignore[comparison-overlap]
    assert critic._ranks.pass_metrics is policy_ranks.pass_metrics
    assert remote_critic(Trained(policy, None, None), policy_ranks, StepPlan(1, 1, 0), print) is None  # type: ignore[arg-type]


def test_without_a_reference_model_the_policy_without_its_adapter_is_the_reference() -> None:
    policy, messages = RemotePolicy(ranks(LocalWorker()), StepPlan(1, 1, 0)), list[str]()
    assert isinstance(remote_reference(config(), policy, None, messages.append), PolicyWithoutAdapter)
    assert messages == ["reference: the policy with its adapters off, which is model"]
    separate = remote_reference(config(), policy, LocalWorker(), messages.append)  # type: ignore[arg-type]
    assert not isinstance(separate, PolicyWithoutAdapter)
    assert len(messages) == 1


def test_reward_models_have_the_names_and_weights_of_their_settings() -> None:
    reward = {
        "model_name_or_path": "outcome",
        "model_weight": 0.5,
        "process_model_name_or_path": "process",
        "process_separator": ".",
        "process_weight": 2.0,
    }
    groups: dict[str, Any] = {"reward_model": LocalWorker(), "process_model": LocalWorker()}
    by_role = {role: ranks(group) for role, group in groups.items()}
    models = remote_reward_models(config(reward=reward).reward, by_role)
    assert [(model.name, model.weight, model.is_process) for model in models] == [
        ("model", 0.5, False),
        ("process", 2.0, True),
    ]
    assert [model.ranks.group for model in models] == list(groups.values())


@pytest.mark.parametrize(("is_recurrent", "layout"), [(False, "shared"), (True, "padded")])
def test_layout_and_image_cost_of_packs_follow_from_the_model(is_recurrent: bool, layout: str) -> None:
    messages: list[str] = []
    policy: Any = LocalWorker(traits=(0.5, is_recurrent))
    plan = packing_plan(policy, Loop(layout="shared"), ImageProcessor(), messages.append)  # type: ignore[arg-type]
    assert plan.layout == layout
    image: Any = type("Image", (), {"size": (56, 28)})
    assert plan.image_cost(image) == 0.5 * 4 * 2
    assert messages[0] == "a vision patch costs as much as 0.50 language tokens"
    assert ("train.layout padded instead of shared" in messages[-1]) == is_recurrent
