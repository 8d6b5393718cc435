"""Reward functions of TRL and OpenRLHF: recognised by their signature and called in batches."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rewards.responses import Picture, group

from vlmrl.config.reward import Reward
from vlmrl.errors import ConfigError, RewardError
from vlmrl.rewards import batch
from vlmrl.rewards.function_worker import declare
from vlmrl.rewards.rewarder import Rewarder
from vlmrl.rewards.server import FunctionScorer
from vlmrl.types import Group

FUNCTIONS = """
import os, time

def trl(completions, answer, **kwargs):
    return [float(c == a) for c, a in zip(completions, answer)]
def own_column(completions, gold): return [float(c == g) for c, g in zip(completions, gold)]
def family(prompts, completions, family, seldom="no"): return [len(p) + (f == "x") for p, f in zip(prompts, family)]
def chat(completions, **kwargs): return [float(len(c[0]["content"])) for c in completions]
def all_of_it(completions, **kwargs):
    names = ["family", "gold", "label", "prompts"]
    return [float(sorted(kwargs) == names and len(kwargs["family"]) == len(completions))] * len(completions)
def none(completions): return [None if c == "x" else 2 for c in completions]
async def later(completions): return [3.0] * len(completions)
def one(completions): return [1.0]
def lost(completions, difficulty): return [1.0] * len(completions)
def pictures(completions, images): return [float(i[0].size[0]) for i in images]
def best(completions):
    longest = max(map(len, completions))
    return [float(len(c) == longest) for c in completions]

CALLS = []
def fails(completions):
    CALLS.append(len(completions))
    if "bad" in completions:
        raise ValueError("no number")
    return [float(len(CALLS))] * len(completions)
def dies(completions):
    if "bad" in completions:
        os._exit(3)
    return [1.0] * len(completions)
def offline(completions):
    if "bad" in completions:
        raise ConnectionRefusedError
    return [1.0] * len(completions)
def slow(completions):
    for _ in completions:
        time.sleep(0.2)
    return [1.0] * len(completions)
"""

TENSORS = """
import torch

def reward_func(queries, prompts, labels, **kwargs):
    actual = torch.tensor([float(q[len(p):] == l) for q, p, l in zip(queries, prompts, labels)])
    return {"rewards": actual * 2, "scores": actual, "extra_logs": {"length": torch.ones(len(queries)), "all": 4}}
