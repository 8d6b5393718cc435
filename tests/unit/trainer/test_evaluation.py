from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from scripted_episodes import failed_rollout
from scripted_loop import config

from vlmrl.errors import RewardError
from vlmrl.observe.metrics import check_name, evaluated_sets
from vlmrl.trainer.episodes import episode_metrics
from vlmrl.trainer.evaluation import (
    check_sets,
    evaluate,
    is_correct,
    pass_at_k,
    pass_rate_by_value,
    set_metrics,
    with_metric_names,
)
from vlmrl.trainer.experience import length_metrics
from vlmrl.types import Group, Prompt, Rollout, Sampling, Score


def answer(finish: str = "stop") -> Rollout:
    tokens = np.array([1, 2])
    return Rollout.of_response(tokens, np.array([False, True]), np.zeros(2, np.float32), "a", finish, 0)  # type: ignore[arg-type]


def group(size: int) -> Group:
    prompt = Prompt(index=0, source="toy:0", text="?", tokens=np.array([1]), request=np.array([1]), label=None)
    return Group(prompt, tuple(answer() for _ in range(size)))


def test_pass_at_k_is_the_unbiased_estimate() -> None:
    # 4 answers, 1 right. Two drawn: C(3,2)/C(4,2) = 3/6 miss it.
    assert pass_at_k(4, 1, 1) == 0.25
    assert pass_at_k(4, 1, 2) == 0.5
    assert pass_at_k(4, 4, 3) == 1.0
    assert pass_at_k(4, 0, 4) == 0.0


def test_pass_at_more_than_the_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="pass@8 cannot be computed from 4"):
        pass_at_k(4, 1, 8)


def test_a_checking_reward_decides_before_the_total_does() -> None:
    assert is_correct(Score(0.2, {"exact": 1.0, "format": 0.0}))
    assert not is_correct(Score(0.9, {"math": 0.0, "format": 1.0}))
    assert is_correct(Score(1.0, {"exact": 0.0, "math": 1.0})), "0.5 for a label of 1/2 is right"
    assert not is_correct(Score(1.0, {"exact": 1.0, "math": 0.0}))
    assert is_correct(Score(0.9, {"mine": 0.9}))
    assert is_correct(Score(1.0, {"exact": 0.0, "math": 1.0})), "of both verdicts math decides"
    assert not is_correct(Score(1.0, {"exact": 1.0, "math": 0.0}))
    steps = np.array([0.0, 0.25, 0.5], np.float32)
    assert is_correct(Score(0.0, {"process": 0.75}, token_rewards=steps)), "what its steps earned counts"


def test_set_names_are_made_valid_and_stay_distinct() -> None:
    sets = {"my set": 1, "my_set": 2, "org/hübsch (v2)": 3, "/": 4}
    renamed = with_metric_names(sets)
    assert renamed == {"my_set": 1, "my_set-2": 2, "org/h_bsch_v2_": 3, "_": 4}
    for name in renamed:
        check_name(f"eval/{name}/pass@1")


def test_pass_rates_are_computed_for_every_power_of_two() -> None:
    scores = [[Score(1.0, {"exact": 1.0}), Score(0.0, {"exact": 0.0})], [Score(0.0, {"exact": 0.0})] * 2]
    metrics = set_metrics("toy", [group(2), group(2)], scores)
    assert metrics["eval/toy/pass@1"] == 0.25
    assert metrics["eval/toy/pass@2"] == 0.5
    assert metrics["eval/toy/reward"] == 0.25
    assert metrics["eval/toy/tokens_mean"] == 1.0
    assert "eval/toy/pass@4" not in metrics


LOST = Score(0.0, failure="infrastructure")


def test_failed_responses_are_counted_and_excluded_from_means() -> None:
    right, wrong, broken = Score(1.0), Score(0.0), Score(0.0, failure="response")
    metrics = set_metrics("toy", [group(2)] * 3, [[right, LOST], [right, wrong], [broken, right]])
    assert metrics["eval/toy/failed"] == 1.0, "a response that breaks its scorer has its score"
    # One of one, one of two, one of two.
    assert metrics["eval/toy/pass@1"] == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert metrics["eval/toy/pass@2"] == 1.0, "over the two prompts of which two answers were scored"
    assert metrics["eval/toy/reward"] == pytest.approx(3 / 5)


def test_a_set_without_scores_has_no_pass_rate() -> None:
    metrics = set_metrics("toy", [group(2)] * 2, [[LOST, LOST]] * 2)
    assert metrics["eval/toy/failed"] == 4.0
    assert not [name for name in metrics if "pass@" in name or name.endswith("/reward")]
    assert pass_rate_by_value("toy", [of({"family": "count"}, 2)], [[LOST, LOST]], key="family") == {}
    assert evaluated_sets(metrics) == {}


