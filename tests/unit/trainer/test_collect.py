"""Collecting the groups of a step: dynamic filtering, and the ends of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from scripted_episodes import failed_rollout
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

from vlmrl.config.agent import Agent
from vlmrl.config.verbs import RlConfig
from vlmrl.errors import RewardError
from vlmrl.trainer.collect import Ending, ExhaustedError, PromptBudget
from vlmrl.trainer.experience import ScoredBatch
from vlmrl.trainer.filtering import RewardRange
from vlmrl.trainer.rl import LoopState
from vlmrl.types import Failure, Group, Metrics, Prompt, Sampling, Score


class PickyRewarder(LabelRewarder):
    """One of four prompts in a row has responses of different rewards; the others are all wrong, or all right."""

    def score(self, groups: Sequence[Group], *, out_of: int | None = None, failed: int = 0) -> list[list[Score]]:
        worth = {0: (0.0, 0.0), 1: (1.0, 1.0), 2: (0.0, 1.0), 3: (0.0, 0.0)}
        return [[Score(each) for each in worth[group.prompt.index % 4]] for group in groups]


FILTERING = {"dynamic_filtering_enable": True}


def test_constant_groups_are_replaced_by_fresh_prompts() -> None:
    policy = RememberingPolicy(ScriptedEngine())
    notebook = run(config(algo=FILTERING), policy, steps=1, rewarder=PickyRewarder())
    # Prompts 0 and 1, 2 and 3, then one by one until the second with a learning signal, which is prompt 6.
    assert notebook.steps[1]["filter/groups_drawn"] == 7
    assert notebook.steps[1]["filter/kept_fraction"] == pytest.approx(2 / 7)
    assert len(policy.taught[0].samples) == 4
    # Two groups are all right, three all wrong and two half right.
    assert notebook.steps[1]["reward/mean"] == pytest.approx(3 / 7)
    assert notebook.steps[1]["group/constant_fraction"] == pytest.approx(5 / 7)
    assert notebook.steps[1]["filter/reward_mean"] == 0.5
    assert notebook.steps[1]["filter/tokens_mean"] == notebook.steps[1]["response/tokens_mean"] == 2.0


def test_a_filter_that_keeps_nothing_stops_the_run_with_its_counts() -> None:
    class Hopeless(LabelRewarder):
        def score(self, groups: Sequence[Group], *, out_of: int | None = None, failed: int = 0) -> list[list[Score]]:
            return [[Score(0.0), Score(0.0)] for _ in groups]

    settings = config(algo=FILTERING | {"dynamic_filtering_max_draws": 3})
    with pytest.raises(
        RewardError, match=r"kept 0 of 6 groups in 3 draws, and a step needs 2: 6 had .*equal reward \(0 to 0\)"
    ):
        run(settings, RememberingPolicy(ScriptedEngine()), steps=1, rewarder=Hopeless())


def test_the_limit_of_filtering_counts_prompts_not_draws() -> None:
    # One of four prompts has a learning signal: 2 of them after 7 draws, of which the last three draw one prompt each.
    settings = config(algo=FILTERING | {"dynamic_filtering_max_draws": 4})
    notebook = run(settings, RememberingPolicy(ScriptedEngine()), steps=1, rewarder=PickyRewarder())
    assert notebook.steps[1]["filter/groups_drawn"] == 7
    settings = config(algo=FILTERING | {"dynamic_filtering_max_draws": 3})
    with pytest.raises(RewardError, match="kept 1 of 6 groups in 3 draws"):
        run(settings, RememberingPolicy(ScriptedEngine()), steps=1, rewarder=PickyRewarder())


@pytest.mark.parametrize("kind", ["infrastructure", "response"])
def test_failures_add_up_over_the_draws_of_a_step(kind: Failure) -> None:
    reported: list[tuple[int | None, int]] = []

    class Breaking(PickyRewarder):
        """Fails for one response of each constant group."""

        def score(self, groups: Sequence[Group], *, out_of: int | None = None, failed: int = 0) -> list[list[Score]]:
            reported.append((out_of, failed))
            pairs = super().score(groups)
            return [[replace(one, failure=kind if one.total == other.total else None), other] for one, other in pairs]

    notebook = run(config(algo=FILTERING), RememberingPolicy(ScriptedEngine()), steps=1, rewarder=Breaking())
    # Draws of 2, 2, 1, 1 and 1 prompts with 2 responses each; of the seven prompts, 2 and 6 have a learning signal.
    lost = [0, 2, 3, 4, 5] if kind == "infrastructure" else [0] * 5
    assert reported == list(zip([4, 8, 10, 12, 14], lost, strict=True)), (
        "the bound is on what the infrastructure failed"
    )
    assert notebook.steps[1]["reward/failed"] == 5


def test_failed_episodes_do_not_count_towards_the_bound_on_failures_of_rewards() -> None:
    reported: list[int] = []

    class LosesEpisodes(ScriptedEngine):
        """The third episode of each prompt fails."""

        def generate(
            self, prompts: Sequence[Prompt], sampling: Sampling, on_group: Callable[[Group], None] | None = None
        ) -> list[Group]:
            groups = super().generate(prompts, sampling)
            return [replace(group, rollouts=(*group.rollouts, failed_rollout(group.prompt))) for group in groups]

    class Picky(PickyRewarder):
        def score(self, groups: Sequence[Group], *, out_of: int | None = None, failed: int = 0) -> list[list[Score]]:
            reported.append(failed)
            scores = super().score([replace(group, rollouts=group.rollouts[:2]) for group in groups])
            return [[*pair, Score(0.0, failure="infrastructure")] for pair in scores]

    settings = config(
        algo=FILTERING,
        train={"batch_size": 6, "agent_func_path": "my_env.py:make"},
        rollout={"batch_size": 2, "n_samples_per_prompt": 3, "max_new_tokens": 4},
        agent={"max_failed_fraction": 0.4},
        data={"prompt_dataset": "toy", "max_len": 128},
    )
    notebook = run(settings, RememberingPolicy(LosesEpisodes()), steps=1, rewarder=Picky())
    assert reported == [0] * 5
    assert (notebook.steps[1]["agent/failed"], notebook.steps[1]["reward/failed"]) == (7, 7)
    with pytest.raises(RewardError, match=r"2 of 6 episodes failed, more than agent\.max_failed_fraction 0\.3"):
        run(
            settings.model_copy(update={"agent": Agent(max_failed_fraction=0.3)}),
            RememberingPolicy(LosesEpisodes()),
            steps=1,
            rewarder=Picky(),
        )


def test_rejected_groups_reach_the_transcripts() -> None:
    seen: list[ScoredBatch] = []

    def remember(step: int, batch: ScoredBatch) -> Metrics:
        seen.append(batch)
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
    """Responds correctly with a probability that rises with every weight sync, from 0.2 to 1."""

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
    """16 prompts a step, 8 responses each, dynamic filtering; only the label has a reward."""
    return config(
        **{
            "rollout": {"batch_size": 16, "n_samples_per_prompt": 8, "max_new_tokens": 4},
            "train": {"batch_size": 128},
            "algo": FILTERING | {"dynamic_filtering_max_draws": 4},
        }
        | changes
    )


@pytest.mark.parametrize("reward", [{}, {"remote_url": "mine.py:reward"}])
def test_a_run_that_solves_its_prompts_ends_without_an_error(reward: dict[str, object]) -> None:
    policy, saved = RememberingPolicy(Mastering()), list[int]()
    settings = mastering(reward=reward)
    notebook = run(settings, policy, steps=50, save=lambda step, state: saved.append(step))
    assert notebook.ending is not None
    assert notebook.ending.is_solved
    assert notebook.ending.step == saved[-1] == len(policy.taught) == max(notebook.steps)
    assert notebook.ending.step < 50
    assert "its prompts are solved: " in (notebook.ending.reason or "")
    assert "\n" not in (notebook.ending.reason or "")


def test_reward_metrics_include_rejected_groups() -> None:
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
def test_exhaustion_is_an_error_unless_most_prompts_are_solved(
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


def test_the_reward_range_of_earlier_steps_counts_after_resuming() -> None:
    settings = config(algo=FILTERING, reward={"remote_url": "mine.py:reward"})
    always = Constant(lambda index: 1.0, first=0)
    with pytest.raises(ExhaustedError):
        run(settings, RememberingPolicy(ScriptedEngine()), steps=5, rewarder=always)
    seen = LoopState(0.0, RewardRange(0.0, 1.0))
    notebook = run(settings, RememberingPolicy(ScriptedEngine()), steps=5, rewarder=always, state=seen)
    assert notebook.ending is not None
    assert notebook.ending.is_solved


def test_negative_rewards_count_and_the_range_is_an_extra_condition() -> None:
    class Signed(LabelRewarder):
        def score(self, groups: Sequence[Group], *, out_of: int | None = None, failed: int = 0) -> list[list[Score]]:
            return [[Score(-1.0), Score(1.0)] for _ in groups]

    notebook = run(config(algo=FILTERING), RememberingPolicy(ScriptedEngine()), steps=1, rewarder=Signed())
    assert notebook.steps[1]["filter/kept_fraction"] == 1.0, "half right, of mean 0"
    settings = config(algo=FILTERING | {"dynamic_filtering_range": [0.0, 1.0]})
    with pytest.raises(ExhaustedError, match=r"20 a mean reward outside algo.dynamic_filtering_range 0 1"):
        run(settings, RememberingPolicy(ScriptedEngine()), steps=1, rewarder=Signed())


def test_groups_without_scores_are_neither_kept_nor_solved() -> None:
    class Down(LabelRewarder):
        def score(self, groups: Sequence[Group], *, out_of: int | None = None, failed: int = 0) -> list[list[Score]]:
            return [[Score(1.0), Score(0.0, failure="infrastructure")] for _ in groups]

    with pytest.raises(ExhaustedError, match="20 fewer than two scored responses"):
        run(config(algo=FILTERING), RememberingPolicy(ScriptedEngine()), steps=1, rewarder=Down())


def test_with_filtering_the_schedule_follows_the_prompts() -> None:
    # One prompt of four has a learning signal, so that a step of two takes seven or eight.
    policy = RememberingPolicy(ScriptedEngine())
    notebook = run(config(algo=FILTERING), policy, steps=100, rewarder=PickyRewarder(), num_prompts=24)
    # Prompts 0 to 6, 7 to 14 and 15 to 22; one is left.
    assert [notebook.steps[step]["filter/groups_drawn"] for step in (1, 2, 3)] == [7, 8, 8]
    assert notebook.ending == Ending(3, notebook.ending and notebook.ending.reason, is_solved=False, left_out=1)
    assert "the 24 prompts of its episodes are drawn; the last 1 do not fill a batch of 2" in str(notebook.ending)
    spans = [experience.span for experience in policy.taught]
    assert spans == [(0.0, 7 / 24), (7 / 24, 15 / 24), (15 / 24, 23 / 24)]


def test_a_resumed_run_draws_the_remaining_prompts() -> None:
    policy = RememberingPolicy(ScriptedEngine())
    budget = PromptBudget(24, drawn=15)
    notebook = run(config(algo=FILTERING), policy, steps=100, rewarder=PickyRewarder(), budget=budget)
    assert notebook.ending is not None
    assert (notebook.ending.step, notebook.ending.left_out) == (1, 2)


def test_a_resumed_run_with_fewer_episodes_than_it_made_ends_immediately() -> None:
    budget, policy = PromptBudget(10, drawn=16), RememberingPolicy(ScriptedEngine())
    notebook = run(config(algo=FILTERING), policy, steps=5, first_step=3, budget=budget)
    assert notebook.ending is not None
    assert (notebook.ending.step, notebook.ending.left_out) == (2, 0)
    assert (notebook.ending.reason or "").endswith("the 10 prompts of its episodes are drawn")


def test_too_few_prompts_for_one_batch_are_an_error() -> None:
    hopeless = Constant(lambda index: 0.0, first=0)
    with pytest.raises(
        RewardError, match=r"of the run's 8 prompts .* fewer than one batch of 2 give a learning signal"
    ):
        run(config(algo=FILTERING), RememberingPolicy(ScriptedEngine()), steps=4, rewarder=hopeless, num_prompts=8)


def test_prompts_that_are_solved_from_the_start_end_the_run_without_an_error() -> None:
    always = Constant(lambda index: 1.0, first=0)
    policy = RememberingPolicy(ScriptedEngine())
    notebook = run(config(algo=FILTERING), policy, steps=4, rewarder=always, num_prompts=8)
    assert notebook.ending is not None
    assert (notebook.ending.step, notebook.ending.is_solved, notebook.ending.left_out) == (0, True, 8)
    assert not policy.taught


def test_a_resumed_filtering_run_makes_the_steps_of_an_uninterrupted_one() -> None:
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
