"""Detection of dead machines; a machine that is silent for a moment is not dead."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from contextlib import suppress

import pytest

from vlmrl.cluster.machine_watch import Status, Watch, probe_node, roles_by_node, watch_machines
from vlmrl.cluster.placement import Place
from vlmrl.cluster.session import Node, Session
from vlmrl.errors import MachineError

NODE = Node("b", num_cpus=1, num_gpus=0, address="10.0.0.2", port=7)
LINE = "machine 10.0.0.2 died during the run, and with it actor 1: the run is stopped"


def watch(*statuses: Status, patience_s: float = 30.0) -> tuple[Watch, threading.Event]:
    """A watch whose probes return these statuses, and then the last one forever; and an event that its loss sets."""
    remaining = list(statuses)

    def probe(node: Node) -> Status:
        return remaining.pop(0) if len(remaining) > 1 else remaining[0]

    stopped = threading.Event()
    watch = Watch({NODE: "actor 1"}, probe=probe, interval_s=0.01, patience_s=patience_s)
    watch.on_loss(stopped.set)
    return watch, stopped


def test_a_machine_that_refuses_twice_is_dead_and_its_workers_are_stopped() -> None:
    machines, stopped = watch("alive", "refused", "alive", "refused", "refused")
    machines.start()
    assert stopped.wait(5)
    assert machines.lost is not None
    assert machines.lost.startswith(LINE)


def test_a_machine_may_be_silent_for_a_while() -> None:
    machines, stopped = watch("alive", "silent", "silent", "silent", "alive")
    machines.start()
    assert not stopped.wait(0.3)
    machines.close()
    assert machines.lost is None
    machines, stopped = watch("alive", "silent", patience_s=0.1)
    machines.start()
    assert stopped.wait(5)


def test_after_an_error_dead_machines_are_found_sooner_and_no_other_is_blamed() -> None:
    machines, _ = watch("silent")
    assert machines.find_loss(limit_s=0.4) is not None
    machines, _ = watch("alive", "alive", "refused")
    assert machines.find_loss(limit_s=2.0) is not None, "the machine's last process may die after the first"
    machines, _ = watch("alive")
    started = time.monotonic()
    assert machines.find_loss(limit_s=0.2) is None
    assert time.monotonic() - started < 2


def test_a_machine_is_probed_at_the_port_of_its_ray() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        node = Node("b", num_cpus=1, num_gpus=0, address="127.0.0.1", port=port)
        assert probe_node(node) == "alive"
    assert probe_node(node) == "refused"


def test_one_unanswered_probe_is_no_silence_however_old_the_last_response_is() -> None:
    # The driver was suspended for a while, and the first packets after that are lost.
    machines, stopped = watch("silent", "alive", patience_s=0.05)
    time.sleep(0.1)
    machines.start()
    assert not stopped.wait(0.2)
    machines.close()
    assert machines.lost is None


def test_many_silent_machines_do_not_wait_for_each_other() -> None:
    def probe(node: Node) -> Status:
        time.sleep(0.1)
        return "silent"

    nodes = [Node(f"b{n}", num_cpus=1, num_gpus=0, address=f"10.0.0.{n}", port=7) for n in range(8)]
    machines = Watch(dict.fromkeys(nodes, "actor 1"), probe=probe, interval_s=0.01)
    assert machines.find_loss(limit_s=0.5) is not None


def test_workers_that_start_after_the_loss_are_stopped_too() -> None:
    machines, stopped = watch("refused")
    machines.start()
    assert stopped.wait(5)
    late = threading.Event()
    machines.on_loss(late.set)
    assert late.is_set()


def test_a_machine_is_not_blamed_for_errors_of_this_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = Node("b", num_cpus=1, num_gpus=0, address="127.0.0.1", port=server.getsockname()[1])
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (server.fileno() + 1, hard))
        files = []
        try:
            with suppress(OSError):  # until all file descriptors below the limit are taken
                while True:
                    files.append(os.dup(server.fileno()))
            status = probe_node(node)
        finally:
            for file in files:
                os.close(file)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert status == "alive"


@pytest.fixture
def dead() -> Session:
    """Two machines, the second of which does not exist."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    here = Node("a", num_cpus=1, num_gpus=0, address="127.0.0.1", port=1)
    return Session((here, Node("b", num_cpus=1, num_gpus=0, address="127.0.0.1", port=port)))


def failing_run(machines: Session, places: dict[str, list[Place]]) -> None:
    with watch_machines(machines, places):
        raise RuntimeError("Connection closed by peer")


def test_errors_that_follow_from_the_loss_are_reported_as_the_loss(dead: Session) -> None:
    places = {"actor": [Place(0, (0,)), Place(1, (0,))], "vllm": [Place(1, (0,))]}
    with pytest.raises(MachineError, match=r"machine 127\.0\.0\.1 died .* and with it actor 1 and vllm 0: "):
        failing_run(dead, places)


def test_a_machine_without_a_role_is_not_watched(dead: Session) -> None:
    with pytest.raises(RuntimeError, match="Connection closed"):
        failing_run(dead, {"actor": [Place(0, (0,))]})


def test_roles_are_listed_with_the_indices_of_their_workers() -> None:
    places = {"actor": [Place(0, (0,)), Place(1, (0,))], "vllm": [Place(1, (0,)), Place(1, (1,))]}
    assert roles_by_node(places) == {0: "actor 0", 1: "actor 1 and vllm 0, 1"}