def test_responses_without_a_score_do_not_count_as_wrong() -> None:
    metrics = set_metrics("toy", [group(1)] * 100, [[Score(1.0)]] * 90 + [[LOST]] * 10)
    assert (metrics["eval/toy/pass@1"], metrics["eval/toy/failed"]) == (1.0, 10.0)


def of(metadata: dict[str, object], size: int) -> Group:
    one = group(size)
    return Group(replace(one.prompt, metadata=metadata), one.rollouts)


RIGHT, WRONG = Score(1.0, {"exact": 1.0}), Score(0.0, {"exact": 0.0})


def test_accuracy_is_broken_down_by_a_column() -> None:
    families: list[dict[str, object]] = [{"family": "count"}, {"family": "clock"}, {"family": "count"}, {}]
    scores = [[RIGHT, WRONG], [WRONG, WRONG], [RIGHT, RIGHT], [RIGHT, RIGHT]]
    metrics = pass_rate_by_value("toy", [of(row, 2) for row in families], scores, key="family")
    # count: 0.5 and 1. The row without a family counts only for the set.
    assert metrics == {"eval/toy/clock/pass@1": 0.0, "eval/toy/count/pass@1": 0.75}


def test_any_value_of_the_column_gives_a_valid_metric_name() -> None:
    rows: list[dict[str, object]] = [{"level": 3}, {"level": "very hard/odd"}, {"level": ""}, {"level": None}]
    metrics = pass_rate_by_value("toy", [of(row, 1) for row in rows], [[RIGHT]] * 4, key="level")
    assert metrics == {"eval/toy/3/pass@1": 1.0, "eval/toy/very_hard_odd/pass@1": 1.0}
    for name in metrics:
        check_name(name)


class Scripted:
    """Answers every prompt twice, and takes every first answer for right."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, on_group: Callable[[Group], None] | None = None
    ) -> list[Group]:
        return [Group(prompt, (answer(), answer())) for prompt in prompts]

    def begin(self, group: Group) -> None:
        pass

    def score(self, groups: Sequence[Group], *, out_of: int | None = None, failed: int = 0) -> list[list[Score]]:
        return [[RIGHT, WRONG] for _ in groups]


@pytest.mark.parametrize(("key", "parts"), [("family", ["count"]), ("difficulty", []), (None, [])])
def test_a_set_without_the_column_has_totals_only(key: str | None, parts: list[str]) -> None:
    sampling = Sampling(n=2, temperature=1.0, top_p=1.0, max_new_tokens=4, seed=0)
    sets = {"with": [of({"family": "count"}, 1).prompt], "without": [group(1).prompt]}
    metrics, answers = evaluate(sets, engine=Scripted(), rewarder=Scripted(), sampling=sampling, breakdown_key=key)
    assert metrics["eval/with/pass@1"] == metrics["eval/without/pass@1"] == 0.5
    assert evaluated_sets(metrics) == {"with": parts, "without": []}
    assert {name: len(groups) for name, (groups, _) in answers.items()} == {"with": 1, "without": 1}


def test_failed_episodes_have_no_length() -> None:
    prompt = group(1).prompt
    lost = failed_rollout(prompt)
    metrics = set_metrics("toy", [Group(prompt, (lost, answer()))], [[LOST, RIGHT]])
    assert metrics["eval/toy/tokens_mean"] == 1.0
    metrics = set_metrics("toy", [Group(prompt, (lost,))], [[LOST]])
    assert metrics == {"eval/toy/failed": 1.0}
    assert length_metrics([Group(prompt, (lost,))]) == {}
    assert episode_metrics([Group(prompt, (lost,))])["agent/turns_mean"] == 0.0


def test_an_evaluation_of_failed_episodes_is_an_error() -> None:
    settings = config(
        train={"batch_size": 4, "agent_func_path": "my_env.py:make"},
        agent={"max_failed_fraction": 0.5},
        data={"prompt_dataset": "toy", "max_len": 128},
    )
    prompt = group(1).prompt
    lost = failed_rollout(prompt)
    check_sets(settings, {"toy": ([Group(prompt, (lost, answer()))], [[WRONG, RIGHT]])})
    with pytest.raises(RewardError, match=r"2 of 3 episodes failed, more than agent\.max_failed_fraction 0\.5"):
        check_sets(settings, {"toy": ([Group(prompt, (lost, lost, answer()))], [[WRONG, WRONG, RIGHT]])})
