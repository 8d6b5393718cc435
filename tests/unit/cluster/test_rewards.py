"""Rewards from several sources: weighted sums, separate scores, and token rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scripted_episodes import failed_rollout, make_episode_rollout, make_segment
from scripted_loop import make_prompt, make_rollout

from vlmrl.algorithms.advantages import advantages
from vlmrl.cluster.remote_call import record_call
from vlmrl.cluster.rewards import RemoteRewarder, RemoteRewardModel, RewardSources
from vlmrl.errors import RewardError
from vlmrl.types import Group, Sample, Score


class FixedRanks:
    """Ranks with fixed results by sample."""

    def __init__(self, results: dict[int, Any]) -> None:
        self.results = results
        self.calls: list[str] = []

    def forward(self, function: Any, samples: Sequence[Sample]) -> list[Any]:
        method, _, kwargs = record_call(function, [])
        self.calls.append(f"{method} {kwargs}" if kwargs.get("as_odds") else method)
        return [self.results[number] for number in range(len(samples))]


class Functions:
    def __init__(self, scores: list[list[Score]]) -> None:
        self.scores = scores
        self.begun: list[int] = []

    def begin(self, group: Group) -> None:
        self.begun.append(group.prompt.index)

    def score(self, groups: Sequence[Group], *, out_of: int | None = None, failed: int = 0) -> list[list[Score]]:
        return self.scores


class FakeActor:
    """A WorkerGroup of one rewarder that records the calls in the order in which they end."""

    def __init__(self, scores: list[list[Score]]) -> None:
        self.scores = scores
        self.calls: list[str] = []

    def call(self, function: Callable[..., Any]) -> list[Any]:
        self.calls.append(record_call(function).method)
        return [self.scores]

    def submit(self, function: Callable[..., Any]) -> list[str]:
        method, (group,), _ = record_call(function)
        return [f"{method} {group.prompt.index}"]

    def wait(self, refs: list[str]) -> None:
        self.calls += refs
        if "begin 1" in refs:
            raise RewardError("no label")


def groups() -> list[Group]:
    both = []
    for index in range(2):
        prompt = make_prompt(index)
        both.append(Group(prompt, (make_rollout(prompt, "a", version=0), make_rollout(prompt, "b", version=0))))
    return both


def source(results: dict[int, Any], *, weight: float, is_process: bool = False) -> RemoteRewardModel:
    name = "process" if is_process else "model"
    return RemoteRewardModel(name, FixedRanks(results), weight, is_process)  # type: ignore[arg-type]


def test_scores_wait_for_begun_groups_and_failures_are_shown() -> None:
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


def test_scores_are_weighted_sums_and_keep_the_parts() -> None:
    functions = Functions([[Score(1.0, {"math": 1.0}), Score(0.0)], [Score(0.5), Score(0.0, failure="response")]])
    model = source({0: 2.0, 1: -1.0, 2: 0.0, 3: 4.0}, weight=0.5)
    sources = RewardSources(functions, [model])  # type: ignore[arg-type]
    by_group = sources.score(groups())
    assert [[score.total for score in group] for group in by_group] == [[2.0, -0.5], [0.5, 0.0]]
    assert by_group[0][0].parts == {"math": 1.0, "model": 2.0}
    assert by_group[1][1].failed, "a response that a function could not score gets 0, whatever the model's score"
    sources.begin(groups()[1])
    assert functions.begun == [1]


def test_a_failed_response_gets_no_more_than_the_lowest_of_its_group() -> None:
    functions = Functions(
        [
            [Score(-1.0), Score(0.0, failure="response")],
            [Score(0.0, failure="response"), Score(0.0, failure="response")],
        ]
    )
    model = source({0: -4.0, 1: 9.0, 2: 1.0, 3: 1.0}, weight=0.5)
    by_group = RewardSources(functions, [model]).score(groups())  # type: ignore[arg-type]
    assert [[score.total for score in group] for group in by_group] == [[-3.0, -3.0], [-3.0, -3.0]]


def test_a_failed_response_without_a_group_gets_no_more_than_the_lowest_of_all() -> None:
    alone = [Group(group.prompt, group.rollouts[:1]) for group in groups()]
    for other, expected in ((-1.0, -1.0), (1.0, 0.0)):
        functions = Functions([[Score(other)], [Score(0.0, failure="response")]])
        by_group = RewardSources(functions, []).score(alone)  # type: ignore[arg-type]
        assert [score.total for group in by_group for score in group] == [other, expected]


def test_a_failed_response_keeps_its_step_scores_and_gets_the_lowest_total() -> None:
    """Rewards of 1 (good steps), 0 (poor steps), and a failed one (poor steps)."""
    prompt = make_prompt(0)
    group = Group(prompt, tuple(make_rollout(prompt, text, version=0) for text in "abc"))
    functions = Functions([[Score(1.0), Score(0.0), Score(0.0, failure="response")]])
    steps = [np.array([0.0, 0.0, reward], np.float32) for reward in (0.75, 0.25, 0.25)]
    model = source(dict(enumerate(steps)), weight=1.0, is_process=True)
    (scores,) = RewardSources(functions, [model]).score([group])  # type: ignore[arg-type]
    assert [score.earned for score in scores] == [1.75, 0.25, 0.0]
    values = advantages(
        torch.tensor([[score.total for score in scores]]),
        torch.tensor([[False, False, True]] * 3),
        estimator="group_norm",
        token_rewards=torch.tensor(np.stack([score.token_rewards for score in scores])),  # type: ignore[arg-type]
    ).advantages[:, -1]
    assert values[2] < values[1] < values[0], "breaking a scorer does not pay"


def test_a_response_that_the_infrastructure_failed_has_no_reward_and_lowers_no_other() -> None:
    lost = Score(0.0, failure="infrastructure")
    functions = Functions([[Score(-1.0), lost], [Score(0.0, failure="response"), lost]])
    model = source({0: -4.0, 1: -99.0, 2: -7.0, 3: 1.0}, weight=0.5)
    by_group = RewardSources(functions, [model]).score(groups())  # type: ignore[arg-type]
    assert [[score.total for score in group] for group in by_group] == [[-3.0, 0.0], [-3.0, 0.0]]
    assert [[score.failure for score in group] for group in by_group] == [
        [None, "infrastructure"],
        ["response", "infrastructure"],
    ]


def test_a_process_model_rewards_the_last_tokens_of_steps() -> None:
    rows = {number: np.array([0.0, 0.0, 0.25 * number], np.float32) for number in range(4)}
    model = source(rows, weight=2.0, is_process=True)
    scores = [score for group in RewardSources(None, [model]).score(groups()) for score in group]
    assert [score.total for score in scores] == [0.0] * 4
    assert scores[3].token_rewards is not None
    assert scores[3].token_rewards.tolist() == [0.0, 0.0, 1.5]
    assert scores[3].parts == {"process": 0.75}


def test_a_score_that_is_nan_stops_the_run_and_names_the_prompt() -> None:
    model = source({0: 0.0, 1: float("nan"), 2: 0.0, 3: 0.0}, weight=1.0)
    with pytest.raises(RewardError, match="the model reward of a response to toy:0 is nan"):
        RewardSources(None, [model]).score(groups())


def test_the_image_check_gets_scores_on_all_tokens_and_steps_as_log_odds() -> None:
    rows = {number: np.array([0.0, 1.0, 2.0 * number], np.float32) for number in range(4)}
    model = source({number: float(number) for number in range(4)}, weight=0.5)
    steps = source(rows, weight=0.5, is_process=True)
    lengths = [len(segment.tokens) for group in groups() for segment in group.segments]
    assert [row.tolist() for row in model.score_by_token(groups())] == [[float(n)] * t for n, t in enumerate(lengths)]
    assert [row.tolist() for row in steps.score_by_token(groups())] == [
        [1.0 + 2 * n] * t for n, t in enumerate(lengths)
    ]
    assert steps.ranks.calls == ["step_scores {'as_odds': True}"]  # type: ignore[attr-defined]


# ---------------------------------------------------------------- conversations with an environment


def conversations() -> list[Group]:
    """Turns with rewards of 0.5 and 1 in two segments, an environment that raised after a reward of 5, a lost one."""
    prompt = make_prompt(0)
    done = make_episode_rollout(make_segment([[0, 1], [7, 7]], [0.5]), make_segment([[0, 4], [9], [4]], [1.0]))
    raised = make_episode_rollout(
        make_segment([[0, 1], [6], [8], [6]], [5.0, 0.0]), stop="raised", failure="response", problem="KeyError: 'x'"
    )
    other = make_prompt(1)
    return [Group(prompt, (done, raised, failed_rollout(prompt))), Group(other, (failed_rollout(other),))]


class RecordingFunctions(Functions):
    def __init__(self, scores: list[list[Score]]) -> None:
        super().__init__(scores)
        self.seen: list[list[int]] = []

    def begin(self, group: Group) -> None:
        self.seen.append([rollout.num_sampled for rollout in group.rollouts])

    def score(self, groups: Sequence[Group], *, out_of: int | None = None, failed: int = 0) -> list[list[Score]]:
        self.seen += [[rollout.num_sampled for rollout in group.rollouts] for group in groups]
        return self.scores


def test_rewards_of_turns_are_added_to_those_of_the_sources() -> None:
    functions = RecordingFunctions([[Score(10.0, {"math": 10.0})]])
    model = source({0: 100.0, 1: 2.0}, weight=0.5)
    sources = RewardSources(functions, [model])  # type: ignore[arg-type]
    for group in conversations():
        sources.begin(group)
    (done, raised, failed), (alone,) = sources.score(conversations())
    assert functions.seen == [[3], [3]], "episodes that raised or failed are not scored, nor are groups of them alone"
    # The model's score is that of the last segment.
    assert (done.total, done.parts) == (11.0, {"math": 10.0, "model": 2.0, "environment": 1.5})
    assert (done.turn_rewards, done.token_rewards, done.earned) == ((0.5, 1.0), None, 12.5)
    assert (raised.failure, raised.problem, raised.earned) == ("response", "KeyError: 'x'", 0.0)
    assert (failed.failure, failed.has_reward, alone.failure) == ("infrastructure", False, "infrastructure")


def test_numbers_of_an_agent_are_parts_that_do_not_count() -> None:
    rollout = make_episode_rollout(make_segment([[0, 1], [7]], [0.5]), parts={"tests_passed": 3.0})
    ((score,),) = RewardSources(None, []).score([Group(make_prompt(0), (rollout,))])
    assert (score.total, score.turn_rewards) == (0.0, (0.5,))
    assert score.parts == {"tests_passed": 3.0, "environment": 0.5}


def test_a_conversation_that_raised_is_lowered_at_its_last_turn() -> None:
    functions = RecordingFunctions([[Score(-10.0)]])
    steps = {0: np.array([0, 0, 0.25, 0], np.float32), 1: np.zeros(4, np.float32)}
    model = source(steps, weight=1.0, is_process=True)
    sources = RewardSources(functions, [model])  # type: ignore[arg-type]
    (done, raised, failed), _ = sources.score(conversations())
    assert done.token_rewards is not None
    assert done.token_rewards.tolist() == [0, 0, 0.25, 0, 0, 0, 0, 0]
    assert (done.total, done.turn_rewards, done.earned) == (-10.0, (0.5, 1.0), -8.25)
    assert raised.earned == -8.25, "raising pays no more than the lowest of the group, whatever its turns earned"
    assert (raised.total, raised.turn_rewards) == (0.0, (5.0, -13.25)), "the total would be clipped"
    assert raised.parts["environment"] == 5.0
    assert failed.turn_rewards == ()


def test_failures_of_environments_are_shown_once_of_each_kind() -> None:
    shown: list[str] = []
    sources = RewardSources(None, [], say=shown.append)
    for _ in range(2):
        sources.score(conversations())
    raised, again, lost = shown
    assert "the episode of toy:0 was played again: the environment took over 60 s" in again
    assert "agent/retries" in again
    assert "the episode of toy:0 raised: KeyError: 'x'" in raised
    assert "agent/stop/raised" in raised
    assert "the episode of toy:0 failed: the environment took over 60 s" in lost
