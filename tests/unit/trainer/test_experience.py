"""Making experience from responses and scores."""

from __future__ import annotations

import numpy as np
import pytest
from scripted_loop import config, make_prompt, make_rollout

from vlmrl.cluster.models import loss_totals
from vlmrl.data.responses import to_samples
from vlmrl.errors import SyncError
from vlmrl.trainer.experience import ModelOutputs, batch_metrics, make_experience, shaped_rewards
from vlmrl.types import Group, Score, Totals


def test_kl_in_the_reward_penalizes_tokens() -> None:
    settings = config(algo={"kl": {"init_coef": 0.5, "estimator": "k1"}, "advantage": {"estimator": "dr_grpo"}})
    prompt = make_prompt(0)
    groups = [
        Group(prompt, (make_rollout(prompt, "wrong", version=0), make_rollout(prompt, "right", version=0, length=2)))
    ]
    samples = to_samples(groups)
    old = [segment.logprobs for segment in groups[0].segments]
    ref = [np.where(s.sampled, row - 0.2, 0).astype(np.float32) for s, row in zip(samples, old, strict=True)]
    batch, metrics = make_experience(
        settings, groups, [[Score(0.0), Score(1.0)]], ModelOutputs(samples, old, ref), kl_coef=0.5
    )
    # k1 is 0.2 on each sampled token, so 0.1 is charged to it and to those before it.
    np.testing.assert_allclose(batch.experience.advantages[0], [0, 0, -0.6], atol=1e-6)
    np.testing.assert_allclose(batch.experience.advantages[1], [0, 0, 0.3, 0.4], atol=1e-6)
    assert metrics["kl/reference"] == pytest.approx(0.2, abs=1e-6)
    assert batch.experience.ref_logprobs is None


def teacher_groups() -> list[Group]:
    """Two groups: a wrong and a right response of three tokens, and two right ones."""
    prompts = make_prompt(0), make_prompt(1)
    return [
        Group(
            prompt,
            (make_rollout(prompt, texts[0], version=0), make_rollout(prompt, texts[1], version=0, length=3)),
        )
        for prompt, texts in zip(prompts, (("wrong", "right"), ("right", "right")), strict=True)
    ]


SCORES = [[Score(0.0), Score(1.0)], [Score(1.0), Score(1.0)]]


@pytest.mark.parametrize("max_gap", [None, 0.25])
@pytest.mark.parametrize("estimator", ["dr_grpo", "reinforce"])
def test_a_teacher_grades_each_token_beside_the_normalised_rewards(estimator: str, max_gap: float | None) -> None:
    settings = config(
        algo={
            "distill": {"teacher_model_name_or_path": "t", "coef": 2.0, "max_gap": max_gap},
            "advantage": {"estimator": estimator},
        },
        reward={"functions": {"exact": 1.0}},
    )
    groups = teacher_groups()
    samples = to_samples(groups)
    old = [segment.logprobs for group in groups for segment in group.segments]
    gaps = [[0.5], [0.25, 0.0, -1.0], [-0.5], [0.0, 0.125, 0.0]]
    teacher = [
        np.concatenate([[7.0, 7.0], row[2:] + gap]).astype(np.float32) for row, gap in zip(old, gaps, strict=True)
    ]
    batch, metrics = make_experience(settings, groups, SCORES, ModelOutputs(samples, old, teacher=teacher), kl_coef=0.0)
    # Rewards 0 1 | 1 1. dr_grpo: minus the mean of the group. reinforce: over the eight tokens, one has return 0 and
    # seven have 1: mean 7/8, deviation sqrt(7)/8, so -sqrt(7) and 1/sqrt(7).
    rewards = {"dr_grpo": (-0.5, 0.5, 0.0, 0.0), "reinforce": (-(7**0.5), 7**-0.5, 7**-0.5, 7**-0.5)}[estimator]
    entering = gaps if max_gap is None else [[0.25], [0.25, 0.0, -0.25], [-0.25], [0.0, 0.125, 0.0]]
    for row, reward, gap in zip(batch.experience.advantages, rewards, entering, strict=True):
        np.testing.assert_allclose(row, [0, 0, *(reward + 2 * value for value in gap)], atol=1e-6)
    assert metrics["distill/kl"] == pytest.approx(-(0.5 + 0.25 - 1.0 - 0.5 + 0.125) / 8), "of the whole gaps"
    size = (0.5 + 0.25 + 1.0 + 0.5 + 0.125) if max_gap is None else (4 * 0.25 + 0.125)
    assert metrics["distill/advantage_size"] == pytest.approx(2 * size / 8)


