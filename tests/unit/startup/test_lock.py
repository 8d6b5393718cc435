"""The lock files have all dependencies of pyproject.toml, with hashes, and name no index."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from vlmrl.startup.install import NOT_FOR_CPU, ROOT, Kind, lock_of

KINDS: tuple[Kind, ...] = ("cpu", "gpu")
PYTHONS = ("3.11", "3.12", "3.13")
_ENTRY = re.compile(r"([a-z0-9-]+)==([^ ;]+)(?: ; (.+?))? \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)")


def entries(kind: Kind, python: str) -> dict[str, str]:
    """Name -> version of what the lock says for a Python."""
    versions = {}
    for name, version, marker, hashes in _ENTRY.findall(lock_of(kind).read_text()):
        assert hashes
        if not marker or Marker(marker).evaluate({"python_version": python}):
            assert name not in versions, f"{name} twice for Python {python}"
            versions[name] = version
    return versions


def wanted(kind: Kind) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    listed = [*project["dependencies"], *extras["stack"], *extras[kind], *extras["dev"]]
    return [Requirement(line) for line in listed if not line.startswith("vlmrl[")]


@pytest.mark.parametrize("kind", KINDS)
def test_every_line_is_a_package_with_its_hashes_and_no_index_is_named(kind: Kind) -> None:
    text = lock_of(kind).read_text().partition("\n")[2]
    assert _ENTRY.sub("", text) == ""
    assert "index" not in text.replace("importlib", "")
    assert "://" not in text


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_lock_is_up_to_date_with_the_pins(kind: Kind, python: str) -> None:
    versions = entries(kind, python)
    for requirement in wanted(kind):
        name = canonicalize_name(requirement.name)
        if kind == "cpu" and name == "torch":
            continue  # its CPU build is in no registry
        assert requirement.specifier.contains(versions[name]), (
            f"{requirement} is locked as {versions[name]}: run `make lock`"
        )


@pytest.mark.parametrize("python", PYTHONS)
def test_on_cpu_nothing_of_cuda_and_nothing_that_breaks_imports_is_installed(python: str) -> None:
    names = entries("cpu", python).keys()
    assert not names & {"torch", *NOT_FOR_CPU}
    assert not [name for name in names if name.startswith(("nvidia-", "cuda-"))]


def test_all_that_packages_need_here_is_in_the_lock() -> None:
    """pip does not look for it: the lock must hold all of it."""
    if not Path(sys.prefix, ".vlmrl-setup").exists():
        pytest.skip("`make setup` did not make this environment")
    kind: Kind = "cpu" if "+cpu" in metadata.version("torch") else "gpu"
    versions = entries(kind, f"{sys.version_info.major}.{sys.version_info.minor}")
    left_out = {"torch", *NOT_FOR_CPU} if kind == "cpu" else set()
    for name in versions:
        for line in metadata.requires(name) or []:
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                needed = canonicalize_name(need.name)
                assert needed in versions or needed in left_out, f"{name} needs {needed}, which the lock lacks"