def tensor(queries, prompts, labels): return torch.tensor([[1.0], [0.5]])
def short(queries, prompts, labels): return torch.ones(3)
"""


pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("user") / "theirs.py"
    path.write_text(FUNCTIONS)
    path.with_name("tensors.py").write_text(TENSORS)
    return path


@pytest.fixture(autouse=True)
def no_leftover_processes() -> Iterator[None]:
    yield
    assert not multiprocessing.active_children()


def user_rewarder(file: Path, function: str, **settings: Any) -> Rewarder:
    if f"def {function}(queries" in TENSORS:
        file = file.with_name("tensors.py")
    reward = {"functions": {}, "remote_url": f"{file}:{function}", "max_failed_fraction": 0.5}
    return Rewarder(Reward.model_validate(reward | settings), label_key="gold")


async def totals(rewarder: Rewarder, *groups: Group) -> list[list[float]]:
    async with rewarder:
        return [[score.total for score in scores] for scores in await rewarder.score(groups)]


def chatting(*texts: str) -> Group:
    asked = group(*texts)
    return replace(asked, prompt=replace(asked.prompt, is_chat=True))


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        ("trl", [[1.0, 0.0], [0.0, 1.0]]),
        ("own_column", [[1.0, 0.0], [0.0, 1.0]]),
        ("family", [[10.0, 10.0], [10.0, 10.0]]),
        ("all_of_it", [[1.0, 1.0], [1.0, 1.0]]),
        ("none", [[2.0, 2.0], [0.0, 2.0]]),
        ("later", [[3.0, 3.0], [3.0, 3.0]]),
        ("best", [[0.0, 1.0], [1.0, 1.0]]),
        ("reward_func", [[2.0, 0.0], [0.0, 2.0]]),
        ("tensor", [[1.0, 0.5], [1.0, 0.5]]),
    ],
)
async def test_a_batch_is_the_responses_to_one_prompt(file: Path, function: str, wanted: list[list[float]]) -> None:
    assert await totals(user_rewarder(file, function), group("7", "eight"), group("x", "7")) == wanted


async def test_a_label_is_passed_by_the_column_of_its_dataset(file: Path) -> None:
    asked = group("7", "x")
    asked = replace(asked, prompt=replace(asked.prompt, label_key="gold"))
    reward = Reward.model_validate({"functions": {}, "remote_url": f"{file}:own_column", "max_failed_fraction": 0.5})
    assert await totals(Rewarder(reward), asked) == [[1.0, 0.0]]
    with pytest.raises(RewardError, match="shapes:17 has no column gold"):
        await totals(Rewarder(reward), group("7", "x"))


async def test_completions_are_messages_if_the_row_has_messages(file: Path) -> None:
    assert await totals(user_rewarder(file, "chat"), chatting("four", "x")) == [[4.0, 1.0]]
    assert await totals(user_rewarder(file, "trl"), group("7")) == [[1.0]]


async def test_images_are_passed_if_declared(file: Path) -> None:
    assert await totals(user_rewarder(file, "pictures"), group("a", "b", media=(Picture(),))) == [[5.0, 5.0]]


async def test_scores_and_extra_logs_are_for_the_metrics(file: Path) -> None:
    async with user_rewarder(file, "reward_func") as rewarder:
        (score, _) = (await rewarder.score([group("7", "8")]))[0]
    assert score.parts == {
        "reward_func": 2.0,
        "reward_func/scores": 1.0,
        "reward_func/length": 1.0,
        "reward_func/all": 4.0,
    }


def test_a_file_without_a_name_means_reward_func(file: Path) -> None:
    assert Reward(remote_url=str(file)).user_function == f"{file}:reward_func"
    assert Reward(remote_url="http://host/score.py").servers == ("http://host/score.py",)


async def test_a_batch_that_raises_is_scored_one_by_one(file: Path) -> None:
    async with user_rewarder(file, "fails") as rewarder:
        scores = (await rewarder.score([group("good", "bad", "fine")]))[0]
    assert [score.failure for score in scores] == [None, "response", None]
    assert [score.total for score in scores] == [2.0, 0.0, 4.0], "the batch, then each alone"
    assert str(scores[1].problem).startswith("ValueError: no number (")


async def test_a_batch_that_ends_its_process_is_scored_one_by_one(file: Path) -> None:
    async with user_rewarder(file, "dies") as rewarder:
        scores = await rewarder.score([group("good", "bad"), group("good")])
    assert [[score.failure for score in row] for row in scores] == [[None, "response"], [None]]
    assert [[score.retried for score in row] for row in scores] == [["death", "death"], [None]]


async def test_a_network_error_fails_the_whole_batch(file: Path) -> None:
    async with user_rewarder(file, "offline", max_failed_fraction=1.0) as rewarder:
        scores = await rewarder.score([group("good", "bad"), group("good")])
    assert [[score.failure for score in row] for row in scores] == [["infrastructure"] * 2, [None]]


async def test_the_time_limit_of_a_batch_is_the_sum_over_its_responses(file: Path) -> None:
    assert await totals(user_rewarder(file, "slow", time_limit_s=0.5), group("a", "b", "c", "d")) == [[1.0] * 4]


@pytest.mark.parametrize(("name", "number"), [("short", 3), ("one", 1)])
async def test_a_wrong_number_of_rewards_is_a_problem_with_a_reason(name: str, number: int, file: Path) -> None:
    message = f"it returned {number} rewards for 2 responses"
    async with user_rewarder(file, name) as rewarder:
        with pytest.raises(RewardError, match=message):
            await rewarder.score([group("7", "8")])


async def test_a_missing_column_stops_the_run_and_names_row_and_columns(file: Path) -> None:
    message = r"shapes:17 has no column difficulty, which lost requires \(it has label, family; the question is passed"
    async with user_rewarder(file, "lost") as rewarder:
        with pytest.raises(RewardError, match=message):
            await rewarder.score([group("7")])


async def test_a_reward_server_also_calls_them_in_batches(file: Path) -> None:
    from vlmrl.rewards.protocol import RewardRequest

    async with FunctionScorer({}, f"{file}:trl", num_workers=1, time_limit_s=5.0) as scorer:
        results = await scorer.score([RewardRequest("a", "p", "7", "7"), RewardRequest("b", "q", "7", "8")])
    assert [result.value for result in results] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (1.0, "it returned float where a list of rewards is expected"),
        ({"scores": [1.0, 1.0]}, "without 'rewards'"),
        ({"rewards": [1.0, 1.0], "extra_logs": {"a": [1]}}, "it returned 1 a for 2 responses"),
        (np.ones((2, 2)), None),
    ],
)
def test_anything_but_one_reward_per_response_is_refused(returned: Any, message: str | None) -> None:
    if message is None:
        assert batch.split_by_response(returned, 2, style="trl") == [[1.0, 1.0]] * 2, (
            "[1.0] is no number; this is checked later"
        )
        return
    with pytest.raises(ValueError, match=message):
        batch.split_by_response(returned, 2, style="openrlhf")


def test_an_invalid_logged_value_keeps_the_reward() -> None:
    logs = {"mean": float("nan"), "some": [2.0, None], "kind": ["a", "b"], "one": torch.tensor(4.0)}
    returned = {"rewards": torch.tensor([1.0, 0.5]), "scores": [float("inf"), 0.5], "extra_logs": logs}
    assert batch.split_by_response(returned, 2, style="openrlhf") == [
        {"total": 1.0, "some": 2.0, "one": 4.0},
        {"total": 0.5, "scores": 0.5, "one": 4.0},
    ]


def test_an_unknown_argument_is_refused_at_the_start() -> None:
    def function(queries: Any, prompts: Any, labels: Any, model: Any) -> Any:
        return torch.zeros(len(queries))

    with pytest.raises(ConfigError, match="OpenRLHF's signature and requires model"):
        declare(function, "r.py:f")