@pytest.mark.parametrize("estimator", ["gae", "reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo"])
def test_a_teacher_that_is_the_policy_changes_no_advantage(estimator: str) -> None:
    groups = teacher_groups()
    samples = to_samples(groups)
    old = [segment.logprobs for group in groups for segment in group.segments]
    values = [np.where(s.sampled, 0.3, 0).astype(np.float32) for s in samples] if estimator == "gae" else None
    rows = {}
    for name in ("t", None):
        algo = {"distill": {"teacher_model_name_or_path": name}, "advantage": {"estimator": estimator}}
        settings = config(algo=algo, reward={"functions": {"exact": 1.0}})
        outputs = ModelOutputs(samples, old, values=values, teacher=None if name is None else [r.copy() for r in old])
        batch, metrics = make_experience(settings, groups, SCORES, outputs, kl_coef=0.0)
        rows[name] = np.concatenate(batch.experience.advantages)
        assert ("distill/kl" in metrics) == (name is not None)
    np.testing.assert_allclose(rows["t"], rows[None], atol=1e-6)
    assert np.abs(rows[None]).max() > 0.1


def test_a_teacher_alone_is_the_whole_advantage() -> None:
    settings = config(algo={"distill": {"teacher_model_name_or_path": "t"}})
    groups = teacher_groups()
    samples = to_samples(groups)
    old = [segment.logprobs for group in groups for segment in group.segments]
    teacher = [row + np.float32(0.25) for row in old]
    outputs = ModelOutputs(samples, old, teacher=teacher)
    batch, _ = make_experience(settings, groups, [[Score(0.0)] * 2] * 2, outputs, kl_coef=0.0)
    assert batch.teacher_gaps is not None
    for sample, row, gap in zip(samples, batch.experience.advantages, batch.teacher_gaps, strict=True):
        np.testing.assert_allclose(row, np.where(sample.sampled, 0.25, 0), atol=1e-6)
        np.testing.assert_allclose(gap, row, atol=1e-6)


def test_kl_in_the_loss_passes_the_reference_on_and_keeps_advantages() -> None:
    settings = config(
        algo={"kl": {"init_coef": 0.5, "estimator": "k3", "use_loss": True}, "advantage": {"estimator": "rloo"}}
    )
    prompt = make_prompt(0)
    groups = [Group(prompt, (make_rollout(prompt, "wrong", version=0), make_rollout(prompt, "right", version=0)))]
    samples = to_samples(groups)
    old = [segment.logprobs for segment in groups[0].segments]
    batch, _ = make_experience(
        settings, groups, [[Score(0.0), Score(1.0)]], ModelOutputs(samples, old, old), kl_coef=0.5
    )
    np.testing.assert_allclose(batch.experience.advantages[1], [0, 0, 1.0])
    assert batch.experience.ref_logprobs is old
    assert batch.experience.kl_coef == 0.5


def test_a_constant_group_is_counted_and_has_no_advantages() -> None:
    prompt = make_prompt(0)
    pair = (make_rollout(prompt, "a", version=0), make_rollout(prompt, "b", version=0))
    groups = [Group(prompt, pair), Group(prompt, pair)]
    samples = to_samples(groups)
    old = [r.logprobs for g in groups for r in g.segments]
    scores = [[Score(1.0), Score(1.0)], [Score(0.0), Score(1.0)]]
    batch, _ = make_experience(config(), groups, scores, ModelOutputs(samples, old), kl_coef=0.0)
    assert batch_metrics(groups, scores, shaped_rewards(config(), groups, scores))["group/constant_fraction"] == 0.5
    assert not any(row.any() for row in batch.experience.advantages[:2])
    assert [s.group for s in samples] == [0, 0, 1, 1]


def test_token_rewards_and_values_reach_the_estimator() -> None:
    settings = config(algo={"advantage": {"estimator": "gae", "no_std_norm": True}})
    prompt = make_prompt(0)
    groups = [Group(prompt, (make_rollout(prompt, "a", version=0, length=2), make_rollout(prompt, "b", version=0)))]
    samples = to_samples(groups)
    old = [segment.logprobs for segment in groups[0].segments]
    values = [np.array([0, 0, 0.5, 0.25], np.float32), np.array([0, 0, 0.5], np.float32)]
    paid = np.array([0, 0, 0.5, 0], np.float32)
    scores = [[Score(1.0, token_rewards=paid), Score(0.0)]]
    batch, metrics = make_experience(settings, groups, scores, ModelOutputs(samples, old, values=values), kl_coef=0.0)
    assert batch.experience.returns is not None
    # The first answer is paid 0.5 and then 1, the second nothing; with gamma and lambda 1 returns are sums.
    assert [row.tolist() for row in batch.experience.returns] == [[0, 0, 1.5, 1.0], [0, 0, 0.0]]
    # Return minus value: 1, 0.75 and -0.5; minus their mean of 0.41667.
    np.testing.assert_allclose(batch.experience.advantages[0], [0, 0, 0.58333, 0.33333], atol=1e-5)
    np.testing.assert_allclose(batch.experience.advantages[1], [0, 0, -0.91667], atol=1e-5)
    assert metrics["value/mean"] == pytest.approx(1.25 / 3)


def test_a_group_with_different_token_rewards_is_not_constant() -> None:
    prompt = make_prompt(0)
    group = Group(prompt, (make_rollout(prompt, "a", version=0), make_rollout(prompt, "b", version=0)))
    samples = to_samples([group])
    steps = [
        np.where(np.arange(len(s.tokens)) == len(s.tokens) - 1, 0.25 * (n + 1), 0.0) for n, s in enumerate(samples)
    ]
    scores = [[Score(0.0, token_rewards=row.astype(np.float32)) for row in steps]]
    assert batch_metrics([group], scores, shaped_rewards(config(), [group], scores))["group/constant_fraction"] == 0.0


