import math
import pickle

import pytest

from vlmrl.observe.metrics import Max, Mean, SampleSize, Sum, accuracies, check_name, evaluated_sets, merge, reduce


def test_parts_of_unequal_size_merge_to_the_mean_of_the_whole() -> None:
    # values 2, 4 on one rank and 1 on another: 7 / 3
    assert reduce([{"policy/loss": Mean(6.0, 2)}, {"policy/loss": Mean(1.0, 1)}]) == {"policy/loss": 7 / 3}


def test_sums_add_up_and_the_maximum_is_kept() -> None:
    parts = [{"pack/tokens": Sum(3), "sync/logprob_diff_max": Max(0.5)}, {"pack/tokens": Sum(4)}, {}]
    assert reduce([*parts, {"sync/logprob_diff_max": Max(0.25)}]) == {"pack/tokens": 7.0, "sync/logprob_diff_max": 0.5}


def test_merging_does_not_depend_on_the_order() -> None:
    parts = [{"a/x": Mean(1.0, 2), "a/y": Sum(1)}, {"a/x": Mean(4.0, 3)}, {"a/y": Sum(5)}]
    assert merge(parts) == merge(parts[::-1]) == {"a/x": Mean(5.0, 5), "a/y": Sum(6)}


@pytest.mark.parametrize("pair", [(0.1, math.nan), (math.nan, 0.1)])
def test_a_nan_is_never_hidden_by_a_maximum(pair: tuple[float, float]) -> None:
    assert math.isnan(reduce([{"a/x": Max(v)} for v in pair])["a/x"])


def test_a_mean_over_no_values_is_left_out() -> None:
    assert reduce([{"a/x": Mean(0.0, 0)}]) == {}
    assert reduce([{"a/x": Mean(0.0, 0)}, {"a/x": Mean(3.0, 1)}]) == {"a/x": 3.0}


def test_two_types_under_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="a/x is a Mean in one place and a Sum in another"):
        reduce([{"a/x": Mean(1.0)}, {"a/x": Sum(1.0)}])


@pytest.mark.parametrize("name", ["loss", "Policy/loss", "policy/", "/loss", "policy loss/x", "policy//x", ""])
def test_a_name_must_have_an_area_and_a_quantity(name: str) -> None:
    with pytest.raises(ValueError, match="area/quantity"):
        reduce([{name: Sum(1)}])


@pytest.mark.parametrize("name", ["policy/loss", "eval/visual_math/pass@1", "time/rollout_s", "reward/part/my-fn"])
def test_names_in_use_are_accepted(name: str) -> None:
    check_name(name)


def test_metrics_can_be_pickled() -> None:
    metrics = {"a/x": Mean(1.0, 2), "a/y": Sum(1), "a/z": Max(3)}
    assert pickle.loads(pickle.dumps(metrics)) == metrics


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be negative"):
        Mean(1.0, -1)


def test_parts_of_an_evaluation_set_are_distinguished_from_sets() -> None:
    names = ["eval/toy/clock/pass@1", "eval/toy/pass@1", "eval/hub/set/pass@1", "eval/toy/pass@2", "eval/x/reward"]
    assert evaluated_sets(names) == {"hub/set": [], "toy": ["clock"]}
    assert evaluated_sets([]) == {}
    assert accuracies(["rm/accuracy", "eval/hub/set/accuracy", "eval/toy/loss"]) == {"hub/set": "eval/hub/set/accuracy"}


def test_the_effective_sample_size_is_that_of_all_weights() -> None:
    # Weights 1, 1 on one rank and 2, 0 on another: 4^2 / (6 * 4).
    parts = [{"is/ess": SampleSize(2.0, 2.0, 2)}, {"is/ess": SampleSize(2.0, 4.0, 2)}]
    assert reduce(parts) == {"is/ess": pytest.approx(16 / 24)}
    assert reduce([{"is/ess": SampleSize(0.0, 0.0, 3)}]) == {}
