"""Problems of an update, found in the reports of the workers."""

from __future__ import annotations

from typing import Any

import pytest

from vlmrl.models.adapter_plan import AdapterPlan
from vlmrl.rollout.reports import describe_adapter, find_adapter_problem, find_problem


def report(*, digests: Any = (), ignored: Any = (), missing: Any = ()) -> Any:
    return {"digests": dict(digests), "ignored": list(ignored), "missing": list(missing)}


def staged(stage: int, *, ignored: Any = ()) -> Any:
    return report(ignored=ignored) | {"stage": stage}


def adapter_report(**changes: Any) -> Any:
    good = {"unknown": [], "is_active": True, "factor": 1.0, "empty": [], "older": [], "other": []}
    return report() | good | changes


@pytest.mark.parametrize(
    ("reports", "problem"),
    [
        ([report(), report()], None),
        ([report(), report(ignored=["b", "a"])], "vLLM's model has no place for a, b"),
        ([staged(0, ignored=["c"]), staged(1, ignored=["a", "b"])], None),
        ([staged(0, ignored=["c", "a"]), staged(1, ignored=["a", "b"])], "vLLM's model has no place for a"),
        ([staged(0, ignored=["b"]), staged(0), staged(1, ignored=["b"])], "vLLM's model has no place for b"),
        ([report(missing=["e", "d", "c", "b", "a"])], "no weights arrived for a, b, c and 2 more"),
        ([report(digests={"a": "1"}), report(digests={"a": "2"})], "its workers received different weights"),
    ],
)
def test_an_update_is_complete_only_when_all_workers_loaded_all_of_it(reports: list[Any], problem: str | None) -> None:
    assert find_problem(reports) == problem


def test_wrong_layers_are_reported_with_their_worker() -> None:
    def read_back(*wrong: list[str]) -> Any:
        return report() | {"readback": {"layers": 9, "unread": [], "wrong": list(wrong), "seconds": 0.1}}

    stale = ["a", "holds the weights from before"]
    assert find_problem([read_back(), read_back()]) is None
    assert find_problem([read_back(stale)]) == "read back from the layers, a holds the weights from before"
    assert find_problem([read_back(), read_back(stale, ["b", "is scaled by 1.01"])]) == (
        "read back from the layers of worker 1, a holds the weights from before, and 1 more are not as sent"
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"unknown": ["x"], "is_active": False}, "its adapter has no x"),
        ({"ignored": ["x"], "is_active": False}, "vLLM's model has no place for x"),
        ({"missing": ["x"], "is_active": False}, "no weights arrived for x"),
        ({"is_active": False}, "vLLM did not activate the adapter"),
        ({"empty": ["b", "a"]}, "vLLM's layers hold nothing of a, b"),
        (
            {"empty": ["a"], "older": ["c"], "other": ["d"]},
            "vLLM's layers hold nothing of a, and still the older c, and something else than was sent for d",
        ),
        ({"factor": 2.0001}, "vLLM's layers apply the adapter 2 times: by 8 instead of 4"),
        ({"factor": 1.414}, "vLLM's layers apply the adapter wrongly scaled: by 5.656 instead of 4"),
        ({"factor": 0.5}, "vLLM's layers apply the adapter wrongly scaled: by 2 instead of 4"),
        ({"factor": -1.0}, "vLLM's layers apply the adapter wrongly scaled: by -4 instead of 4"),
    ],
)
def test_an_adapter_is_complete_only_when_the_layers_of_all_workers_hold_it(
    changes: dict[str, Any], problem: str | None
) -> None:
    assert find_adapter_problem([adapter_report(), adapter_report(**changes)], 4.0) == problem


def test_an_adapter_is_described_in_plain_values_with_the_trainers_scaling() -> None:
    plan = AdapterPlan(
        rank=4,
        alpha=16.0,
        dropout=0.1,
        is_rank_stabilized=True,
        has_magnitude=False,
        targets=("model.layers.0.q_proj",),
        groups=frozenset({"language"}),
    )
    assert describe_adapter(plan) == {
        "names": [f"base_model.model.model.layers.0.q_proj.lora_{half}.weight" for half in "AB"],
        "rank": 4,
        "alpha": 16.0,
        "is_rank_stabilized": True,
        "scaling": 8.0,
    }
