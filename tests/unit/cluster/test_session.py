"""Start and end of a session, and the environment of its workers."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

import vlmrl.cluster.session as session_module
from vlmrl.cluster.head import wait_for_head
from vlmrl.cluster.placement import Place
from vlmrl.cluster.session import Node, Session, session, worker_environment
from vlmrl.errors import ClusterError, MachineError
from vlmrl.system import fork_server, machine, stops
from vlmrl.system.machine import Finding
from vlmrl.system.stops import Stopped


def test_ray_is_not_started_without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Finding("shared memory", ok=False, essential=True, detail="none", fix="get some")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(machine, "shared_memory", lambda: absent)
    with pytest.raises(ClusterError, match=r"^shared memory: none: get some$"), session():
        pytest.fail("the session has started")


def test_a_run_joins_a_cluster_of_which_its_machine_is_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    for address, joins in (("auto", True), ("10.0.0.1:6379", True), ("local", False), ("", False)):
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert session_module.joins_cluster() is joins, address
    monkeypatch.setenv("RAY_ADDRESS", "ray://10.0.0.1:10001")
    with pytest.raises(ClusterError, match="run the command on a machine of the cluster"), session():
        pytest.fail("the session has started")


def test_a_head_that_does_not_answer_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    message = rf"^RAY_ADDRESS {address}: no Ray answers there \(Connection refused\)"
    with pytest.raises(ClusterError, match=message), session():
        pytest.fail("the session has started")


def test_a_head_that_comes_late_is_waited_for() -> None:
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{head.getsockname()[1]}"
        lines: list[str] = []
        begins = threading.Timer(0.2, head.listen)
        begins.start()
        wait_for_head(address, limit_s=60, say=lines.append, interval_s=0.02)
        begins.join()
    assert lines == [f"waiting up to 60 s for the head of the cluster at {address}: Connection refused"]
    with pytest.raises(MachineError, match=r"no Ray has answered there within train\.wait_nodes_s 0\.05"):
        wait_for_head(address, limit_s=0.05, say=lines.append, interval_s=0.02)


@pytest.mark.parametrize(("address", "has_token"), [(None, True), ("", True), ("local", True), ("auto", False)])
def test_a_cluster_of_our_own_requires_its_token(address: str | None, has_token: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"PYTHONPATH": str(Path(machine.__file__).parents[2])} | (
        {} if address is None else {"RAY_ADDRESS": address}
    )
    code = "import os, vlmrl.cluster; print(os.environ.get('RAY_AUTH_MODE'), len(os.environ.get('RAY_AUTH_TOKEN', '')))"
    output = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert output.split() == (["token", "64"] if has_token else ["None", "0"])


@pytest.mark.parametrize("set_by_user", [None, "7"])
def test_workers_of_a_cluster_of_our_own_are_as_nice_as_the_run_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, set_by_user: str | None
) -> None:
    seen: list[str | None] = []
    name = "RAY_worker_niceness"
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.delenv(name, raising=False)
    if set_by_user is not None:
        monkeypatch.setenv(name, set_by_user)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr(fork_server, "fork_server", lambda folder: nullcontext())

    def init(**_: object) -> None:
        seen.append(os.environ.get(name))
        raise RuntimeError("enough")

    monkeypatch.setattr("ray.init", init)
    with pytest.raises(ClusterError, match="enough"), stops.handle_signals(60), session():
        pytest.fail("the session has started")
    assert seen == [set_by_user or "0"]
    assert os.environ.get(name) == set_by_user


def test_slots_are_gpus_if_there_are_any() -> None:
    mixed = Session((Node("a", num_cpus=16, num_gpus=2), Node("b", num_cpus=8, num_gpus=0)))
    assert (mixed.slots, mixed.unit) == ([2, 0], "GPU")
    plain = Session((Node("a", num_cpus=2, num_gpus=0),))
    assert (plain.slots, plain.unit) == ([2], "CPU core")


def test_the_workers_of_a_role_share_the_cores_of_their_node() -> None:
    machines = Session((Node("a", num_cpus=8, num_gpus=0),))
    assert worker_environment(machines, num_workers=2, slots=[0], node=0)["OMP_NUM_THREADS"] == "4"
    assert "CUDA_VISIBLE_DEVICES" not in worker_environment(machines, num_workers=2, slots=[0], node=0)


def test_engines_beside_the_trainer_compute_with_half_of_the_cores() -> None:
    machines = Session(tuple(Node(name, num_cpus=8, num_gpus=0) for name in "abc"))
    divided = machines.divided({"actor": [Place(0, (0,)), Place(1, (0,))], "vllm": [Place(1, (1,)), Place(2, (0,))]})
    assert [node.num_cpus for node in divided.nodes] == [8, 4, 8]
    assert divided.roster is machines.roster
    one_core = Session((Node("a", num_cpus=1, num_gpus=0),))
    both = {"actor": [Place(0, (0,))], "vllm": [Place(0, (1,))]}
    assert one_core.divided(both) == one_core
    with_gpus = Session((Node("a", num_cpus=8, num_gpus=2),))
    assert with_gpus.divided(both) == with_gpus


def test_a_worker_sees_its_own_gpus_only() -> None:
    machines = Session((Node("a", num_cpus=8, num_gpus=4),))
    assert worker_environment(machines, num_workers=1, slots=[2, 3], node=0)["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_slots_are_the_gpus_that_the_user_made_visible_on_each_node() -> None:
    machines = Session(
        (
            Node("a", num_cpus=8, num_gpus=2, gpus=("5", "7")),
            Node("b", num_cpus=8, num_gpus=2, gpus=("GPU-8932f937", "MIG-4d2a")),
        )
    )

    def visible(node: int, *slots: int) -> str:
        return worker_environment(machines, num_workers=1, slots=slots, node=node)["CUDA_VISIBLE_DEVICES"]

    assert [visible(0, 1), visible(1, 1)] == ["7", "MIG-4d2a"]
    # An engine with tensor parallelism has several.
    assert [visible(0, 0, 1), visible(1, 0, 1)] == ["5,7", "GPU-8932f937,MIG-4d2a"]
    # A role without a slot, such as the data, sees none.
    assert visible(0) == ""


def test_a_node_whose_gpus_are_hidden_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ray counts the names in CUDA_VISIBLE_DEVICES, even -1.
    node = {"NodeID": "a", "Alive": True, "NodeManagerAddress": "10.0.0.1", "NodeManagerPort": 7}
    monkeypatch.setattr("ray.nodes", lambda: [node | {"Resources": {"CPU": 4.0, "GPU": 1.0}}])
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "a"))
    monkeypatch.setattr(session_module, "visible_gpus", lambda addresses: dict.fromkeys(addresses, "-1"))
    machines = Session(session_module.alive_nodes())
    assert not machines.has_gpus
    assert machines.slots == [4]


def test_the_drivers_accelerator_setting_is_not_sent_to_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    head = Session((Node("a", num_cpus=8, num_gpus=0), Node("b", num_cpus=8, num_gpus=2)))
    assert "DS_ACCELERATOR" not in worker_environment(head, num_workers=1, slots=[0], node=1)


def test_output_of_rays_processes_goes_to_rays_logger(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("ERROR", logger="ray"):
        session_module._log_ray_output({"pid": "raylet", "lines": ["A worker died", "of this"]}, ignore_prefix=False)
    assert caplog.messages == ["(raylet) A worker died\nof this"]


def test_a_stop_during_the_start_of_ray_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    started: list[subprocess.Popen[bytes]] = []

    def init(**_: object) -> None:
        started.append(subprocess.Popen(["sleep", "60"]))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("ray.init", init)
    with pytest.raises(Stopped), stops.handle_signals(60), session():
        pytest.fail("the session has started")
    assert started[0].wait(10) == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


def test_a_dead_head_is_no_error_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("GCS has died")

    monkeypatch.setattr("ray.get_runtime_context", fail)
    session_module._remove_from_others(Path("/nowhere"))
