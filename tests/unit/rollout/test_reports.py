"""What is wrong with an update, in the words of the engine."""

from __future__ import annotations

from typing import Any

import pytest

from vlmrl.models.adapter_plan import AdapterPlan
from vlmrl.rollout.reports import announcement, problem_of, problem_of_adapter


def report(*, digests: Any = (), ignored: Any = (), missing: Any = ()) -> Any:
    return {"digests": dict(digests), "ignored": list(ignored), "missing": list(missing)}


def of_adapter(**found: Any) -> Any:
    good = {"unknown": [], "is_active": True, "factor": 1.0, "empty": [], "older": [], "other": []}
    return report() | good | found


@pytest.mark.parametrize(
    ("reports", "problem"),
    [
        ([report(), report()], None),
        ([report(), report(ignored=["b", "a"])], "vLLM's model has no place for a, b"),
        ([report(missing=["e", "d", "c", "b", "a"])], "no weights came for a, b, c and 2 more"),
        ([report(digests={"a": "1"}), report(digests={"a": "2"})], "its workers received different weights"),
    ],
)
def test_an_update_is_good_only_when_every_worker_took_all_of_it(reports: list[Any], problem: str | None) -> None:
    assert problem_of(reports) == problem


def test_layers_that_hold_something_else_are_named_with_their_worker() -> None:
    def read(*wrong: list[str]) -> Any:
        return report() | {"readback": {"layers": 9, "unread": [], "wrong": list(wrong), "seconds": 0.1}}

    stale = ["a", "holds the weights from before"]
    assert problem_of([read(), read()]) is None
    assert problem_of([read(stale)]) == "read back from the layers, a holds the weights from before"
    assert problem_of([read(), read(stale, ["b", "is scaled by 1.01"])]) == (
        "read back from the layers of worker 1, a holds the weights from before, and 1 more are not as sent"
    )


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        ({}, None),
        ({"unknown": ["x"], "is_active": False}, "its adapter has no x"),
        ({"ignored": ["x"], "is_active": False}, "vLLM's model has no place for x"),
        ({"missing": ["x"], "is_active": False}, "no weights came for x"),
        ({"is_active": False}, "vLLM ignores the adapter: it did not switch it on"),
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
def test_an_adapter_is_good_only_when_the_layers_of_every_worker_hold_it(
    found: dict[str, Any], problem: str | None
) -> None:
    assert problem_of_adapter([of_adapter(), of_adapter(**found)], 4.0) == problem


def test_an_adapter_is_announced_in_plain_values_and_with_the_scaling_that_the_trainer_uses() -> None:
    plan = AdapterPlan(
        rank=4,
        alpha=16.0,
        dropout=0.1,
        is_rank_stabilized=True,
        has_magnitude=False,
        targets=("model.layers.0.q_proj",),
        groups=frozenset({"language"}),
    )
    assert announcement(plan) == {
        "names": [f"base_model.model.model.layers.0.q_proj.lora_{half}.weight" for half in "AB"],
        "rank": 4,
        "alpha": 16.0,
        "is_rank_stabilized": True,
        "scaling": 8.0,
    }
