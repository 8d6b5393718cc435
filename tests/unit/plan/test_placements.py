"""The search for placements."""

from __future__ import annotations

from typing import Any

import pytest

from vlmrl.plan.placements import Cluster, Settings, divisions, search, trainers


def test_divisions_use_all_gpus_and_whole_machines() -> None:
    found = list(divisions(Cluster(16, 8), heads=16, reference=False))
    assert {mode for mode, _ in found} == {"colocated", "apart", "asynchronous"}
    for mode, division in found:
        ranks = division["actor.num_nodes"] * division["actor.num_gpus_per_node"]
        engines = division["vllm.num_engines"] * division["vllm.tensor_parallel_size"]
        assert ranks == engines == 16 if mode == "colocated" else ranks + engines == 16
        assert division.get("train.colocate_all", False) is (mode == "colocated")
        assert division.get("train.async_enable", False) is (mode == "asynchronous")


def test_tensor_parallel_ranks_divide_the_heads() -> None:
    sizes = {d["vllm.tensor_parallel_size"] for _, d in divisions(Cluster(8, 8), heads=28, reference=False)}
    assert sizes == {1, 2, 4}


def test_one_gpu_is_shared() -> None:
    assert {mode for mode, _ in divisions(Cluster(1, 8), heads=16, reference=False)} == {"colocated"}


def test_optimizers_sleep_only_beside_engines() -> None:
    assert not any("ds.enable_sleep" in t for t in trainers("apart", ranks=8))
    assert any(t.get("ds.enable_sleep") for t in trainers("colocated", ranks=8))


def run(fixed: Settings, *, limit: int) -> list[Any]:
    """Search where a step takes as long as its ZeRO stage says, and only small packs fit."""
    return search(
        Cluster(8, 8),
        heads=16,
        reference=False,
        fixed=fixed,
        seconds=lambda s: s["ds.zero_stage"] + s["train.max_tokens_per_gpu"] / 1e6 + s["vllm.tensor_parallel_size"],
        fits=lambda s: s["train.max_tokens_per_gpu"] <= limit,
        agrees=lambda s: s["ds.zero_stage"] == 3,
    )


def test_the_search_returns_the_fastest_that_fits() -> None:
    found = run({}, limit=8192)
    assert [place.seconds for place in found] == sorted(place.seconds for place in found)
    assert found[0].settings["ds.zero_stage"] == 3
    assert found[0].settings["vllm.tensor_parallel_size"] == 1
    assert run({}, limit=100) == []


@pytest.mark.parametrize(
    "fixed",
    [
        {"vllm.tensor_parallel_size": 4},
        {"train.colocate_all": False},
        {"train.async_enable": True},
        # Values that the search itself does not try.
        {"vllm.sync_backend": "shm", "vllm.gpu_memory_utilization": 0.73},
        {"actor.num_gpus_per_node": 5, "vllm.num_engines": 3},
        {"ds.sequence_parallel_size": 1, "vllm.tensor_parallel_size": 3},
    ],
)
def test_given_settings_stay(fixed: dict[str, Any]) -> None:
    found = run(fixed, limit=8192)
    assert found
    for place in found:
        assert all(place.settings.get(name, False) == value for name, value in fixed.items())


def test_a_given_token_budget_is_the_only_one() -> None:
    found = run({"train.max_tokens_per_gpu": 5000}, limit=8192)
    assert {place.settings["train.max_tokens_per_gpu"] for place in found} == {5000}


def test_a_given_stage_that_the_search_does_not_try() -> None:
    (place, *_) = search(
        Cluster(1, 8),
        heads=16,
        reference=False,
        fixed={"ds.zero_stage": 0},
        seconds=lambda s: s["train.max_tokens_per_gpu"],
        fits=lambda s: True,
        agrees=lambda s: True,
    )
    assert place.settings["ds.zero_stage"] == 0


def test_engines_in_stages_take_more_gpus() -> None:
    found = list(divisions(Cluster(8, 8), heads=16, reference=False, stages=2))
    assert found
    for mode, division in found:
        ranks = division["actor.num_nodes"] * division["actor.num_gpus_per_node"]
        engines = 2 * division["vllm.num_engines"] * division["vllm.tensor_parallel_size"]
        assert ranks == engines == 8 if mode == "colocated" else ranks + engines == 8


def test_roles_with_gpus_of_their_own_leave_fewer_to_engines() -> None:
    for mode, division in divisions(Cluster(8, 8), heads=16, reference=False, apart=2):
        ranks = division["actor.num_nodes"] * division["actor.num_gpus_per_node"]
        engines = division["vllm.num_engines"] * division["vllm.tensor_parallel_size"]
        assert mode == "colocated" or ranks + engines == 6
