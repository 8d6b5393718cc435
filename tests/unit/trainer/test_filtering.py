"""Dynamic filtering: which groups are kept, and when the prompts count as solved."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scripted_loop import config, make_prompt, make_rollout

from vlmrl.config.verbs import RlConfig
from vlmrl.trainer.filtering import (
    FilteredGroup,
    RewardRange,
    filter_groups,
    format_shortage,
    highest_possible_reward,
    is_solved,
)
from vlmrl.types import Group, Score

LOST = Score(0.0, failure="infrastructure")


def filtering(**changes: Any) -> RlConfig:
    return config(algo={"dynamic_filtering_enable": True} | changes.pop("algo", {}), **changes)


def filtered(settings: RlConfig, *rewards: tuple[float | Score, ...]) -> list[FilteredGroup]:
    """Filter a group per argument, with responses of these rewards."""
    groups, scores = [], []
    for number, group_rewards in enumerate(rewards):
        prompt = make_prompt(number)
        groups.append(Group(prompt, tuple(make_rollout(prompt, "a", version=0, length=4) for _ in group_rewards)))
        scores.append([each if isinstance(each, Score) else Score(each) for each in group_rewards])
    return filter_groups(settings, groups, scores)


def test_each_group_gets_its_outcome() -> None:
    settings = filtering(algo={"dynamic_filtering_range": [0.0, 1.0]})
    groups = filtered(settings, (0.0, 1.0), (1.0, 1.0), (-1.0, 1.0), (1.0, LOST), (1.0, Score(0.0, failure="response")))
    assert [one.outcome for one in groups] == ["kept", "constant", "outside", "unscored", "kept"]
    assert math.isnan(groups[3].rewards[1])
    assert groups[3].scored_rewards.tolist() == [1.0]


def test_without_filtering_every_group_is_kept() -> None:
    assert all(one.is_kept for one in filtered(config(), (1.0, 1.0), (LOST, LOST), (0.0, 1.0)))


def test_constant_groups_are_those_of_equal_shaped_rewards() -> None:
    clipped = filtering(reward={"clip_range": [-1.0, 1.0]})
    assert filtered(clipped, (1.0, 3.0))[0].outcome == "constant"
    prompt = make_prompt(0)
    group = Group(prompt, (make_rollout(prompt, "a", version=0), make_rollout(prompt, "b", version=0, length=4)))
    # The limit is 4 tokens: a response of 4 is penalized.
    penalised = filtering(reward={"overlong_buffer_len": 2})
    assert filter_groups(penalised, [group], [[Score(1.0), Score(1.0)]])[0].outcome == "kept"


def test_token_rewards_count_in_filtering() -> None:
    steps = [Score(0.0, token_rewards=np.array([0, 0, 0, 0, 0, paid], np.float32)) for paid in (0.25, 0.5)]
    groups = filtered(filtering(algo={"dynamic_filtering_range": [0.3, 0.4]}), tuple(steps))
    assert groups[0].outcome == "kept", "their mean, 0.375, is asked in the units of the total reward"


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ({}, 1.0),
        ({"functions": {"math": 0.9, "format": 0.1, "exact": -1.0}}, 1.0),
        ({"functions": {"math": 20.0}}, 10.0),
        ({"functions": {"math": 1.0}, "remote_url": "mine.py:f"}, None),
        ({"functions": {"math": 1.0}, "model_name_or_path": "scorer"}, None),
        ({"functions": {"math": 1.0}, "process_model_name_or_path": "scorer"}, None),
    ],
)
def test_the_highest_reward_is_known_of_built_in_functions(reward: dict[str, Any], expected: float | None) -> None:
    assert highest_possible_reward(config(reward=reward)) == expected


def test_the_highest_reward_of_an_environment_is_unknown() -> None:
    train = {"batch_size": 4, "agent_func_path": "my_env.py:make"}
    data = {"prompt_dataset": "toy", "max_len": 128}
    for reward in ({}, {"functions": {"math": 1.0}}):
        assert highest_possible_reward(config(reward=reward, data=data, train=train)) is None


def test_more_than_half_of_the_constant_groups_have_to_be_solved() -> None:
    settings = filtering()
    solved, hopeless, kept = (1.0, 1.0), (0.0, 0.0), (0.0, 1.0)
    assert is_solved(settings, filtered(settings, solved, solved, hopeless, kept), RewardRange(0, 1))
    assert not is_solved(settings, filtered(settings, solved, hopeless, kept), RewardRange(0, 1))
    assert not is_solved(settings, filtered(settings, kept, (1.0, LOST)), RewardRange(0, 1)), "there are none"


def test_an_unknown_limit_is_the_highest_reward_seen() -> None:
    settings = filtering(reward={"remote_url": "mine.py:f"})
    groups = filtered(settings, (0.5, 0.5), (0.5, 0.5))
    assert is_solved(settings, groups, RewardRange(0.0, 0.5))
    assert not is_solved(settings, groups, RewardRange(0.0, 0.75))
    assert not is_solved(settings, groups, RewardRange().extended(groups)), (
        "a run that saw one reward cannot tell high from low"
    )


def test_the_reward_range_is_of_shaped_rewards_of_scored_responses() -> None:
    settings = filtering(reward={"clip_range": [-1.0, 1.0]})
    groups = filtered(settings, (0.25, 3.0), (Score(-9.0, failure="infrastructure"), 0.5))
    assert RewardRange().extended(groups) == RewardRange(0.25, 1.0)
    assert RewardRange(-2.0, 0.0).extended(groups) == RewardRange(-2.0, 1.0)


def test_a_shortage_is_explained_in_one_line() -> None:
    settings = filtering(algo={"dynamic_filtering_range": [0.0, 1.0]})
    line = format_shortage(settings, filtered(settings, (1.0, 1.0), (0.0, 0.0), (-1.0, 1.0), (LOST, 1.0)))
    assert line == (
        "algo.dynamic_filtering_enable kept 0 of 4 groups in 10 draws, and a step needs 2: 2 had responses of equal "
        "reward (0 to 1), 1 a mean reward outside algo.dynamic_filtering_range 0 1, 1 fewer than two scored responses"
    )
