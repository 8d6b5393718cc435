"""Rewards from several sources: their weighted sum, their own metrics, and what is paid at single tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scripted_loop import make_prompt, make_rollout

from vlmrl.algorithms.advantages import advantages
from vlmrl.cluster.remote_call import recorded
from vlmrl.cluster.rewards import RemoteRewarder, RemoteRewardModel, RewardSources
from vlmrl.errors import RewardError
from vlmrl.types import Group, Sample, Score


class FixedRanks:
    """Ranks that answer by a table."""

    def __init__(self, answers: dict[int, Any]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def forward(self, ask: Any, samples: Sequence[Sample]) -> list[Any]:
        method, _, how = recorded(ask, [])
        self.asked.append(f"{method} {how}" if how.get("as_odds") else method)
        return [self.answers[number] for number in range(len(samples))]


class Functions:
    def __init__(self, scores: list[list[Score]]) -> None:
        self.scores = scores
        self.begun: list[int] = []

    def begin(self, group: Group) -> None:
        self.begun.append(group.prompt.index)

    def score(self, groups: Sequence[Group], *, out_of: int | None = None, failed: int = 0) -> list[list[Score]]:
        return self.scores


class FakeActor:
    """A WorkerGroup of one rewarder, which notes the calls in the order in which they end."""

    def __init__(self, scores: list[list[Score]]) -> None:
        self.scores = scores
        self.calls: list[str] = []

    def call(self, ask: Callable[..., Any]) -> list[Any]:
        self.calls.append(recorded(ask).method)
        return [self.scores]

    def submit(self, ask: Callable[..., Any]) -> list[str]:
        method, (group,), _ = recorded(ask)
        return [f"{method} {group.prompt.index}"]

    def wait(self, refs: list[str]) -> None:
        self.calls += refs
        if "begin 1" in refs:
            raise RewardError("no label")


def groups() -> list[Group]:
    found = []
    for index in range(2):
        prompt = make_prompt(index)
        found.append(Group(prompt, (make_rollout(prompt, "a", version=0), make_rollout(prompt, "b", version=0))))
    return found


def source(answers: dict[int, Any], *, weight: float, is_process: bool = False) -> RemoteRewardModel:
    name = "process" if is_process else "model"
    return RemoteRewardModel(name, FixedRanks(answers), weight, is_process)  # type: ignore[arg-type]


def test_an_actor_scores_after_it_has_begun_and_its_failures_are_shown() -> None:
    first, second = groups()
    actor = FakeActor([[Score(1.0), Score(0.0, failure="response", problem="it is long")]])
    shown: list[str] = []
    rewarder = RemoteRewarder(actor, say=shown.append)  # type: ignore[arg-type]
    rewarder.begin(first)
    assert rewarder.score([first]) == actor.scores
    rewarder.begin(second)
    rewarder.score([second])
    assert actor.calls == ["start", "begin 0", "score", "begin 1", "score"]
    (line,) = shown
    assert "a response to toy:0 could not be scored: it is long" in line


def test_sources_add_up_by_their_weights_and_keep_their_own_numbers() -> None:
    functions = Functions([[Score(1.0, {"math": 1.0}), Score(0.0)], [Score(0.5), Score(0.0, failure="response")]])
    model = source({0: 2.0, 1: -1.0, 2: 0.0, 3: 4.0}, weight=0.5)
    sources = RewardSources(functions, [model])  # type: ignore[arg-type]
    found = sources.score(groups())
    assert [[score.total for score in group] for group in found] == [[2.0, -0.5], [0.5, 0.0]]
    assert found[0][0].parts == {"math": 1.0, "model": 2.0}
    assert found[1][1].failed, "an answer that a function could not score gets 0, whatever the model thinks"
    sources.begin(groups()[1])
    assert functions.begun == [1]


def test_an_answer_that_could_not_be_scored_is_worth_no_more_than_the_worst_of_its_group() -> None:
    functions = Functions(
        [
            [Score(-1.0), Score(0.0, failure="response")],
            [Score(0.0, failure="response"), Score(0.0, failure="response")],
        ]
    )
    model = source({0: -4.0, 1: 9.0, 2: 1.0, 3: 1.0}, weight=0.5)
    found = RewardSources(functions, [model]).score(groups())  # type: ignore[arg-type]
    assert [[score.total for score in group] for group in found] == [[-3.0, -3.0], [-3.0, -3.0]]


def test_without_a_group_to_compare_with_it_does_not_pay_to_break_a_reward_either() -> None:
    alone = [Group(group.prompt, group.rollouts[:1]) for group in groups()]
    for other, worth in ((-1.0, -1.0), (1.0, 0.0)):
        functions = Functions([[Score(other)], [Score(0.0, failure="response")]])
        found = RewardSources(functions, []).score(alone)  # type: ignore[arg-type]
        assert [score.total for group in found for score in group] == [other, worth]


def test_an_answer_that_could_not_be_scored_has_steps_like_others_and_the_worth_of_the_worst() -> None:
    """Rewards of 1 (good steps), 0 (poor ones), and one that broke its reward (poor ones)."""
    prompt = make_prompt(0)
    group = Group(prompt, tuple(make_rollout(prompt, text, version=0) for text in "abc"))
    functions = Functions([[Score(1.0), Score(0.0), Score(0.0, failure="response")]])
    steps = [np.array([0.0, 0.0, paid], np.float32) for paid in (0.75, 0.25, 0.25)]
    model = source(dict(enumerate(steps)), weight=1.0, is_process=True)
    (scores,) = RewardSources(functions, [model]).score([group])  # type: ignore[arg-type]
    assert [score.earned for score in scores] == [1.75, 0.25, 0.0]
    found = advantages(
        torch.tensor([[score.total for score in scores]]),
        torch.tensor([[False, False, True]] * 3),
        estimator="group_norm",
        token_rewards=torch.tensor(np.stack([score.token_rewards for score in scores])),  # type: ignore[arg-type]
    ).advantages[:, -1]
    assert found[2] < found[1] < found[0], "it does not pay to break a reward"


def test_what_the_infrastructure_failed_is_worth_nothing_and_lowers_nobody() -> None:
    lost = Score(0.0, failure="infrastructure")
    functions = Functions([[Score(-1.0), lost], [Score(0.0, failure="response"), lost]])
    model = source({0: -4.0, 1: -99.0, 2: -7.0, 3: 1.0}, weight=0.5)
    found = RewardSources(functions, [model]).score(groups())  # type: ignore[arg-type]
    assert [[score.total for score in group] for group in found] == [[-3.0, 0.0], [-3.0, 0.0]]
    assert [[score.failure for score in group] for group in found] == [
        [None, "infrastructure"],
        ["response", "infrastructure"],
    ]


def test_a_process_model_pays_at_the_tokens_where_steps_end() -> None:
    rows = {number: np.array([0.0, 0.0, 0.25 * number], np.float32) for number in range(4)}
    model = source(rows, weight=2.0, is_process=True)
    found = [score for group in RewardSources(None, [model]).score(groups()) for score in group]
    assert [score.total for score in found] == [0.0] * 4
    assert found[3].token_rewards is not None
    assert found[3].token_rewards.tolist() == [0.0, 0.0, 1.5]
    assert found[3].parts == {"process": 0.75}


def test_a_model_whose_score_is_no_number_stops_the_run_and_names_the_answer() -> None:
    model = source({0: 0.0, 1: float("nan"), 2: 0.0, 3: 0.0}, weight=1.0)
    with pytest.raises(RewardError, match="the model reward of an answer to toy:0 is nan"):
        RewardSources(None, [model]).score(groups())


def test_the_image_check_meets_scores_on_every_token_and_steps_as_odds() -> None:
    rows = {number: np.array([0.0, 1.0, 2.0 * number], np.float32) for number in range(4)}
    model = source({number: float(number) for number in range(4)}, weight=0.5)
    steps = source(rows, weight=0.5, is_process=True)
    lengths = [len(rollout.tokens) for group in groups() for rollout in group.rollouts]
    assert [row.tolist() for row in model.everywhere(groups())] == [[float(n)] * t for n, t in enumerate(lengths)]
    assert [row.tolist() for row in steps.everywhere(groups())] == [[1.0 + 2 * n] * t for n, t in enumerate(lengths)]
    assert steps.ranks.asked == ["step_scores {'as_odds': True}"]  # type: ignore[attr-defined]
