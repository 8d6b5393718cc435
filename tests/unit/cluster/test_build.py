"""How roles are joined, and what becomes of those that are still starting when everything ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from scripted_loop import config

from vlmrl.cluster.build import (
    RoleBuilder,
    _Trained,
    packing_plan,
    remote_critic,
    remote_reference,
    remote_reward_models,
)
from vlmrl.cluster.models import PackingPlan, PassMetrics, PolicyWithoutAdapter, Ranks, RemotePolicy, Steps
from vlmrl.cluster.session import Session
from vlmrl.config.train import Loop
from vlmrl.parallel import run_parallel


def test_a_role_that_starts_while_everything_ends_is_ended_at_once() -> None:
    ended: list[str] = []
    with ExitStack() as stack:
        builder = RoleBuilder(Session(()), {}, stack)
        with builder.ending():
            builder._at_end(lambda: ended.append("engine"))
        builder._at_end(lambda: ended.append("actor"))
        assert ended == ["actor"], "its thread had not heard of the end"
    assert ended[-1] == "engine"


def test_the_builder_ends_when_nothing_waits_for_its_roles_any_more() -> None:
    is_ended, done = threading.Event(), []

    def wait() -> None:
        is_ended.wait(30)  # a call to a role that is killed
        done.append("waited")

    def run() -> None:
        with ExitStack() as stack:
            builder = RoleBuilder(Session(()), {}, stack)
            with builder.ending():
                builder._at_end(is_ended.set)
                run_parallel(wait, fail)

    def fail() -> None:
        raise ValueError("too few rows")

    with pytest.raises(ValueError, match="too few rows"):
        run()
    assert done == ["waited"]


class Here:
    """A role in this process, which is its only worker."""

    def __init__(self, **results: Any) -> None:
        """`results` are what its methods return, by their names."""
        self.results = results

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *given, **options: self.results[method]

    def __len__(self) -> int:
        return 1

    def call(self, ask: Callable[[Any], Any]) -> list[Any]:
        return [ask(self)]


class Tools:
    """What a processor knows of images: a patch is 14 pixels wide and high."""

    resize_factor = 28

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        return size[0] // 14, size[1] // 14

    def dummy_sample(self) -> None:
        return None


def ranks(group: Any) -> Ranks[Any]:
    return Ranks(group, PackingPlan("packed", 1, None, lambda image: 0.0, None), 1, PassMetrics())


@pytest.mark.parametrize(("shares", "lines"), [(True, 1), (False, 0)])
def test_a_critic_in_the_actors_processes_says_whether_it_shares_their_features(shares: bool, lines: int) -> None:
    pair: Any = Here(shares_features=shares)
    told: list[str] = []
    critic = remote_critic(_Trained(pair, pair, pair), ranks(pair), Steps(1, 1, 0), told.append)
    assert critic is not None
    assert (critic._group, len(told)) == (pair, lines)


def test_a_critic_apart_gets_samples_as_the_policy_does_and_its_metrics_come_with_those_of_the_policy() -> None:
    policy, own = Here(), Here()
    of_policy = ranks(policy)
    critic = remote_critic(_Trained(policy, own, None), of_policy, Steps(1, 1, 0), print)  # type: ignore[arg-type]
    assert critic is not None
    assert critic._group is own  # type: ignore[comparison-overlap]
    assert critic._ranks.pass_metrics is of_policy.pass_metrics
    assert remote_critic(_Trained(policy, None, None), of_policy, Steps(1, 1, 0), print) is None  # type: ignore[arg-type]


def test_without_a_model_of_its_own_the_reference_is_the_policy_without_its_adapter_and_that_is_said() -> None:
    policy, told = RemotePolicy(ranks(Here()), Steps(1, 1, 0)), list[str]()
    assert isinstance(remote_reference(config(), policy, None, told.append), PolicyWithoutAdapter)
    assert told == ["reference: the policy with its adapters off, which is model"]
    apart = remote_reference(config(), policy, Here(), told.append)  # type: ignore[arg-type]
    assert not isinstance(apart, PolicyWithoutAdapter)
    assert len(told) == 1


def test_reward_models_have_the_names_of_their_metrics_and_the_weights_of_their_settings() -> None:
    reward = {
        "model_name_or_path": "outcome",
        "model_weight": 0.5,
        "process_model_name_or_path": "process",
        "process_separator": ".",
        "process_weight": 2.0,
    }
    groups: dict[str, Any] = {"reward_model": Here(), "process_model": Here()}
    models = remote_reward_models(config(reward=reward), ranks(Here()), groups)
    assert [(one.name, one.weight, one.is_process) for one in models] == [("model", 0.5, False), ("process", 2.0, True)]
    assert [one.ranks.group for one in models] == list(groups.values())


@pytest.mark.parametrize(("is_recurrent", "layout"), [(False, "shared"), (True, "padded")])
def test_samples_are_packed_as_the_model_allows_and_images_cost_what_it_says(is_recurrent: bool, layout: str) -> None:
    told: list[str] = []
    policy: Any = Here(traits=(0.5, is_recurrent))
    plan = packing_plan(policy, Loop(layout="shared"), Tools(), told.append)  # type: ignore[arg-type]
    assert plan.layout == layout
    image: Any = type("Image", (), {"size": (56, 28)})
    assert plan.image_cost(image) == 0.5 * 4 * 2
    assert told[0] == "a vision patch costs as much as 0.50 language tokens"
    assert ("train.layout padded instead of shared" in told[-1]) == is_recurrent
