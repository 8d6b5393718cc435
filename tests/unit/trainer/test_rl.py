"""The training loop with small fakes for its parts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from scripted_loop import (
    LabelRewarder,
    Notebook,
    RememberingPolicy,
    ScriptedEngine,
    ScriptedSync,
    config,
    run,
)

from vlmrl.data.experience import Experience
from vlmrl.errors import EngineLossError, SyncError
from vlmrl.trainer.collect import PromptBudget
from vlmrl.trainer.experience import ScoredBatch
from vlmrl.trainer.rl import progress
from vlmrl.types import Floats, Group, Metrics, Sample, Score


class NoRewarder(LabelRewarder):
    """Scores nothing, as a run without any reward source."""

    def score(self, groups: Sequence[Group], *, out_of: int | None = None, failed: int = 0) -> list[list[Score]]:
        return [[Score(0.0) for _ in group.rollouts] for group in groups]


def test_a_step_runs_its_phases_and_each_sync_has_the_next_version() -> None:
    policy = RememberingPolicy(ScriptedEngine())
    notebook = run(config(), policy, steps=2)
    assert notebook.phases == ["data", "rollout", "reward", "logprob", "update", "sync"] * 2
    assert [notebook.steps[step]["sync/version"] for step in (1, 2)] == [1.0, 2.0]
    assert notebook.steps[1]["reward/mean"] == 0.5
    assert notebook.steps[1]["response/tokens_mean"] == 2.0
    assert notebook.steps[1]["sync/logprob_diff_max"] == 0.0


def test_advantages_are_group_relative_and_on_sampled_tokens_only() -> None:
    policy = RememberingPolicy(ScriptedEngine())
    run(config(), policy, steps=1)
    wrong, right = policy.taught[0].advantages[:2]
    # Rewards 0 and 1: mean 0.5, unbiased deviation 0.7071, so -+0.5 / (0.7071 + 1e-6) = -+0.7071.
    np.testing.assert_allclose(wrong, [0, 0, -0.70711], atol=1e-5)
    np.testing.assert_allclose(right, [0, 0, 0.70711, 0.70711, 0.70711], atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "asks"),
    [
        ({}, False),
        ({"train": {"batch_size": 2}}, True),
        ({"train": {"batch_size": 4, "max_epochs": 2}}, True),
        ({"algo": {"kl": {"init_coef": 0.1}}}, True),
        ({"algo": {"distill": {"teacher_model_name_or_path": "t"}}}, True),
    ],
)
def test_old_logprobs_take_a_separate_pass_only_when_the_update_cannot_compute_them(
    changes: dict[str, object], asks: bool
) -> None:
    policy = RememberingPolicy(ScriptedEngine())
    settings = config(**changes)
    assert settings.needs_one_pass is not asks
    if not settings.algo.kl.init_coef:
        run(settings, policy, steps=1)
        assert (policy.taught[0].old_logprobs is not None) is asks


def test_a_teacher_alone_grades_the_responses_and_nothing_is_reported_of_rewards() -> None:
    policy = RememberingPolicy(ScriptedEngine())
    teacher = RememberingPolicy(policy.engine, offset=0.5)
    settings = config(algo={"distill": {"teacher_model_name_or_path": "t", "coef": 3.0}})
    notebook = run(settings, policy, steps=1, rewarder=NoRewarder(), teacher=teacher)
    assert notebook.phases == ["data", "rollout", "reward", "logprob", "teacher", "update", "sync"]
    for sample, row in zip(policy.taught[0].samples, policy.taught[0].advantages, strict=True):
        np.testing.assert_allclose(row, np.where(sample.sampled, 1.5, 0), atol=1e-6)
    assert notebook.steps[1]["distill/kl"] == pytest.approx(-0.5)
    assert not [name for name in notebook.steps[1] if name.startswith(("reward/m", "group/"))]


def test_a_gap_found_in_the_update_stops_the_run_before_the_weight_sync() -> None:
    policy = RememberingPolicy(ScriptedEngine(), offset=0.1)
    policy.engine.version = 0
    with pytest.raises(SyncError, match="disagree"):
        run(config(), policy, steps=1)
    assert len(policy.taught) == 1
    assert policy.engine.version == 0


def test_a_step_whose_engines_are_lost_at_its_weight_sync_is_finished_before_the_run_ends() -> None:
    class Dead(ScriptedSync):
        def sync(self, version: int) -> Metrics:
            if version == 2:
                raise EngineLossError("vllm died once too often")
            return super().sync(version)

    engine, order = ScriptedEngine(), list[str]()

    def after_step(step: int, batch: ScoredBatch) -> Metrics:
        order.append(f"transcripts {step}")
        return {}

    notebook = Notebook()
    with pytest.raises(EngineLossError, match="once too often"):
        run(
            config(),
            RememberingPolicy(engine),
            steps=3,
            notebook=notebook,
            weight_sync=Dead(engine),
            after_step=after_step,
            save=lambda step, state: order.append(f"saved {step}"),
        )
    assert order == ["transcripts 1", "saved 1", "transcripts 2", "saved 2"]
    assert list(notebook.steps) == [1, 2]


def test_a_step_whose_engine_hangs_while_it_scores_is_finished_before_the_run_ends() -> None:
    saved: list[int] = []

    def check(step: int, groups: Sequence[Group]) -> Callable[[], Metrics]:
        def finish() -> Metrics:
            raise EngineLossError("vllm did not respond")

        return finish

    with pytest.raises(EngineLossError, match="did not respond"):
        run(
            config(),
            RememberingPolicy(ScriptedEngine()),
            steps=3,
            check_responses=check,
            save=lambda step, state: saved.append(step),
        )
    assert saved == [1], "the policy was trained"


def test_an_engine_that_missed_a_sync_stops_the_run() -> None:
    class LostSync(ScriptedSync):
        def sync(self, version: int) -> Metrics:
            return {"sync/version": float(version)}

    engine = ScriptedEngine()
    with pytest.raises(SyncError, match=r"toy:2 comes from weights of version 0, the trainer is at version 1"):
        run(config(), RememberingPolicy(engine), steps=2, weight_sync=LostSync(engine))


def test_an_engine_with_other_weights_stops_the_run() -> None:
    with pytest.raises(SyncError, match=r"engine and trainer disagree.* by 0\.1 on average"):
        run(config(), RememberingPolicy(ScriptedEngine(), offset=0.1), steps=1)


def test_the_bound_on_the_gap_can_be_set() -> None:
    loose = config(vllm={"max_logprob_diff": 0.2})
    notebook = run(loose, RememberingPolicy(ScriptedEngine(), offset=0.1), steps=1)
    assert notebook.steps[1]["sync/logprob_diff_max"] == pytest.approx(0.1, abs=1e-6)
    # k3: e^0.1 - 1 - 0.1 = 0.0051709
    assert notebook.steps[1]["sync/kl_rollout_train"] == pytest.approx(0.0051709, abs=1e-6)


def test_the_hooks_get_responses_versions_and_the_scored_batch() -> None:
    seen: list[ScoredBatch] = []
    order: list[str] = []

    def remember(step: int, batch: ScoredBatch) -> Metrics:
        seen.append(batch)
        return {"eval/toy/pass@1": 1.0}

    def look(step: int, groups: Sequence[Group]) -> Callable[[], Metrics]:
        assert {v for group in groups for rollout in group.rollouts for v in rollout.versions} == {step - 1}
        assert not policy.taught, "the images are checked before the update"

        def finish() -> Metrics:
            assert policy.taught, "the engine's scores are compared after the update"
            assert policy.engine.version == 0, "while it holds the weights of before"
            return {"verify/images/old_effect": 0.5}

        return finish

    def ask(version: int) -> Metrics:
        assert policy.engine.version == version == 1, "the engines hold the new weights"
        return {"verify/adapters/gap": 0.25}

    policy = RememberingPolicy(ScriptedEngine())
    notebook = run(
        config(),
        policy,
        steps=1,
        check_responses=look,
        check_sync=ask,
        after_step=remember,
        save=lambda step, state: order.append(f"saved {step}"),
    )
    assert [list(row) for row in seen[0].rewards] == [[0.0, 1.0], [0.0, 1.0]]
    assert notebook.steps[1]["eval/toy/pass@1"] == 1.0
    assert notebook.steps[1]["verify/images/old_effect"] == 0.5
    assert notebook.steps[1]["verify/adapters/gap"] == 0.25
    assert order == ["saved 1"]


def test_responses_are_scored_while_others_are_sampled() -> None:
    rewarder = LabelRewarder()
    run(config(), RememberingPolicy(ScriptedEngine()), steps=2, rewarder=rewarder)
    assert rewarder.begun == [1, 0, 3, 2]


class ConstantCritic:
    """A critic with the same value for every token, which counts its updates."""

    def __init__(self) -> None:
        self.taught: list[Experience] = []

    def values(self, samples: Sequence[Sample]) -> list[Floats]:
        return [np.where(s.sampled, 0.25, 0.0).astype(np.float32) for s in samples]

    def update(self, experience: Experience, *, step: int) -> Metrics:
        self.taught.append(experience)
        return {"value/loss": 0.5}


def test_the_critic_trains_alone_during_its_freezing_steps() -> None:
    settings = config(algo={"advantage": {"estimator": "gae"}}, critic={"freezing_steps": 2})
    policy, critic = RememberingPolicy(ScriptedEngine()), ConstantCritic()
    notebook = run(settings, policy, steps=3, critic=critic)
    assert (len(critic.taught), len(policy.taught)) == (3, 1)
    assert notebook.phases[:6] == ["data", "rollout", "reward", "logprob", "value", "update"]
    assert ["policy/loss" in notebook.steps[step] for step in (1, 2, 3)] == [False, False, True]
    assert all(notebook.steps[step]["value/loss"] == 0.5 for step in (1, 2, 3))
    assert all("sync/logprob_diff_max" in notebook.steps[step] for step in (1, 2, 3)), "engines are compared throughout"
    assert critic.taught[0].returns is not None


def test_the_kl_controller_follows_its_target_and_is_saved_for_the_next_step() -> None:
    class Near:
        def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
            return [np.where(s.sampled, -0.7, 0.0).astype(np.float32) for s in samples]

    settings = config(algo={"kl": {"init_coef": 0.5, "target": 0.1, "horizon": 40}})
    saved: list[float] = []
    notebook = run(
        settings,
        RememberingPolicy(ScriptedEngine()),
        steps=2,
        reference=Near(),
        save=lambda step, state: saved.append(state.kl_coef),
    )
    # k1 is 0.2, twice the target, and the error is clipped to 0.2: times 1 + 0.2 * 4 responses / 40.
    assert saved == pytest.approx([0.5 * 1.02, 0.5 * 1.02**2])
    assert [notebook.steps[step]["kl/coef"] for step in (1, 2)] == pytest.approx([0.5, 0.51])


def test_the_kl_controller_does_not_change_while_the_policy_is_frozen() -> None:
    class Same:
        def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
            return [np.where(s.sampled, -0.5, 0.0).astype(np.float32) for s in samples]

    settings = config(
        algo={"advantage": {"estimator": "gae"}, "kl": {"init_coef": 0.5, "target": 0.1, "horizon": 40}},
        critic={"freezing_steps": 2},
    )
    saved: list[float] = []
    run(
        settings,
        RememberingPolicy(ScriptedEngine()),
        steps=3,
        critic=ConstantCritic(),
        reference=Same(),
        save=lambda step, state: saved.append(state.kl_coef),
    )
    assert saved[:2] == [0.5, 0.5]
    assert saved[2] < 0.5


@pytest.mark.parametrize(("colocated", "threads"), [(True, 1), (False, 2)])
def test_policy_and_critic_are_updated_in_turn_if_they_share_processes(colocated: bool, threads: int) -> None:
    class Slow(ConstantCritic):
        def update(self, experience: Experience, *, step: int) -> Metrics:
            where.append(threading.current_thread())
            time.sleep(0.05)
            return super().update(experience, step=step)

    class SlowPolicy(RememberingPolicy):
        def update(self, experience: Experience, *, step: int) -> Metrics:
            where.append(threading.current_thread())
            return super().update(experience, step=step)

    where: list[threading.Thread] = []
    settings = config(
        algo={"advantage": {"estimator": "gae"}}, train={"batch_size": 4, "colocate_actor_critic": colocated}
    )
    run(settings, SlowPolicy(ScriptedEngine()), steps=1, critic=Slow())
    assert len(set(where)) == threads


def test_last_prompts_that_do_not_fill_a_batch_are_counted() -> None:
    policy = RememberingPolicy(ScriptedEngine())
    notebook = run(config(), policy, steps=3, num_prompts=7)
    assert ["data/left_out" in notebook.steps[step] for step in (1, 2, 3)] == [False, False, True]
    assert notebook.steps[3]["data/left_out"] == 1
    assert policy.taught[0].span is None, "every step takes the same: the schedule counts them"
    assert "data/left_out" not in run(config(), RememberingPolicy(ScriptedEngine()), steps=3, num_prompts=6).steps[3]


def test_progress_is_counted_by_what_ends_the_run_first() -> None:
    short = config(train={"batch_size": 4, "max_steps": 4})
    assert progress(short, 1, PromptBudget(100, drawn=10)) == 0.25
    assert progress(short, 1, PromptBudget(100, drawn=50)) == 0.5
    assert progress(config(), 3, PromptBudget(100, drawn=10)) == 0.1


def test_a_step_without_any_reward_trains_nothing_and_does_not_end_the_run() -> None:
    class Down(LabelRewarder):
        def score(self, groups: Sequence[Group], *, out_of: int | None = None, failed: int = 0) -> list[list[Score]]:
            return [[Score(0.0, failure="infrastructure")] * 2 for _ in groups]

    class Exact(RememberingPolicy):
        """Like ranks, it has no mean over no samples."""

        def update(self, experience: Experience, *, step: int) -> Metrics:
            self.taught.append(experience)
            assert not any(sample.sampled.any() for sample in experience.samples)
            return {"policy/loss": 0.0}

    notebook = run(config(), Exact(ScriptedEngine()), steps=1, rewarder=Down())
    assert notebook.steps[1]["reward/failed_infrastructure"] == notebook.steps[1]["reward/failed"] == 4
    assert "reward/mean" not in notebook.steps[1]
