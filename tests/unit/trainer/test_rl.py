"""The loop with small honest parts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from scripted_loop import (
    CountingPrompts,
    LabelRewarder,
    Notebook,
    RememberingPolicy,
    ScriptedEngine,
    config,
    make_rollout,
    run,
)

from vlmrl.config.adapters import is_one_pass
from vlmrl.config.run import RlConfig
from vlmrl.errors import RewardError, SyncError
from vlmrl.rollout.sampling import Sampling
from vlmrl.trainer.collect import Ending, ExhaustedError, PromptBudget
from vlmrl.trainer.experience import ScoredBatch
from vlmrl.trainer.filtering import RewardRange
from vlmrl.trainer.rl import LoopState, progress
from vlmrl.types import Experience, Failure, Floats, Group, Metrics, Prompt, Sample, Score


def test_a_step_goes_through_its_phases_and_every_publish_has_the_next_version() -> None:
    policy = RememberingPolicy(ScriptedEngine())
    notebook = run(config(), policy, steps=2)
    assert notebook.phases == ["data", "rollout", "reward", "logprob", "update", "publish"] * 2
    assert [notebook.steps[step]["sync/version"] for step in (1, 2)] == [1.0, 2.0]
    assert notebook.steps[1]["reward/mean"] == 0.5
    assert notebook.steps[1]["response/tokens_mean"] == 2.0
    assert notebook.steps[1]["sync/logprob_diff_max"] == 0.0


def test_right_answers_gain_what_wrong_ones_lose_on_their_sampled_tokens_alone() -> None:
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
    ],
)
def test_old_log_probs_take_a_pass_of_their_own_only_when_the_update_cannot_find_them(
    changes: dict[str, object], asks: bool
) -> None:
    policy = RememberingPolicy(ScriptedEngine())
    settings = config(**changes)
    assert is_one_pass(settings.rollout, settings.train, settings.algo) is not asks
    if not settings.algo.kl.init_coef:
        run(settings, policy, steps=1)
        assert (policy.taught[0].old_logprobs is not None) is asks


def test_a_gap_that_the_update_finds_stops_the_run_before_its_weights_go_anywhere() -> None:
    policy = RememberingPolicy(ScriptedEngine(), offset=0.1)
    policy.engine.version = 0
    with pytest.raises(SyncError, match="disagree"):
        run(config(), policy, steps=1)
    assert len(policy.taught) == 1
    assert policy.engine.version == 0


def test_an_engine_that_missed_a_publish_stops_the_run() -> None:
    class DeafPolicy(RememberingPolicy):
        def publish(self, version: int) -> Metrics:
            return {"sync/version": float(version)}

    with pytest.raises(SyncError, match=r"toy:2 comes from weights of version 0, the trainer is at version 1"):
        run(config(), DeafPolicy(ScriptedEngine()), steps=2)


def test_an_engine_with_other_weights_stops_the_run() -> None:
    with pytest.raises(SyncError, match=r"engine and trainer disagree.* by 0\.1 on average"):
        run(config(), RememberingPolicy(ScriptedEngine(), offset=0.1), steps=1)


def test_the_bound_on_the_gap_can_be_set() -> None:
    loose = config(vllm={"max_logprob_diff": 0.2})
    notebook = run(loose, RememberingPolicy(ScriptedEngine(), offset=0.1), steps=1)
    assert notebook.steps[1]["sync/logprob_diff_max"] == pytest.approx(0.1, abs=1e-6)
    # k3: e^0.1 - 1 - 0.1 = 0.0051709
    assert notebook.steps[1]["sync/kl_rollout_train"] == pytest.approx(0.0051709, abs=1e-6)


def test_the_image_check_gets_the_answers_and_transcripts_what_was_judged() -> None:
    seen: list[ScoredBatch] = []
    order: list[str] = []

    def remember(step: int, judged: ScoredBatch) -> Metrics:
        seen.append(judged)
        return {"eval/toy/pass@1": 1.0}

    def look(step: int, groups: Sequence[Group]) -> Metrics:
        assert {rollout.version for group in groups for rollout in group.rollouts} == {step - 1}
        assert not policy.taught, "blindness is found before anything is learnt"
        return {"verify/images/old_effect": 0.5}

    def ask(version: int) -> Metrics:
        assert policy.engine.version == version == 1, "the new weights are with the engines"
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


def test_answers_are_scored_while_others_are_written() -> None:
    rewarder = LabelRewarder()
    run(config(), RememberingPolicy(ScriptedEngine()), steps=2, rewarder=rewarder)
    assert rewarder.begun == [1, 0, 3, 2]


class Prophet:
    """A critic that expects the same of every token, and counts its lessons."""

    def __init__(self) -> None:
        self.taught: list[Experience] = []

    def values(self, samples: Sequence[Sample]) -> list[Floats]:
        return [np.where(s.sampled, 0.25, 0.0).astype(np.float32) for s in samples]

    def update(self, experience: Experience, *, step: int) -> Metrics:
        self.taught.append(experience)
        return {"value/loss": 0.5}


def test_a_critic_learns_beside_the_policy_and_at_first_alone() -> None:
    settings = config(algo={"advantage": {"estimator": "gae"}}, critic={"freezing_steps": 2})
    policy, critic = RememberingPolicy(ScriptedEngine()), Prophet()
    notebook = run(settings, policy, steps=3, critic=critic)
    assert (len(critic.taught), len(policy.taught)) == (3, 1)
    assert notebook.phases[:6] == ["data", "rollout", "reward", "logprob", "value", "update"]
    assert ["policy/loss" in notebook.steps[step] for step in (1, 2, 3)] == [False, False, True]
    assert all(notebook.steps[step]["value/loss"] == 0.5 for step in (1, 2, 3))
    assert all("sync/logprob_diff_max" in notebook.steps[step] for step in (1, 2, 3)), "engines are compared throughout"
    assert critic.taught[0].returns is not None


class PickyRewarder(LabelRewarder):
    """Of four prompts in a row one has answers that differ in worth; the others are all wrong, or all right."""

    def score(self, groups: Sequence[Group], *, out_of: int | None = None, failed: int = 0) -> list[list[Score]]:
        worth = {0: (0.0, 0.0), 1: (1.0, 1.0), 2: (0.0, 1.0), 3: (0.0, 0.0)}
        return [[Score(each) for each in worth[group.prompt.index % 4]] for group in groups]


FILTERING = {"dynamic_filtering_enable": True}


def test_groups_that_teach_nothing_are_replaced_by_fresh_prompts() -> None:
    policy = RememberingPolicy(ScriptedEngine())
    notebook = run(config(algo=FILTERING), policy, steps=1, rewarder=PickyRewarder())
    # Prompts 0 and 1, 2 and 3, then one by one until the second that teaches, which is prompt 6.
    assert notebook.steps[1]["filter/groups_drawn"] == 7
    assert notebook.steps[1]["filter/kept_fraction"] == pytest.approx(2 / 7)
    assert len(policy.taught[0].samples) == 4
    # Two groups are all right, three all wrong and two half right.
    assert notebook.steps[1]["reward/mean"] == pytest.approx(3 / 7)
    assert notebook.steps[1]["group/constant_fraction"] == pytest.approx(5 / 7)
    assert notebook.steps[1]["filter/reward_mean"] == 0.5
    assert notebook.steps[1]["filter/tokens_mean"] == notebook.steps[1]["response/tokens_mean"] == 2.0


def test_a_filter_that_keeps_nothing_stops_and_says_what_it_saw() -> None:
    class Hopeless(LabelRewarder):
        def score(self, groups: Sequence[Group], *, out_of: int | None = None, failed: int = 0) -> list[list[Score]]:
            return [[Score(0.0), Score(0.0)] for _ in groups]

    settings = config(algo=FILTERING | {"dynamic_filtering_max_draws": 3})
    with pytest.raises(
        RewardError, match=r"kept 0 of 6 groups in 3 draws, and a step needs 2: 6 had .*equal reward \(0 to 0\)"
    ):
        run(settings, RememberingPolicy(ScriptedEngine()), steps=1, rewarder=Hopeless())


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
    # k1 is 0.2, twice the target, and the error is clipped to 0.2: times 1 + 0.2 * 4 answers / 40.
    assert saved == pytest.approx([0.5 * 1.02, 0.5 * 1.02**2])
    assert [notebook.steps[step]["kl/coef"] for step in (1, 2)] == pytest.approx([0.5, 0.51])


def test_while_the_critic_learns_alone_the_kl_controller_waits() -> None:
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
        critic=Prophet(),
        reference=Same(),
        save=lambda step, state: saved.append(state.kl_coef),
    )
    assert saved[:2] == [0.5, 0.5]
    assert saved[2] < 0.5


@pytest.mark.parametrize(("colocated", "threads"), [(True, 1), (False, 2)])
def test_policy_and_critic_learn_in_turn_where_they_have_the_same_processes(colocated: bool, threads: int) -> None:
    class Slow(Prophet):
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


def test_the_bound_of_filtering_counts_prompts_and_not_how_often_some_were_drawn() -> None:
    # One of four prompts teaches: 2 of them after 7 draws, of which the last three draw one prompt each.
    settings = config(algo=FILTERING | {"dynamic_filtering_max_draws": 4})
    notebook = run(settings, RememberingPolicy(ScriptedEngine()), steps=1, rewarder=PickyRewarder())
    assert notebook.steps[1]["filter/groups_drawn"] == 7
    settings = config(algo=FILTERING | {"dynamic_filtering_max_draws": 3})
    with pytest.raises(RewardError, match="kept 1 of 6 groups in 3 draws"):
        run(settings, RememberingPolicy(ScriptedEngine()), steps=1, rewarder=PickyRewarder())


@pytest.mark.parametrize("kind", ["infrastructure", "response"])
def test_failures_add_up_over_the_refills_of_a_step(kind: Failure) -> None:
    told: list[tuple[int | None, int]] = []

    class Breaking(PickyRewarder):
        """Fails for one answer of each prompt that teaches nothing."""

        def score(self, groups: Sequence[Group], *, out_of: int | None = None, failed: int = 0) -> list[list[Score]]:
            told.append((out_of, failed))
            pairs = super().score(groups)
            return [[replace(one, failure=kind if one.total == other.total else None), other] for one, other in pairs]

    notebook = run(config(algo=FILTERING), RememberingPolicy(ScriptedEngine()), steps=1, rewarder=Breaking())
    # Draws of 2, 2, 1, 1 and 1 prompts with 2 answers each; of the seven prompts, 2 and 6 teach.
    lost = [0, 2, 3, 4, 5] if kind == "infrastructure" else [0] * 5
    assert told == list(zip([4, 8, 10, 12, 14], lost, strict=True)), "the bound is on what the infrastructure failed"
    assert notebook.steps[1]["reward/failed"] == 5


def test_the_groups_that_were_left_out_reach_the_transcripts() -> None:
    seen: list[ScoredBatch] = []

    def remember(step: int, judged: ScoredBatch) -> Metrics:
        seen.append(judged)
        return {}

    run(
        config(algo=FILTERING),
        RememberingPolicy(ScriptedEngine()),
        steps=1,
        rewarder=PickyRewarder(),
        after_step=remember,
    )
    assert [group.prompt.index for group in seen[0].groups] == [2, 6]
    assert [group.prompt.index for group, _, _ in seen[0].left_out] == [0, 1, 3, 4, 5]
    assert [list(rewards) for _, _, rewards in seen[0].left_out] == [[0, 0], [1, 1], [0, 0], [0, 0], [1, 1]]


class Mastering(ScriptedEngine):
    """Answers right with a chance that rises with every publish, from 0.2 to 1."""

    def __init__(self, *, num_responses: int = 8, wanted: int = 4) -> None:
        super().__init__()
        self.num_responses, self.wanted = num_responses, wanted

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, on_group: Callable[[Group], None] | None = None
    ) -> list[Group]:
        skill = min(1.0, 0.2 + 0.8 * self.version / self.wanted)
        rng = np.random.default_rng([self.version, prompts[0].index])
        return [
            Group(
                prompt,
                tuple(
                    make_rollout(prompt, "right" if rng.random() < skill else "wrong", version=self.version)
                    for _ in range(self.num_responses)
                ),
            )
            for prompt in prompts
        ]


def mastering(**changes: object) -> RlConfig:
    """16 prompts a step, 8 answers each, dynamic filtering; only the label is worth something."""
    return config(
        **{
            "rollout": {"batch_size": 16, "n_samples_per_prompt": 8, "max_new_tokens": 4},
            "train": {"batch_size": 128},
            "algo": FILTERING | {"dynamic_filtering_max_draws": 4},
        }
        | changes
    )


@pytest.mark.parametrize("reward", [{}, {"remote_url": "mine.py:reward"}])
def test_a_run_that_has_mastered_its_prompts_ends_well(reward: dict[str, object]) -> None:
    policy, saved = RememberingPolicy(Mastering()), list[int]()
    settings = mastering(reward=reward)
    notebook = run(settings, policy, steps=50, save=lambda step, state: saved.append(step))
    assert notebook.ending is not None
    assert notebook.ending.is_solved
    assert notebook.ending.step == saved[-1] == len(policy.taught) == max(notebook.steps)
    assert notebook.ending.step < 50
    assert "its prompts are solved: " in (notebook.ending.reason or "")
    assert "\n" not in (notebook.ending.reason or "")


def test_with_filtering_the_reward_that_a_run_shows_rises_with_the_policy() -> None:
    settings = mastering(
        rollout={"batch_size": 64, "n_samples_per_prompt": 8, "max_new_tokens": 4},
        train={"batch_size": 512},
        algo=FILTERING | {"dynamic_filtering_max_draws": 40},
    )
    notebook = run(settings, RememberingPolicy(Mastering(wanted=8)), steps=8)
    shown = [notebook.steps[step]["reward/mean"] for step in range(1, 9)]
    # 0.2 and a tenth more at each step.
    assert shown == pytest.approx([0.2 + 0.1 * step for step in range(8)], abs=0.08)
    assert max(notebook.steps[step]["filter/reward_mean"] for step in range(1, 9)) < 0.88, "never all right"


class Constant(LabelRewarder):
    """Every answer of a prompt is worth the same: what `worth` says of the number of the call."""

    def __init__(self, worth: Callable[[int], float], first: int) -> None:
        super().__init__()
        self.worth, self.first, self.calls = worth, first, 0

    def score(self, groups: Sequence[Group], *, out_of: int | None = None, failed: int = 0) -> list[list[Score]]:
        self.calls += 1
        if self.calls <= self.first:
            return super().score(groups)
        return [[Score(self.worth(group.prompt.index))] * len(group.rollouts) for group in groups]


@pytest.mark.parametrize(
    ("reward", "worth", "is_solved"),
    [
        # The built-in `math` pays 1 at most.
        ({}, lambda index: 1.0, True),
        ({}, lambda index: 0.0, False),
        ({}, lambda index: float(index % 2), False),
        ({}, lambda index: float(index % 3 > 0), True),
        # All wrong but well formatted is not solved.
        ({"functions": {"math": 0.9, "format": 0.1}}, lambda index: 0.1, False),
        ({"functions": {"math": 0.9, "format": 0.1}}, lambda index: 1.0, True),
        # The user's own may pay anything: the run has seen 0 and 1 in its first step.
        ({"remote_url": "mine.py:reward"}, lambda index: 1.0, True),
        ({"remote_url": "mine.py:reward"}, lambda index: 0.5, False),
        ({"remote_url": "mine.py:reward"}, lambda index: 0.0, False),
        # The draws that end the run show more than all before: half of them are below it.
        ({"remote_url": "mine.py:reward"}, lambda index: 1.0 + index % 2, False),
    ],
)
def test_exhaustion_is_a_good_end_only_where_most_prompts_are_solved(
    reward: dict[str, object], worth: Callable[[int], float], is_solved: bool
) -> None:
    settings = config(algo=FILTERING, reward=reward)
    notebook, policy = Notebook(), RememberingPolicy(ScriptedEngine())
    arguments = {"steps": 5, "rewarder": Constant(worth, first=1), "notebook": notebook}
    if is_solved:
        run(settings, policy, **arguments)  # type: ignore[arg-type]
        assert notebook.ending is not None
        assert (notebook.ending.step, notebook.ending.is_solved) == (1, True)
    else:
        with pytest.raises(ExhaustedError, match="kept 0 of 20 groups in 10 draws") as caught:
            run(settings, policy, **arguments)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    assert list(notebook.steps) == [1]


def test_what_was_seen_before_a_kill_counts_after_it() -> None:
    settings = config(algo=FILTERING, reward={"remote_url": "mine.py:reward"})
    always = Constant(lambda index: 1.0, first=0)
    with pytest.raises(ExhaustedError):
        run(settings, RememberingPolicy(ScriptedEngine()), steps=5, rewarder=always)
    seen = LoopState(0.0, RewardRange(0.0, 1.0))
    notebook = run(settings, RememberingPolicy(ScriptedEngine()), steps=5, rewarder=always, state=seen)
    assert notebook.ending is not None
    assert notebook.ending.is_solved


def test_rewards_below_zero_teach_and_a_range_is_asked_on_top() -> None:
    class Signed(LabelRewarder):
        def score(self, groups: Sequence[Group], *, out_of: int | None = None, failed: int = 0) -> list[list[Score]]:
            return [[Score(-1.0), Score(1.0)] for _ in groups]

    notebook = run(config(algo=FILTERING), RememberingPolicy(ScriptedEngine()), steps=1, rewarder=Signed())
    assert notebook.steps[1]["filter/kept_fraction"] == 1.0, "half right, of mean 0"
    settings = config(algo=FILTERING | {"dynamic_filtering_range": [0.0, 1.0]})
    with pytest.raises(ExhaustedError, match=r"20 a mean reward outside algo.dynamic_filtering_range 0 1"):
        run(settings, RememberingPolicy(ScriptedEngine()), steps=1, rewarder=Signed())


def test_groups_of_which_nothing_was_scored_are_not_trained_on_and_not_solved() -> None:
    class Down(LabelRewarder):
        def score(self, groups: Sequence[Group], *, out_of: int | None = None, failed: int = 0) -> list[list[Score]]:
            return [[Score(1.0), Score(0.0, failure="infrastructure")] for _ in groups]

    with pytest.raises(ExhaustedError, match="20 fewer than two scored responses"):
        run(config(algo=FILTERING), RememberingPolicy(ScriptedEngine()), steps=1, rewarder=Down())


def test_with_filtering_an_episode_is_a_pass_over_the_prompts_and_the_schedule_follows_it() -> None:
    # One prompt of four teaches, so that a step of two takes seven or eight.
    policy = RememberingPolicy(ScriptedEngine())
    notebook = run(config(algo=FILTERING), policy, steps=100, rewarder=PickyRewarder(), num_prompts=24)
    # Prompts 0 to 6, 7 to 14 and 15 to 22; one is left.
    assert [notebook.steps[step]["filter/groups_drawn"] for step in (1, 2, 3)] == [7, 8, 8]
    assert notebook.ending == Ending(3, notebook.ending and notebook.ending.reason, is_solved=False, left_out=1)
    assert "the 24 prompts of its episodes are drawn; the last 1 do not fill a batch of 2" in str(notebook.ending)
    spans = [experience.span for experience in policy.taught]
    assert spans == [(0.0, 7 / 24), (7 / 24, 15 / 24), (15 / 24, 23 / 24)]


def test_a_run_that_goes_on_draws_what_is_left() -> None:
    policy = RememberingPolicy(ScriptedEngine())
    budget = PromptBudget(24, drawn=15)
    notebook = run(config(algo=FILTERING), policy, steps=100, rewarder=PickyRewarder(), budget=budget)
    assert notebook.ending is not None
    assert (notebook.ending.step, notebook.ending.left_out) == (1, 2)


def test_a_run_that_goes_on_with_fewer_episodes_than_it_has_made_is_over_and_leaves_nothing_out() -> None:
    budget, policy = PromptBudget(10, drawn=16), RememberingPolicy(ScriptedEngine())
    notebook = run(config(algo=FILTERING), policy, steps=5, first_step=3, budget=budget)
    assert notebook.ending is not None
    assert (notebook.ending.step, notebook.ending.left_out) == (2, 0)
    assert (notebook.ending.reason or "").endswith("the 10 prompts of its episodes are drawn")


def test_prompts_that_do_not_fill_one_batch_are_refused() -> None:
    hopeless = Constant(lambda index: 0.0, first=0)
    with pytest.raises(
        RewardError, match=r"of the run's 8 prompts .* fewer than one batch of 2 give a learning signal"
    ):
        run(config(algo=FILTERING), RememberingPolicy(ScriptedEngine()), steps=4, rewarder=hopeless, num_prompts=8)


def test_without_filtering_the_last_prompts_that_fill_no_batch_are_counted() -> None:
    policy = RememberingPolicy(ScriptedEngine())
    notebook = run(config(), policy, steps=3, num_prompts=7)
    assert ["data/left_out" in notebook.steps[step] for step in (1, 2, 3)] == [False, False, True]
    assert notebook.steps[3]["data/left_out"] == 1
    assert policy.taught[0].span is None, "every step takes the same: the schedule counts them"
    assert "data/left_out" not in run(config(), RememberingPolicy(ScriptedEngine()), steps=3, num_prompts=6).steps[3]


def test_a_run_is_as_far_as_whatever_ends_it_first() -> None:
    short = config(train={"batch_size": 4, "max_steps": 4})
    assert progress(short, 1, PromptBudget(100, drawn=10)) == 0.25
    assert progress(short, 1, PromptBudget(100, drawn=50)) == 0.5
    assert progress(config(), 3, PromptBudget(100, drawn=10)) == 0.1


def test_a_step_of_which_nothing_was_scored_teaches_nothing_and_ends_nothing() -> None:
    class Down(LabelRewarder):
        def score(self, groups: Sequence[Group], *, out_of: int | None = None, failed: int = 0) -> list[list[Score]]:
            return [[Score(0.0, failure="infrastructure")] * 2 for _ in groups]

    class Exact(RememberingPolicy):
        """Like ranks, it has no mean of nothing."""

        def update(self, experience: Experience, *, step: int) -> Metrics:
            self.taught.append(experience)
            assert not any(sample.sampled.any() for sample in experience.samples)
            return {"policy/loss": 0.0}

    notebook = run(config(), Exact(ScriptedEngine()), steps=1, rewarder=Down())
    assert notebook.steps[1]["reward/failed_infrastructure"] == notebook.steps[1]["reward/failed"] == 4
    assert "reward/mean" not in notebook.steps[1]


def test_prompts_that_are_all_solved_from_the_start_are_a_good_end_too() -> None:
    always = Constant(lambda index: 1.0, first=0)
    policy = RememberingPolicy(ScriptedEngine())
    notebook = run(config(algo=FILTERING), policy, steps=4, rewarder=always, num_prompts=8)
    assert notebook.ending is not None
    assert (notebook.ending.step, notebook.ending.is_solved, notebook.ending.left_out) == (0, True, 8)
    assert not policy.taught


def test_a_filtering_run_that_goes_on_after_a_kill_makes_the_steps_of_an_unbroken_one() -> None:
    settings = config(algo=FILTERING, train={"batch_size": 2})
    states: dict[int, tuple[LoopState, int]] = {}
    budget = PromptBudget(40)
    whole = RememberingPolicy(ScriptedEngine())

    def save(step: int, state: LoopState) -> None:
        states[step] = (state, budget.drawn)

    unbroken = run(settings, whole, steps=100, rewarder=PickyRewarder(), budget=budget, save=save)
    assert unbroken.ending is not None
    assert unbroken.ending.step == 5
    state, drawn = states[2]
    assert state.reward_range == RewardRange(0.0, 1.0), "the lowest and the highest reward of the steps before"
    again = RememberingPolicy(ScriptedEngine())
    again.engine.version = 2
    resumed = run(
        settings,
        again,
        steps=100,
        rewarder=PickyRewarder(),
        first_step=3,
        prompts=CountingPrompts(drawn),
        budget=PromptBudget(40, drawn=drawn),
        state=state,
    )
    assert resumed.ending == unbroken.ending
    assert resumed.steps == {step: unbroken.steps[step] for step in (3, 4, 5)}
    assert [e.span for e in again.taught] == [e.span for e in whole.taught[2:]]
