"""Experience of conversations: several turns and segments are one response, by the rules of each estimator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scripted_episodes import failed_rollout, make_episode_rollout, make_segment
from scripted_loop import config, make_prompt

from vlmrl.cluster.models import loss_totals
from vlmrl.cluster.rewards import RewardSources
from vlmrl.config.verbs import RlConfig
from vlmrl.data.responses import to_samples
from vlmrl.errors import RewardError
from vlmrl.trainer.episodes import check_episodes, episode_metrics
from vlmrl.trainer.experience import (
    ModelOutputs,
    ScoredBatch,
    batch_metrics,
    length_metrics,
    make_experience,
    shaped_rewards,
)
from vlmrl.types import Floats, Group, Metrics, Score, Totals


def two_prompts() -> list[Group]:
    """Two prompts with two responses each.

    Rewards of turns: [0.5, 1] and [2] in two segments, 3 in one; then [1, 0] in one segment, and a lost episode.
    """
    one, two = make_prompt(0), make_prompt(1, length=3)
    return [
        Group(
            one,
            (
                make_episode_rollout(
                    make_segment([[0, 1], [7, 7], [8], [9]], [0.5, 1.0]), make_segment([[0, 5, 5], [4]], [2.0])
                ),
                make_episode_rollout(make_segment([[0, 1], [6, 6]], [3.0])),
            ),
        ),
        Group(
            two,
            (
                make_episode_rollout(make_segment([[0, 1, 2], [3], [8, 8], [3]], [1.0, 0.0])),
                failed_rollout(two),
            ),
        ),
    ]


def experience(
    estimator: str, groups: list[Group], *, scores: list[list[Score]] | None = None, **others: Any
) -> tuple[ScoredBatch, Metrics]:
    """The experience of conversations with the rewards of their turns alone, unless `scores` are given."""
    columns: dict[str, list[Floats]] = {name: others.pop(name) for name in ("ref", "values") if name in others}
    kl = others.pop("kl", {})
    kl_coef = others.pop("kl_coef", 0.0)
    settings = config(
        algo={"advantage": {"estimator": estimator} | others, "kl": kl},
        train={"batch_size": 4, "agent_func_path": "my_env.py:make"},
        data={"prompt_dataset": "toy", "max_len": 128},
    )
    scores = scores or RewardSources(None, []).score(groups)
    samples = to_samples(groups)
    old = [segment.logprobs for group in groups for segment in group.segments]
    return make_experience(settings, groups, scores, ModelOutputs(samples, old, **columns), kl_coef=kl_coef)


def test_group_estimators_compare_the_sums_of_turns() -> None:
    batch, _ = experience("dr_grpo", two_prompts())
    # Sums of 3.5 and 3; the only response of the second prompt has none to be compared with.
    assert [row.tolist() for row in batch.experience.advantages] == [
        [0, 0, 0.25, 0.25, 0, 0.25],
        [0, 0, 0, 0.25],
        [0, 0, -0.25, -0.25],
        [0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0],
    ]
    assert batch.rewards[0].tolist() == [3.5, 3.0]
    assert np.isnan(batch.rewards[1][1])
    # The lost episode has no tokens, and the response without a comparison keeps its own.
    assert loss_totals(batch.experience.samples) == Totals(num_tokens=4 + 2 + 2, num_responses=3)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("rloo", [0.5, -0.5]),
        ("group_norm", [0.25 / (0.5**0.5 * 0.5), -0.25 / (0.5**0.5 * 0.5)]),
        ("reinforce_baseline", [0.25, -0.25]),
    ],
)
def test_other_group_estimators(estimator: str, expected: list[float]) -> None:
    settings = {"no_std_norm": True} if estimator == "reinforce_baseline" else {}
    batch, _ = experience(estimator, two_prompts()[:1], **settings)
    rows = batch.experience.advantages
    mean = 0.25 * (4 - 2) / 6 if estimator == "reinforce_baseline" else 0.0  # over the sampled tokens of the step
    np.testing.assert_allclose(rows[0], np.array([0, 0, 1, 1, 0, 1]) * (expected[0] - mean), atol=1e-5)
    np.testing.assert_allclose(rows[1], np.array([0, 0, 0, 1]) * (expected[0] - mean), atol=1e-5)
    np.testing.assert_allclose(rows[2], np.array([0, 0, 1, 1]) * (expected[1] - mean), atol=1e-5)


def test_reinforce_gets_the_rewards_of_turns_at_their_ends() -> None:
    batch, _ = experience("reinforce", two_prompts(), no_std_norm=True, gamma=0.5)
    # The tokens [7, 7], [9] and [4] are paid 0, 0.5, 1 and 2, and each gets half of what the next one gets.
    returns = [[0.75, 1.5, 2.0], [2.0], [1.5, 3.0], [1.0, 0.0]]
    mean = sum(value for row in returns for value in row) / 8
    samples = to_samples(two_prompts())
    for row, sample, expected in zip(batch.experience.advantages, samples, [*returns, []], strict=True):
        np.testing.assert_allclose(row[sample.sampled], np.array(expected) - mean, atol=1e-6)
        assert not row[~sample.sampled].any()


def test_gae_runs_through_turns_and_segments() -> None:
    groups = two_prompts()[:1]
    values = [
        np.array([9, 9, 1.0, 0.5, 9, 0.25], np.float32),  # 9 where not sampled: never read
        np.array([9, 9, 9, 2.0], np.float32),
        np.array([9, 9, 1.0, 1.0], np.float32),
    ]
    batch, metrics = experience("gae", groups, values=values, no_std_norm=True, gamma=1.0, lambd=0.5)
    # d: 0 + 0.5 - 1; 0.5 + 0.25 - 0.5; 1 + 2 - 0.25; 2 - 2. A: from behind, each half of the next.
    first = [-0.5 + 0.5 * (0.25 + 0.5 * 2.75), 0.25 + 0.5 * 2.75, 2.75, 0.0]
    second = [0 + 0.5 * 2.0, 2.0]
    mean = (sum(first) + sum(second)) / 6
    np.testing.assert_allclose(batch.experience.advantages[0][[2, 3, 5]], np.array(first[:3]) - mean, atol=1e-6)
    np.testing.assert_allclose(batch.experience.advantages[1][[3]], np.array(first[3:]) - mean, atol=1e-6)
    np.testing.assert_allclose(batch.experience.advantages[2][[2, 3]], np.array(second) - mean, atol=1e-6)
    assert batch.experience.returns is not None
    np.testing.assert_allclose(batch.experience.returns[0][[2, 3, 5]], np.add(first[:3], [1, 0.5, 0.25]), atol=1e-6)
    np.testing.assert_allclose(batch.experience.returns[1][[3]], [2.0], atol=1e-6)
    assert metrics["value/mean"] == pytest.approx((1 + 0.5 + 0.25 + 2 + 1 + 1) / 6)


def test_a_reward_of_the_whole_conversation_is_added_at_its_last_token() -> None:
    groups = two_prompts()[:1]
    (scores,) = RewardSources(None, []).score(groups)
    scored = [replace(score, total=total) for score, total in zip(scores, (1.0, 2.0), strict=True)]
    batch, _ = experience("reinforce", groups, scores=[scored], no_std_norm=True, gamma=1.0)
    returns = [[4.5, 4.5, 4.0], [3.0], [5.0, 5.0]]
    mean = sum(value for row in returns for value in row) / 6
    for row, sample, expected in zip(batch.experience.advantages, to_samples(groups), returns, strict=True):
        np.testing.assert_allclose(row[sample.sampled], np.array(expected) - mean, atol=1e-5)


def high_scores() -> list[Group]:
    """A game of high rewards: [30, -20] and [40, 5] in two turns, and one that raised behind 50."""
    prompt = make_prompt(0)
    spans = [[0, 1], [7, 7], [8], [9]]
    raised = {"stop": "raised", "failure": "response", "problem": "KeyError: 'x'"}
    return [
        Group(
            prompt,
            (
                make_episode_rollout(make_segment(spans, [30.0, -20.0])),
                make_episode_rollout(make_segment(spans, [40.0, 5.0])),
                make_episode_rollout(make_segment(spans, [50.0, 0.0]), **raised),
            ),
        )
    ]


@pytest.mark.parametrize("source", [0.0, 100.0])
def test_only_the_sources_are_clipped_and_not_the_rewards_of_a_game(source: float) -> None:
    groups = high_scores()
    (scores,) = RewardSources(None, []).score(groups)
    scores = [score if score.failed else replace(score, total=source) for score in scores]
    clipped = min(source, 10.0)
    totals = [10.0 + clipped, 45.0 + clipped, 0.0]
    batch, _ = experience("rloo", groups, scores=[scores])
    assert batch.rewards[0].tolist() == totals
    mean = sum(totals) / 3
    for row, total in zip(batch.experience.advantages, totals, strict=True):
        np.testing.assert_allclose(row, np.array([0, 0, 1, 1, 0, 1]) * (total - mean) * 1.5, rtol=1e-6)
    batch, _ = experience("reinforce", groups, scores=[scores], no_std_norm=True, gamma=1.0)
    returns = [[10 + clipped] * 2 + [-20 + clipped], [45 + clipped] * 2 + [5 + clipped], [0, 0, -50]]
    mean = float(np.mean(returns))
    for row, expected in zip(batch.experience.advantages, returns, strict=True):
        np.testing.assert_allclose(row[[2, 3, 5]], np.array(expected) - mean, rtol=1e-5)


@pytest.mark.parametrize(("coefficient", "expected"), [(0.5, [[0.25, -4.0], 0.0]), (-1.0, [[0.0, -4.0], -1.0])])
def test_the_turns_of_a_truncated_conversation_are_punished_one_by_one(
    coefficient: float, expected: list[list[float] | float]
) -> None:
    turns, of_conversation = expected
    spans = [[0, 1], [7, 7], [8], [9]]
    cut = make_episode_rollout(make_segment(spans, [0.5, -4.0]), finish="length")
    complete = make_episode_rollout(make_segment(spans, [0.5, -4.0]))
    groups = [Group(make_prompt(0), (cut, complete))]
    scores = RewardSources(None, []).score(groups)
    for estimator in ("rloo", "reinforce"):
        settings = config(
            reward={"stop_properly_penalty_coef": coefficient},
            algo={"advantage": {"estimator": estimator}},
            train={"batch_size": 4, "agent_func_path": "my_env.py:make"},
            data={"prompt_dataset": "toy", "max_len": 128},
        )
        shaped = shaped_rewards(settings, groups, scores)
        assert shaped.totals.tolist() == [[sum(turns) + of_conversation, -3.5]]
        if estimator == "reinforce":
            first, second = shaped.token_rewards
            assert first is not None
            assert first.tolist() == [0, 0, 0, turns[0], 0, turns[1]]
            assert second is not None
            assert second.tolist() == [0, 0, 0, 0.5, 0, -4.0]


def test_kl_in_the_reward_counts_for_all_earlier_turns_and_segments() -> None:
    groups = two_prompts()[:1]
    samples = to_samples(groups)
    ref = [np.where(sample.sampled, -0.7, 0.0).astype(np.float32) for sample in samples]
    kl = {"init_coef": 0.5, "estimator": "k1"}
    batch, metrics = experience("dr_grpo", groups, ref=ref, kl=kl, kl_coef=0.5)
    # 0.1 for the token itself and for each later one of the same response.
    np.testing.assert_allclose(batch.experience.advantages[0], [0, 0, 0.25 - 0.4, 0.25 - 0.3, 0, 0.25 - 0.2], atol=1e-6)
    np.testing.assert_allclose(batch.experience.advantages[1], [0, 0, 0, 0.25 - 0.1], atol=1e-6)
    np.testing.assert_allclose(batch.experience.advantages[2], [0, 0, -0.25 - 0.2, -0.25 - 0.1], atol=1e-6)
    assert metrics["kl/reference"] == pytest.approx(0.2, abs=1e-6)


def test_lengths_and_truncation_are_those_of_whole_conversations() -> None:
    groups = two_prompts()[:1]
    metrics = length_metrics(groups)
    assert (metrics["response/tokens_mean"], metrics["response/tokens_max"]) == (3.0, 4.0)
    settings = config(
        reward={"overlong_buffer_len": 4, "overlong_penalty_factor": 1.0},
        train={"batch_size": 4, "agent_func_path": "my_env.py:make"},
        agent={"max_turns": 2},
        data={"prompt_dataset": "toy", "max_len": 128},
    )
    assert settings.max_response_tokens == 8
    # The penalty begins above 8 - 4 tokens.
    scores = [[Score(1.0), Score(1.0)]]
    assert shaped_rewards(settings, groups, scores).rewards.tolist() == [[1.0, 1.0]]
    longer = make_episode_rollout(make_segment([[0, 1], [7] * 3]), make_segment([[0], [4] * 3]), finish="length")
    groups = [Group(groups[0].prompt, (longer, groups[0].rollouts[1]))]
    assert shaped_rewards(settings, groups, scores).rewards.tolist() == [[0.5, 1.0]]
    assert length_metrics(groups)["response/truncated_fraction"] == 0.5


def test_metrics_of_episodes() -> None:
    groups = two_prompts()
    metrics = episode_metrics(groups)
    assert (metrics["agent/turns_mean"], metrics["agent/turns_max"]) == (2.0, 3.0), "a failed one has no turns"
    assert length_metrics(groups)["response/tokens_mean"] == 8 / 3
    assert (metrics["agent/failed"], metrics["agent/retries"]) == (1.0, 2.0)
    assert (metrics["agent/stop/done"], metrics["agent/stop/failed"], metrics["agent/stop/turns"]) == (0.75, 0.25, 0.0)
    assert episode_metrics([]) == {}
    slow = make_episode_rollout(
        make_segment([[0, 1], [7]]), stop="turns", env_s=3.0, tool_calls=4, tool_errors=1, timeouts=2
    )
    metrics = episode_metrics([Group(groups[0].prompt, (slow, groups[0].rollouts[1]))])
    assert (metrics["agent/env_s"], metrics["time/env_s"]) == (1.5, 3.0)
    assert (metrics["agent/tool_calls"], metrics["agent/tool_errors"], metrics["agent/timeouts"]) == (4.0, 1.0, 2.0)
    assert metrics["agent/stop/turns"] == 0.5
    counted = [
        make_episode_rollout(make_segment([[0, 1], [7]]), counts=counts)
        for counts in ({"opened/start": 2, "dropped_tokens": 5}, {"opened/start": 1})
    ]
    metrics = episode_metrics([Group(groups[0].prompt, tuple(counted))])
    assert (metrics["agent/gateway/opened/start"], metrics["agent/gateway/dropped_tokens"]) == (3.0, 5.0)


def test_too_many_failed_episodes_stop_the_run_with_the_first_problem() -> None:
    groups = two_prompts()
    settings = config(
        train={"batch_size": 4, "agent_func_path": "my_env.py:make"},
        agent={"max_failed_fraction": 0.25},
        data={"prompt_dataset": "toy", "max_len": 128},
    )
    check_episodes(settings, groups, num_responses=4)
    with pytest.raises(
        RewardError,
        match=r"1 of 3 episodes failed, more than agent.max_failed_fraction 0.25; the first, on toy:1: the environment "
        "took over 60 s",
    ):
        check_episodes(settings, groups, num_responses=3)


def test_an_environment_that_raises_in_every_episode_stops_the_run_with_the_first_problem() -> None:
    def settings(max_failed_fraction: float) -> RlConfig:
        return config(
            train={"batch_size": 4, "agent_func_path": "my_env.py:make"},
            agent={"max_failed_fraction": max_failed_fraction},
            data={"prompt_dataset": "toy", "max_len": 128},
        )

    prompt, other = make_prompt(0), make_prompt(1)
    raised = make_episode_rollout(
        make_segment([[0, 1], [7]]), stop="raised", failure="response", problem="KeyError: 'label' (my_env.py:7)"
    )
    ended, lost = make_episode_rollout(make_segment([[0, 1], [7]])), failed_rollout(other)
    everywhere = [Group(prompt, (raised, raised)), Group(other, (raised, raised))]
    message = (
        r"the environment or agent raised in all 4 episodes: fix it, or let it return a reward for a response that it "
        r"cannot use; the first, on toy:0: KeyError: 'label' \(my_env\.py:7\)$"
    )
    with pytest.raises(RewardError, match=message):
        check_episodes(settings(0.1), everywhere, num_responses=4)
    with pytest.raises(RewardError, match="raised in all 3 episodes"):
        check_episodes(settings(0.5), [everywhere[0], Group(other, (raised, lost))])
    check_episodes(settings(1.0), everywhere)
    check_episodes(settings(0.1), everywhere, num_responses=6)
    check_episodes(settings(0.1), [everywhere[0], Group(other, (raised, ended))])
    check_episodes(settings(0.1), [Group(prompt, (raised,))])


def test_failed_episodes_are_in_no_metric_of_rewards() -> None:
    groups = two_prompts()
    settings = config()
    scores = RewardSources(None, []).score(groups)
    metrics = batch_metrics(groups, scores, shaped_rewards(settings, groups, scores))
    assert metrics["reward/mean"] == pytest.approx((3.5 + 3 + 1) / 3)
    assert metrics["reward/parts/environment"] == pytest.approx((3.5 + 3 + 1) / 3)
    assert metrics["reward/failed_infrastructure"] == 1.0
