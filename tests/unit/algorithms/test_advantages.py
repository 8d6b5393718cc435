import math

import pytest
import torch
from torch import Tensor

from vlmrl.algorithms.advantages import advantages, check
from vlmrl.config.built_in import ESTIMATORS
from vlmrl.errors import ConfigError

F, T = False, True
REWARDS = torch.tensor([[1.0, 0.0, 0.0], [5.0, 3.0, 1.0]])
# Two prompts, three responses each: prompts of different lengths, one response over two turns, padding behind.
SAMPLED = torch.tensor(
    [[F, T, T, F, F], [F, T, T, T, F], [F, T, F, F, F], [F, F, T, T, T], [F, F, T, F, T], [F, F, T, T, F]]
)


def test_group_estimators_apply_the_scalar_to_sampled_tokens_only() -> None:
    result = advantages(REWARDS, SAMPLED, estimator="rloo", gamma=0.5)
    expected = torch.tensor([[1.0], [-0.5], [-0.5], [3.0], [0.0], [-3.0]]) * SAMPLED
    torch.testing.assert_close(result.advantages, expected)
    assert result.returns is None


@pytest.mark.parametrize("estimator", ["group_norm", "dr_grpo", "rloo"])
def test_the_penalty_acts_on_a_group_of_equal_rewards(estimator: str) -> None:
    sampled = torch.tensor([[T, T], [T, F]])
    kl_penalty = torch.tensor([[0.25, 0.5], [1.0, 0.0]])
    result = advantages(torch.ones(1, 2), sampled, estimator=estimator, kl_penalty=kl_penalty)
    assert result.advantages.tolist() == [[-0.75, -0.5], [-1.0, 0.0]]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_response_without_tokens_counts_in_its_group_without_an_advantage(estimator: str) -> None:
    sampled = torch.tensor([[F, F, F], [T, T, F], [T, F, F], [F, F, F]])
    values = torch.full((4, 3), float("nan")).masked_fill(sampled, 0.25)
    rewards = torch.tensor([[0.0, 1.0], [4.0, 2.0]])
    result = advantages(rewards, sampled, estimator=estimator, values=values).advantages
    assert result[~sampled].tolist() == [0.0] * 9
    assert bool(result.isfinite().all())
    if estimator == "dr_grpo":
        assert result.tolist() == [[0, 0, 0], [0.5, 0.5, 0], [1.0, 0, 0], [0, 0, 0]]


def test_reinforce_discounts_reward_minus_penalty_and_normalises() -> None:
    rewards = torch.tensor([[4.0, 0.0], [1.0, 2.0]])
    sampled = torch.tensor([[T, F, T], [F, T, F], [T, F, F], [F, F, T]])
    kl_penalty = torch.tensor([[1.0, 9.0, 2.0], [9.0, 1.0, 9.0], [0.0, 9.0, 9.0], [9.0, 9.0, 1.0]])
    # Returns: 4 - 2 = 2 and 2/2 - 1 = 0; -1; 1; 2 - 1 = 1. Mean 3/5, mean square 7/5.
    expected = torch.tensor([[0.0, 0, 2.0], [0, -1.0, 0], [1.0, 0, 0], [0, 0, 1.0]])
    centred = torch.where(sampled, expected - 0.6, 0.0)
    only_centred = advantages(
        rewards, sampled, estimator="reinforce", gamma=0.5, kl_penalty=kl_penalty, no_std_norm=True
    ).advantages
    torch.testing.assert_close(only_centred, centred)
    result = advantages(rewards, sampled, estimator="reinforce", gamma=0.5, kl_penalty=kl_penalty).advantages
    torch.testing.assert_close(result, centred / math.sqrt(1.4 - 0.36))


def test_gae_normalises_its_advantages_and_not_its_returns() -> None:
    rewards = torch.tensor([[8.0], [5.0]])
    sampled = torch.tensor([[T, F, T, T, F], [F, T, F, F, F]])
    nan = float("nan")
    values = torch.tensor([[1.0, nan, 2.0, 4.0, nan], [nan, 3.0, nan, nan, nan]])
    result = advantages(rewards, sampled, estimator="gae", gamma=0.5, lambd=0.5, values=values, no_std_norm=True)
    # Worked out in test_returns.py: 0.25, 1, 4 and 2, of mean 7.25 / 4.
    expected = torch.tensor([[0.25, 0, 1.0, 4.0, 0], [0, 2.0, 0, 0, 0]]) - 1.8125
    torch.testing.assert_close(result.advantages, torch.where(sampled, expected, 0.0))
    assert result.returns is not None
    assert result.returns.tolist() == [[1.25, 0, 3.0, 8.0, 0], [0, 5.0, 0, 0, 0]]


