import math

from vlmrl.hub.figures import Check, Evaluation, checks, evaluations, hours, num_steps, show

RECORDS = [
    {"step": 0, "eval/toy/pass@1": 0.25, "eval/toy/reward": 0.3},
    {
        "step": 1,
        "time/step_s": 1800.0,
        "sync/logprob_diff_max": 2e-6,
        "reward/failed": 1.0,
        "sync/kl_rollout_train": -3.0,
    },
    {
        "step": 2,
        "time/step_s": 1800.0,
        "sync/logprob_diff_max": 1e-6,
        "reward/failed": 2.0,
        "sync/kl_rollout_train": 1.0,
        "verify/images/engine_effect": 0.5,
        "verify/images/critic_effect": 0.2,
        "eval/toy/pass@1": 0.5,
        "eval/toy/reward": 0.2,
    },
    {"step": 3, "eval/toy/pass@1": 0.75, "verify/adapters/gap": math.nan},
    {"step": 4, "verify/adapters/gap": 0.1},
]


def test_evaluations_have_their_first_and_last_value_accuracies_first() -> None:
    assert evaluations(RECORDS) == [
        Evaluation("toy/pass@1", 0.25, 0, 0.75, 3),
        Evaluation("toy/reward", 0.3, 0, 0.2, 2),
    ]
    assert evaluations(RECORDS, until=2)[0].last == 0.5


def test_a_check_has_its_worst_figure() -> None:
    figures = {check.metric: check.figure for check in checks(RECORDS)}
    assert figures.pop("verify/adapters/gap") != 0.1, "NaN stays visible"
    assert figures == {
        "sync/logprob_diff_max": 2e-6,
        "sync/kl_rollout_train": -3.0,
        "verify/images/critic_effect": 0.2,
        "reward/failed": 3.0,
    }
    assert all(isinstance(check, Check) and check.statement for check in checks(RECORDS))
    assert checks([]) == []


def test_null_is_a_figure_that_was_no_number() -> None:
    names = ("sync/logprob_diff_max", "reward/failed")
    records = [{"step": 1, **dict.fromkeys(names)}, {"step": 2, "sync/logprob_diff_max": 1e-6}, {"step": 3}]
    found = {check.metric: check.figure for check in checks(records)}
    assert set(found) == set(names)
    assert all(map(math.isnan, found.values()))


def test_length_of_a_run() -> None:
    assert num_steps(RECORDS) == 4
    assert hours(RECORDS) == 1.0
    assert num_steps([]) == 0


def test_numbers_are_short() -> None:
    assert show("toy/pass@1", 0.4219) == "42.2%"
    assert show("sync/version", 60.0) == "60"
    assert show("sync/logprob_diff_max", 7.15e-06) == "7.15e-06"
    assert show("verify/adapters/gap", math.nan) == "nan"