def test_token_rewards_count_in_reward_metrics() -> None:
    prompt = make_prompt(0)
    group = Group(prompt, (make_rollout(prompt, "a", version=0), make_rollout(prompt, "b", version=0)))
    samples = to_samples([group])
    steps = [np.where(np.arange(len(s.tokens)) == len(s.tokens) - 1, 0.5 * n, 0.0) for n, s in enumerate(samples)]
    scores = [
        [
            Score(1.0, {"mine": 1.0, "process": 0.0}, token_rewards=steps[0].astype(np.float32)),
            Score(0.0, {"process": 0.5}, token_rewards=steps[1].astype(np.float32)),
        ]
    ]
    metrics = batch_metrics([group], scores, shaped_rewards(config(), [group], scores))
    assert metrics["reward/mean"] == metrics["reward/shaped_mean"] == 0.75
    assert metrics["reward/std"] == 0.25
    # A source without a score for a response did not score it 0.
    assert (metrics["reward/parts/mine"], metrics["reward/parts/process"]) == (1.0, 0.25)


def test_a_response_without_a_reward_is_in_no_baseline_and_in_no_loss() -> None:
    prompt = make_prompt(0)
    rollouts = [make_rollout(prompt, text, version=0, length=length) for text, length in (("a", 1), ("b", 2), ("c", 3))]
    group = Group(prompt, tuple(rollouts))
    samples = to_samples([group])
    old = [segment.logprobs for segment in group.segments]
    scores = [[Score(1.0), Score(0.0), Score(-5.0, {"mine": 0.5}, failure="infrastructure")]]
    settings = config(algo={"advantage": {"estimator": "dr_grpo"}})
    batch, metrics = make_experience(settings, [group], scores, ModelOutputs(samples, old), kl_coef=0.0)
    assert [row.tolist() for row in batch.experience.advantages] == [[0, 0, 0.5], [0, 0, -0.5, -0.5], [0] * 5]
    assert [int(sample.sampled.sum()) for sample in batch.experience.samples] == [1, 2, 0]
    assert [sample.prompt_length for sample in batch.experience.samples] == [2, 2, 2], "the prompt is still shared"
    assert loss_totals(batch.experience.samples) == Totals(num_tokens=3, num_responses=2)
    assert batch.rewards[0][:2].tolist() == [1.0, 0.0]
    assert np.isnan(batch.rewards[0][2])
    assert metrics["sync/logprob_diff_max"] == 0.0
    shown = batch_metrics([group], scores, shaped_rewards(settings, [group], scores))
    assert (shown["reward/mean"], shown["reward/std"], shown["reward/shaped_mean"]) == (0.5, 0.5, 0.5)
    assert shown["reward/failed_infrastructure"] == 1.0
    assert shown["response/tokens_mean"] == 2.0, "it was written all the same"


def test_engine_and_trainer_are_compared_on_unscored_responses_too() -> None:
    prompt = make_prompt(0)
    group = Group(prompt, (make_rollout(prompt, "a", version=0), make_rollout(prompt, "b", version=0)))
    old = [group.segments[0].logprobs, group.segments[1].logprobs - np.float32(0.5)]
    scores = [[Score(1.0), Score(0.0, failure="infrastructure")]]
    with pytest.raises(SyncError, match="engine and trainer disagree"):
        make_experience(config(), [group], scores, ModelOutputs(to_samples([group]), old), kl_coef=0.0)


def test_a_failure_of_the_response_itself_has_a_reward() -> None:
    prompt = make_prompt(0)
    group = Group(prompt, (make_rollout(prompt, "a", version=0), make_rollout(prompt, "b", version=0)))
    old = [segment.logprobs for segment in group.segments]
    settings = config(algo={"advantage": {"estimator": "dr_grpo"}})
    scores = [[Score(1.0), Score(0.0, failure="response")]]
    batch, _ = make_experience(settings, [group], scores, ModelOutputs(to_samples([group]), old), kl_coef=0.0)
    assert [row.tolist() for row in batch.experience.advantages] == [[0, 0, 0.5], [0, 0, -0.5]]


def test_a_batch_without_scores_has_no_reward_metrics() -> None:
    prompt = make_prompt(0)
    group = Group(prompt, (make_rollout(prompt, "a", version=0), make_rollout(prompt, "b", version=0)))
    scores = [[Score(0.0, failure="infrastructure")] * 2]
    shown = batch_metrics([group], scores, shaped_rewards(config(), [group], scores))
    assert "reward/mean" not in shown
    assert shown["group/constant_fraction"] == 1.0
    old = [segment.logprobs for segment in group.segments]
    batch, _ = make_experience(config(), [group], scores, ModelOutputs(to_samples([group]), old), kl_coef=0.0)
    assert loss_totals(batch.experience.samples) == Totals(num_tokens=1, num_responses=1), "nothing is divided by 0"
