"""examples/kuberay/rayjob.yaml against the fields of KubeRay's RayJob, pyproject.toml and the settings of vlmrl."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel

from vlmrl.config.load import load
from vlmrl.config.verbs import RlConfig

ROOT = Path(__file__).resolve().parents[2]

# The fields of ray.io/v1 RayJob that the manifest uses, with their types: KubeRay 1.7.0, and Kubernetes' for pods.


class Fields(BaseModel):
    """An object whose other fields are refused, as an API server reports them."""

    model_config = ConfigDict(extra="forbid", strict=True, alias_generator=to_camel)


class Variable(Fields):
    name: str
    value: str


class Resources(Fields):
    requests: dict[str, str]
    limits: dict[str, str]


class Mount(Fields):
    name: str
    mount_path: str


class Container(Fields):
    name: str
    image: str
    env: list[Variable]
    resources: Resources
    volume_mounts: list[Mount]


class Claim(Fields):
    claim_name: str


class Scratch(Fields):
    medium: Literal["", "Memory"]
    size_limit: str


class Volume(Fields):
    name: str
    persistent_volume_claim: Claim | None = None
    empty_dir: Scratch | None = None


class Pod(Fields):
    termination_grace_period_seconds: int
    containers: list[Container]
    volumes: list[Volume]


class Template(Fields):
    spec: Pod


class Head(Fields):
    ray_start_params: dict[str, str]
    template: Template


class Workers(Head):
    group_name: str
    replicas: int
    min_replicas: int
    max_replicas: int


class Token(Fields):
    mode: Literal["disabled", "token"]


class Cluster(Fields):
    ray_version: str
    auth_options: Token
    head_group_spec: Head
    worker_group_specs: list[Workers]


class RayJob(Fields):
    entrypoint: str
    backoff_limit: int
    shutdown_after_job_finishes: bool
    ttl_seconds_after_finished: int
    ray_cluster_spec: Cluster


@pytest.fixture
def spec() -> dict[str, Any]:
    manifest = yaml.safe_load((ROOT / "examples/kuberay/rayjob.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    return dict(manifest["spec"])


def containers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = spec["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [container for group in groups for container in group["template"]["spec"]["containers"]]


def test_kuberay_knows_every_field(spec: dict[str, Any]) -> None:
    RayJob.model_validate(spec)
    for path in (["entrypoin"], ["rayClusterSpec", "authOption"], ["rayClusterSpec", "headGroupSpec", "templat"]):
        wrong = json.loads(json.dumps(spec))
        part = wrong
        for name in path[:-1]:
            part = part[name]
        part[path[-1]] = {}
        with pytest.raises(ValidationError, match=path[-1]):
            RayJob.model_validate(wrong)


def test_the_version_of_ray_is_the_pinned_one(spec: dict[str, Any]) -> None:
    (pinned,) = re.findall(r'"ray\[default\]==([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert spec["rayClusterSpec"]["rayVersion"] == pinned


def test_the_command_is_accepted_and_fits_the_machines(spec: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("actor: {model_name_or_path: m}\ndata: {prompt_dataset: gsm8k}\n")
    program, verb, *words = shlex.split(spec["entrypoint"].replace("/data/run.yaml", str(tmp_path / "run.yaml")))
    assert (program, verb) == ("vlmrl", "rl")
    config = load(RlConfig, words)
    assert config.ckpt.load_enable, "a retry goes on"
    machines = containers(spec)
    assert config.actor.num_nodes == len(machines)
    assert {machine["resources"]["limits"]["nvidia.com/gpu"] for machine in machines} == {
        str(config.actor.num_gpus_per_node)
    }


def test_a_stopped_job_has_time_to_save(spec: dict[str, Any]) -> None:
    grace_s = int(re.findall(r"--train\.stop_grace_s (\d+)", spec["entrypoint"])[0])
    for machine in containers(spec):
        (wait,) = (line["value"] for line in machine["env"] if line["name"] == "RAY_JOB_STOP_WAIT_TIME_S")
        assert int(wait) > grace_s
        assert {"name": "shm", "mountPath": "/dev/shm"} in machine["volumeMounts"]
