"""A machine that dies is noticed and named; one that is slow for a while is not taken for dead."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from contextlib import suppress

import pytest

from vlmrl.cluster.placement import Place
from vlmrl.cluster.session import Node, Session
from vlmrl.cluster.watch import Sign, Watch, roles_by_node, sign_of, watched
from vlmrl.errors import ClusterError

NODE = Node("b", num_cpus=1, num_gpus=0, address="10.0.0.2", port=7)
LINE = "machine 10.0.0.2 died in the middle of the run, and with it actor 1: everything is ended"


def watch(*signs: Sign, patience_s: float = 30.0) -> tuple[Watch, threading.Event]:
    """One that gets these signs and the last one for ever after, and what it sets when a machine is lost."""
    waiting = list(signs)

    def ask(node: Node) -> Sign:
        return waiting.pop(0) if len(waiting) > 1 else waiting[0]

    ended = threading.Event()
    found = Watch({NODE: "actor 1"}, ask=ask, interval_s=0.01, patience_s=patience_s)
    found.at_loss(ended.set)
    return found, ended


def test_a_machine_that_refuses_twice_is_lost_and_what_waits_is_ended() -> None:
    found, ended = watch("there", "gone", "there", "gone", "gone")
    found.begin()
    assert ended.wait(5)
    assert found.lost is not None
    assert found.lost.startswith(LINE)


def test_a_machine_may_be_silent_for_a_while() -> None:
    found, ended = watch("there", "silent", "silent", "silent", "there")
    found.begin()
    assert not ended.wait(0.3)
    found.close()
    assert found.lost is None
    found, ended = watch("there", "silent", patience_s=0.1)
    found.begin()
    assert ended.wait(5)


def test_after_an_error_there_is_less_patience_and_no_machine_is_blamed_without_cause() -> None:
    found, _ = watch("silent")
    assert found.why(limit_s=0.4) is not None
    found, _ = watch("there", "there", "gone")
    assert found.why(limit_s=2.0) is not None, "the machine's last process may die after the first"
    found, _ = watch("there")
    started = time.monotonic()
    assert found.why(limit_s=0.2) is None
    assert time.monotonic() - started < 2


def test_a_machine_is_asked_at_the_port_of_its_ray() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        node = Node("b", num_cpus=1, num_gpus=0, address="127.0.0.1", port=port)
        assert sign_of(node) == "there"
    assert sign_of(node) == "gone"


def test_one_question_without_an_answer_is_no_silence_however_long_ago_the_last_answer_was() -> None:
    # The driver was stopped for a while, and the first packets after that are lost.
    found, ended = watch("silent", "there", patience_s=0.05)
    time.sleep(0.1)
    found.begin()
    assert not ended.wait(0.2)
    found.close()
    assert found.lost is None


def test_many_silent_machines_do_not_wait_for_each_other() -> None:
    def ask(node: Node) -> Sign:
        time.sleep(0.1)
        return "silent"

    nodes = [Node(f"b{n}", num_cpus=1, num_gpus=0, address=f"10.0.0.{n}", port=7) for n in range(8)]
    found = Watch(dict.fromkeys(nodes, "actor 1"), ask=ask, interval_s=0.01)
    assert found.why(limit_s=0.5) is not None


def test_workers_that_start_after_the_loss_are_ended_too() -> None:
    found, ended = watch("gone")
    found.begin()
    assert ended.wait(5)
    late = threading.Event()
    found.at_loss(late.set)
    assert late.is_set()


def test_a_machine_is_not_blamed_for_what_this_one_lacks() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = Node("b", num_cpus=1, num_gpus=0, address="127.0.0.1", port=server.getsockname()[1])
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (server.fileno() + 1, hard))
        held = []
        try:
            with suppress(OSError):  # until all numbers below the limit are taken
                while True:
                    held.append(os.dup(server.fileno()))
            sign = sign_of(node)
        finally:
            for file in held:
                os.close(file)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert sign == "there"


@pytest.fixture
def dead() -> Session:
    """Two machines, the second of which is not there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    here = Node("a", num_cpus=1, num_gpus=0, address="127.0.0.1", port=1)
    return Session((here, Node("b", num_cpus=1, num_gpus=0, address="127.0.0.1", port=port)))


def broken_run(machines: Session, places: dict[str, list[Place]]) -> None:
    with watched(machines, places):
        raise RuntimeError("Connection closed by peer")


def test_whatever_a_lost_machine_breaks_is_told_as_its_loss(dead: Session) -> None:
    places = {"actor": [Place(0, (0,)), Place(1, (0,))], "vllm": [Place(1, (0,))]}
    with pytest.raises(ClusterError, match=r"machine 127\.0\.0\.1 died .* and with it actor 1 and vllm 0: "):
        broken_run(dead, places)


def test_a_machine_without_a_role_is_not_watched(dead: Session) -> None:
    with pytest.raises(RuntimeError, match="Connection closed"):
        broken_run(dead, {"actor": [Place(0, (0,))]})


def test_roles_are_told_with_the_numbers_of_their_workers() -> None:
    places = {"actor": [Place(0, (0,)), Place(1, (0,))], "vllm": [Place(1, (0,)), Place(1, (1,))]}
    assert roles_by_node(places) == {0: "actor 0", 1: "actor 1 and vllm 0, 1"}
