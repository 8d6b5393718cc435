"""Shared fixtures of end-to-end tests: one Ray session, and tiny models that are built once."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from recipes import DIGITS

from vlmrl.cluster.session import session
from vlmrl.models import tiny
from vlmrl.system.fork_server import fork_server


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """`tiny_model("qwen3_vl")` is the folder of a tiny model of that family."""
    folder = tmp_path_factory.mktemp("models")

    def build(family: str, **options: Any) -> str:
        out = folder / "-".join([family, *(f"{k}={v}" for k, v in sorted(options.items()))])
        if not out.exists():
            tiny.build(family, out, **options)  # type: ignore[arg-type]
        return str(out)

    return build


@pytest.fixture(scope="session")
def models(tiny_model: Callable[..., str]) -> dict[str, str]:
    """Micro models for tests of ranks: with images, with features for deeper layers, and of text."""
    families = (("vl", "qwen2_5_vl", False), ("deep", "qwen3_vl", True), ("text", "qwen3", True))
    return {name: tiny_model(family, size="micro", tied=tied, seed=3) for name, family, tied in families}


@pytest.fixture(scope="session", autouse=True)
def forks() -> Iterator[None]:
    """One fork server for the runs, engines and ranks of all tests, which would each import everything again."""
    with tempfile.TemporaryDirectory(prefix="vlmrl-") as folder, fork_server(Path(folder)):
        yield


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One Ray session for all runs of these tests, with room for three separate roles."""
    with session(num_cpus=max(3, os.cpu_count() or 1)):
        yield


@pytest.fixture(scope="module")
def proves(request: pytest.FixtureRequest) -> bool:
    """Whether long proofs of this file run, which need more than its other tests."""
    items = (item for item in request.session.items if request.node in item.listchain())
    return any(item.get_closest_marker("prove") for item in items)


@pytest.fixture(scope="session")
def digits_reward(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A reward that a random model can learn in seconds, as a value of `reward.remote_url`."""
    file = tmp_path_factory.mktemp("reward") / "digits.py"
    file.write_text(DIGITS)
    return f"{file}:digits"