def test_gae_without_a_critic_is_refused() -> None:
    with pytest.raises(ValueError, match="values"):
        advantages(REWARDS, SAMPLED, estimator="gae")


def test_reinforce_baseline_normalises_over_all_sampled_tokens_of_the_step() -> None:
    rewards = torch.tensor([[1.0, 0.0], [3.0, 1.0]])
    sampled = torch.tensor([[T, T, F], [T, F, F], [F, T, F], [T, T, T]])
    # Scalars 0.5, -0.5, 1, -1 on 2, 1, 1, 3 tokens: mean (1 - 0.5 + 1 - 3) / 7, mean square (0.5 + 0.25 + 1 + 3) / 7.
    mean = -1.5 / 7
    deviation = math.sqrt(4.75 / 7 - mean**2)
    scalars = torch.tensor([[0.5], [-0.5], [1.0], [-1.0]])
    centred = (scalars - mean) * sampled
    result = advantages(rewards, sampled, estimator="reinforce_baseline").advantages
    torch.testing.assert_close(result, centred / deviation)
    only_centred = advantages(rewards, sampled, estimator="reinforce_baseline", no_std_norm=True).advantages
    torch.testing.assert_close(only_centred, centred)


def test_reinforce_baseline_discounts_before_it_normalises() -> None:
    rewards = torch.tensor([[4.0, 0.0]])
    sampled = torch.tensor([[T, T, F], [F, T, T]])
    # Scalars 2 and -2: returns 1, 2 and -1, -2, of mean 0.
    result = advantages(rewards, sampled, estimator="reinforce_baseline", gamma=0.5, no_std_norm=True)
    assert result.advantages.tolist() == [[1.0, 2.0, 0.0], [0.0, -1.0, -2.0]]


@pytest.mark.parametrize("estimator", ["reinforce_baseline", "rloo", "group_norm", "dr_grpo"])
def test_a_step_of_constant_groups_is_exactly_zero(estimator: str) -> None:
    rewards = torch.tensor([[0.1, 0.1, 0.1], [0.7, 0.7, 0.7]])
    assert advantages(rewards, SAMPLED, estimator=estimator).advantages.abs().max() == 0


def test_equal_rewards_everywhere_are_exactly_zero_for_reinforce() -> None:
    assert advantages(torch.full((2, 3), 0.1), SAMPLED, estimator="reinforce").advantages.abs().max() == 0


# Steps of two groups of two responses: 1, 3 and 2 in the first, 0.5 twice in the second. The first response has two
# steps, so that each token reward is half of the step's.
STEP_TOKENS = torch.tensor([[T, T, T], [F, T, T], [T, T, F], [T, F, F]])
STEPS = torch.tensor([[0.5, 0, 1.5], [0, 0, 2.0], [0, 0.5, 0], [0.5, 0, 0]])


@pytest.mark.parametrize("estimator", ["group_norm", "rloo", "dr_grpo", "reinforce_baseline"])
def test_better_steps_are_better_for_any_number_of_steps(estimator: str) -> None:
    # Two steps of 0.6 against four of 0.9.
    sampled = torch.tensor([[T, T, F, F], [T, T, T, T]])
    steps = torch.tensor([[0.3, 0.3, 0, 0], [0.225, 0.225, 0.225, 0.225]])
    result = advantages(torch.zeros(1, 2), sampled, estimator=estimator, token_rewards=steps, no_std_norm=True)
    assert result.advantages[0, 0] < 0 < result.advantages[1, 0]


def test_step_rewards_add_to_the_outcome_for_earlier_tokens() -> None:
    rewards = torch.tensor([[1.0, 0.0], [2.0, 2.0]])
    result = advantages(rewards, STEP_TOKENS, estimator="dr_grpo", token_rewards=STEPS)
    # Outcome 0.5 and -0.5; steps -0.5 at the first and 0.5 at the last token of the first response.
    assert result.advantages.tolist() == [[0.5, 1.0, 1.0], [0, -0.5, -0.5], [0, 0, 0], [0, 0, 0]]


