"""Placement of workers on nodes and slots."""

import pytest

from vlmrl.cluster.placement import Place, Role, plan
from vlmrl.errors import ClusterError

ACTOR = Role("actor", num_workers=2, slots_per_worker=1, flag="--actor.num_gpus_per_node", workers_per_node=2)
ENGINES = Role("vllm", num_workers=2, slots_per_worker=1, flag="--vllm.num_engines")


def test_separate_roles_get_different_slots() -> None:
    places = plan([ACTOR, ENGINES], shared=[], available=[4], unit="GPU")
    assert places["actor"] == [Place(0, (0,)), Place(0, (1,))]
    assert places["vllm"] == [Place(0, (2,)), Place(0, (3,))]


def test_roles_of_a_pool_get_the_same_slots() -> None:
    places = plan([ACTOR, ENGINES], shared=[frozenset({"actor", "vllm"})], available=[2], unit="GPU")
    assert places["actor"] == places["vllm"] == [Place(0, (0,)), Place(0, (1,))]


def test_an_engine_of_several_slots_stays_on_one_node() -> None:
    wide = Role("vllm", num_workers=2, slots_per_worker=2, flag="--vllm.num_engines")
    places = plan([wide], shared=[], available=[3, 3], unit="GPU")
    assert places["vllm"] == [Place(0, (0, 1)), Place(1, (0, 1))]


def test_at_most_workers_per_node_are_on_one_node() -> None:
    actor = Role("actor", num_workers=4, slots_per_worker=1, flag="--actor.num_nodes", workers_per_node=2)
    places = plan([actor], shared=[], available=[8, 8], unit="GPU")
    assert [place.node for place in places["actor"]] == [0, 0, 1, 1]


def test_shared_wide_engines_cover_the_slots_of_the_ranks() -> None:
    actor = Role("actor", num_workers=4, slots_per_worker=1, flag="--actor.num_gpus_per_node", workers_per_node=4)
    wide = Role("vllm", num_workers=2, slots_per_worker=2, flag="--vllm.num_engines")
    places = plan([actor, wide], shared=[frozenset({"actor", "vllm"})], available=[8], unit="GPU")
    assert places["vllm"] == [Place(0, (0, 1)), Place(0, (2, 3))]


def test_an_error_names_the_role_that_does_not_fit_and_its_flag() -> None:
    with pytest.raises(
        ClusterError,
        match=r"vllm requires 2 CPU cores .* only 0 of its 2 workers .*--vllm.num_engines.*--train.colocate_all",
    ):
        plan([ACTOR, ENGINES], shared=[], available=[2], unit="CPU core")
    large = Role("actor", num_workers=9, slots_per_worker=1, flag="--actor.num_gpus_per_node")
    with pytest.raises(ClusterError, match=r"actor requires 9 GPUs.*with 8 in total.*--actor.num_gpus_per_node"):
        plan([large], shared=[], available=[8], unit="GPU")


@pytest.mark.parametrize(
    ("roles", "shared"),
    [
        ([ENGINES], []),
        ([ACTOR, ENGINES], [frozenset({"actor", "vllm"})]),
    ],
)
def test_sharing_is_not_advised_if_devices_are_shared_or_no_other_role_has_any(
    roles: list[Role], shared: list[frozenset[str]]
) -> None:
    with pytest.raises(ClusterError, match=r"lower --\S+$"):
        plan(roles, shared=shared, available=[1], unit="GPU")


def test_the_flag_is_the_number_of_nodes_if_there_are_too_few() -> None:
    actor = Role("actor", num_workers=4, slots_per_worker=1, flag="--actor.num_gpus_per_node", workers_per_node=2)
    with pytest.raises(ClusterError, match=r"only 2 of its 4 workers fit on 1 node .* lower --actor\.num_nodes$"):
        plan([actor], shared=[], available=[8], unit="GPU")
    with pytest.raises(ClusterError, match=r"lower --actor\.num_gpus_per_node$"):
        plan([actor], shared=[], available=[1, 1], unit="GPU")
