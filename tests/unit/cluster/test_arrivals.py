"""The wait for machines that have not joined the cluster yet."""

from __future__ import annotations

import pytest

from vlmrl.cluster.arrivals import wait_for_machines
from vlmrl.cluster.placement import Role, plan
from vlmrl.cluster.session import Node, Session
from vlmrl.errors import ClusterError, MachineError

HEAD = Node("a", num_cpus=4, num_gpus=0, address="10.0.0.1")
SECOND = Node("b", num_cpus=1, num_gpus=0, address="10.0.0.2")
WITH_GPUS = Node("c", num_cpus=8, num_gpus=2, address="10.0.0.3")


def place(machines: Session) -> object:
    """Two workers, one slot each, on one or more machines."""
    role = Role("actor", 2, 1, flag="--actor.num_gpus_per_node", workers_per_node=1)
    return plan([role], shared=[], available=machines.slots, unit=machines.unit)


def test_it_waits_until_the_run_fits_and_says_once_what_is_missing() -> None:
    joins = [(HEAD,), (HEAD,), (HEAD, SECOND)]
    lines: list[str] = []
    machines = Session((HEAD,))
    joined = wait_for_machines(
        machines, place, num_nodes=1, limit_s=60, say=lines.append, joined=lambda: joins.pop(0), interval_s=0.01
    )
    assert joined.nodes == (HEAD, SECOND)
    assert joined.roster is machines.roster
    assert len(lines) == 1
    assert lines[0].startswith("waiting up to 60 s for more machines: actor requires 2 CPU cores (2 x 1) but only 1")
    assert lines[0].endswith("there: 10.0.0.1 (4 CPU cores)")


def test_a_machine_without_a_gpu_that_is_there_first_is_no_reason_to_do_without_gpus() -> None:
    seen: list[Session] = []
    joined = wait_for_machines(
        Session((HEAD,)),
        seen.append,
        num_nodes=2,
        limit_s=60,
        say=lambda line: None,
        joined=lambda: (HEAD, WITH_GPUS),
        interval_s=0.01,
    )
    assert seen == [joined]
    assert joined.has_gpus


def test_the_end_of_the_wait_names_what_is_there_and_what_is_missing() -> None:
    with pytest.raises(MachineError) as caught:
        wait_for_machines(
            Session((WITH_GPUS,)),
            place,
            num_nodes=3,
            limit_s=0.05,
            say=lambda line: None,
            joined=lambda: (WITH_GPUS, SECOND),
            interval_s=0.02,
        )
    assert str(caught.value) == (
        "the machines of the run have not joined within train.wait_nodes_s 0.05: a role requires 3 nodes, and 2 have "
        "joined: 10.0.0.3 (2 GPUs), 10.0.0.2 (1 CPU core)"
    )


def test_without_a_wait_the_placement_reports_the_error() -> None:
    def refuse(machines: Session) -> object:
        raise ClusterError("no room")

    machines = Session((HEAD,))
    assert wait_for_machines(machines, refuse, num_nodes=2, limit_s=0, say=lambda line: None) is machines