def test_only_group_norm_divides_steps_by_their_deviation() -> None:
    steps = 3 * STEPS
    rewards = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    centred = torch.tensor([[0.0, 1.5, 1.5], [0, 0, 0], [0, 0, 0], [0, 0, 0]])
    # The outcome: 1 and -1 for rloo; 0.5 over a deviation of 0.70711 for group_norm.
    outcome = torch.tensor([[1.0, 1, 1], [0, -1, -1], [0, 0, 0], [0, 0, 0]])
    for estimator, expected in (("rloo", outcome + centred), ("group_norm", 0.70711 * outcome + centred / 3)):
        result = advantages(rewards, STEP_TOKENS, estimator=estimator, token_rewards=steps)
        torch.testing.assert_close(result.advantages, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("estimator", ["group_norm", "rloo", "dr_grpo"])
def test_step_rewards_without_a_difference_in_total_give_no_signal(estimator: str) -> None:
    # 1 + 0 and 0 + 1: the same rule as in the filter and `group/constant_fraction`.
    sampled, steps = torch.tensor([[T, T], [T, T]]), torch.tensor([[0.0, 0.0], [0.25, 0.75]])
    result = advantages(torch.tensor([[1.0, 0.0]]), sampled, estimator=estimator, token_rewards=steps)
    assert result.advantages.abs().max() == 0


def test_an_unscored_response_among_right_ones_is_not_punished() -> None:
    rewards, scored = torch.tensor([[1.0] * 7 + [0.0]]), torch.tensor([[T] * 7 + [F]])
    sampled = torch.ones(8, 2, dtype=torch.bool)
    for estimator in ("group_norm", "rloo", "dr_grpo", "reinforce_baseline"):
        assert advantages(rewards, sampled, estimator=estimator, scored=scored).advantages.abs().max() == 0
    # Without the flag it would be (0 - 0.875) / 0.3536.
    assert advantages(rewards, sampled, estimator="group_norm").advantages[7, 0] == pytest.approx(-2.4749, abs=1e-3)


@pytest.mark.parametrize("estimator", ["group_norm", "rloo", "dr_grpo", "reinforce_baseline"])
def test_a_single_scored_response_has_no_advantage(estimator: str) -> None:
    rewards = torch.tensor([[4.0, 0.0], [1.0, 0.0]])
    scored = torch.tensor([[T, F], [T, T]])
    sampled = torch.ones(4, 2, dtype=torch.bool)
    steps = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    kl_penalty = torch.full((4, 2), 0.5)
    result = advantages(
        rewards, sampled, estimator=estimator, scored=scored, token_rewards=steps, kl_penalty=kl_penalty
    ).advantages
    assert result[:2].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert result[2, 1] > result[3, 1]


def test_normalisation_ignores_unscored_responses() -> None:
    sampled = torch.ones(4, 1, dtype=torch.bool)
    rewards, scored = torch.tensor([[3.0, 1.0], [100.0, 2.0]]), torch.tensor([[T, T], [F, T]])
    values = torch.full((4, 1), 0.5)
    for estimator in ("gae", "reinforce"):
        result = advantages(rewards, sampled, estimator=estimator, values=values, scored=scored, no_std_norm=True)
        # The mean of 3, 1 and 2.
        torch.testing.assert_close(result.advantages, torch.tensor([[1.0], [-1.0], [0.0], [0.0]]))


def test_a_users_estimator_receives_scored_if_declared() -> None:
    rewards, scored = torch.tensor([[3.0, 1.0, -9.0]]), torch.tensor([[T, T, F]])
    sampled = torch.ones(3, 1, dtype=torch.bool)

    def asking(rewards: Tensor, scored: Tensor) -> Tensor:
        assert scored.tolist() == [[T, T, F]]
        return torch.where(scored, rewards, 7.0)

    assert advantages(rewards, sampled, estimator=asking, scored=scored).advantages.tolist() == [[3.0], [1.0], [0.0]]
    # An estimator that does not declare it gets the mean of the others instead, and the advantage is ignored.
    result = advantages(rewards, sampled, estimator=lambda rewards: rewards - rewards.mean(), scored=scored)
    assert result.advantages.tolist() == [[1.0], [-1.0], [0.0]]


def test_step_rewards_are_plain_rewards_without_a_group_baseline() -> None:
    rewards = torch.tensor([[1.0, 0.0], [2.0, 2.0]])
    result = advantages(rewards, STEP_TOKENS, estimator="gae", token_rewards=STEPS, values=torch.zeros(4, 3))
    assert result.returns is not None
    assert result.returns.tolist() == [[3.0, 2.5, 2.5], [0, 2.0, 2.0], [2.5, 2.5, 0], [2.5, 0, 0]]


def test_mismatched_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rewards \[2, 3\] and tokens \[4, 5\]"):
        advantages(REWARDS, SAMPLED[:4], estimator="rloo")
    with pytest.raises(ValueError, match=r"kl_penalty \[6, 4\] does not have the shape of the tokens \[6, 5\]"):
        advantages(REWARDS, SAMPLED, estimator="rloo", kl_penalty=torch.zeros(6, 4))


def test_a_users_scalars_apply_to_every_sampled_token_with_the_penalty() -> None:
    def best_of_group(rewards: Tensor) -> Tensor:
        return (rewards == rewards.amax(dim=1, keepdim=True)).float()

    sampled = torch.tensor([[T, T, F], [F, T, F], [T, F, T], [F, F, F]])
    rewards = torch.tensor([[1.0, 0.0], [3.0, 4.0]])
    kl_penalty = torch.full((4, 3), 0.25)
    result = advantages(rewards, sampled, estimator=best_of_group, kl_penalty=kl_penalty)
    assert result.advantages.tolist() == [[0.5, 0.75, 0], [0, -0.25, 0], [-0.5, 0, -0.25], [0, 0, 0]]


def test_declared_penalties_are_left_to_the_users_estimator() -> None:
    def mine(rewards: Tensor, *, sampled: Tensor, kl_penalty: Tensor | None, values: Tensor | None = None) -> Tensor:
        assert values is None
        assert kl_penalty is not None
        return rewards.view(-1, 1) - kl_penalty.view(sampled.shape)

    sampled = torch.tensor([[T, T], [F, T]])
    steps = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    kl_penalty = torch.tensor([[0.5, 0.0], [float("nan"), 2.0]])
    result = advantages(torch.tensor([[1.0, 3.0]]), sampled, estimator=mine, kl_penalty=kl_penalty, token_rewards=steps)
    # It handles the penalty per token; the step reward, which it does not declare, counts for earlier tokens.
    assert result.advantages.tolist() == [[1.5, 2.0], [0.0, 1.0]]


def test_the_critic_of_a_users_estimator_learns_returns() -> None:
    def mine(rewards: Tensor, values: Tensor) -> Tensor:
        return rewards.view(-1, 1) - values

    sampled = torch.tensor([[T, T, F], [F, T, T]])
    values = torch.tensor([[0.5, 0.25, 9.0], [9.0, 1.0, 2.0]])
    kl_penalty = torch.full((2, 3), 0.5)
    steps = torch.tensor([[0.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    given = {"estimator": mine, "values": values}
    result = advantages(torch.tensor([[1.0, 3.0]]), sampled, **given, kl_penalty=kl_penalty, token_rewards=steps)  # type: ignore[arg-type]
    # Rewards at the end, step rewards at their tokens, a penalty of 0.5 at every token.
    assert result.returns is not None
    assert result.returns.tolist() == [[0.0, 0.5, 0.0], [0.0, 4.0, 2.5]]
    # The estimator gives one part of the advantages; penalty and step rewards are added as usual.
    assert result.advantages.tolist() == [[0.5 - 1, 0.75 - 0.5, 0.0], [0.0, 2.0 - 1 + 2, 1.0 - 0.5]]
    assert advantages(torch.tensor([[1.0, 3.0]]), sampled, estimator="rloo").returns is None


def test_a_critic_that_the_users_estimator_does_not_use_is_refused() -> None:
    check(lambda rewards, values: rewards, has_critic=True)
    check(lambda rewards: rewards)
    with pytest.raises(ConfigError, match=r"does not declare the values of the critic that critic\.model_name_or_path"):
        check(lambda rewards: rewards, has_critic=True)


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        (lambda rewards: rewards.sum(dim=1), r"returned float32 \[2\], not numbers \[2, 3\] or \[6, 5\]"),
        (lambda rewards: rewards > 0, r"returned bool \[2, 3\]"),
        (lambda rewards: rewards.tolist(), "returned a list, not a tensor"),
        (lambda rewards: rewards / 0 * 0, "not a finite number"),
        (lambda rewards: rewards.no_such_thing(), r"failed: AttributeError: .*test_advantages.py:\d+"),
        (lambda scores: scores, "requires scores, which vlmrl does not pass; it may declare: rewards, sampled"),
    ],
)
def test_a_users_estimator_that_is_wrong_is_one_line(mine, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=f"^algo.advantage.estimator: .*{message}") as caught:
        advantages(REWARDS, SAMPLED, estimator=mine)
    assert "\n" not in str(caught.value)
