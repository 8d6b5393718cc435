"""Every recipe of examples/ loads with the command in its file and in the README."""

import re
import shlex
from pathlib import Path

import pytest

from vlmrl.config.built_in import ESTIMATORS, POLICY_LOSSES
from vlmrl.config.load import load
from vlmrl.config.verb_base import VerbConfig
from vlmrl.config.verb_list import VERBS
from vlmrl.config.verbs import RlConfig

ROOT = Path(__file__).parents[3]
FILES = sorted(
    path.relative_to(ROOT)
    for path in (ROOT / "examples").rglob("*.yaml")
    if path.parent.name != "kuberay"  # a manifest, see test_kuberay_manifest.py
)
OVERLAYS = [file for file in FILES if file.parent.name != "examples"]
COMMANDS = [
    line.partition("#")[0].strip()
    for line in (ROOT / "examples" / "README.md").read_text().splitlines()
    if line.startswith("vlmrl ")
]
KINDS = {kind.verb: kind for kind in VERBS}


def recipe(command: str) -> VerbConfig:
    program, verb, *words = shlex.split(command)
    assert program == "vlmrl"
    return load(KINDS[verb], words)


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_there_are_recipes() -> None:
    assert len(COMMANDS) > 30
    assert len(OVERLAYS) > 25


@pytest.mark.parametrize("command", COMMANDS)
def test_a_recipe_loads_and_its_file_has_its_command(command: str) -> None:
    recipe(command)
    files = re.findall(r"--config (\S+)", command)
    plain = " ".join([*command.split()[:2], *(f"--config {file}" for file in files)])
    assert (ROOT / files[-1]).read_text().startswith(f"# {plain}\n")


@pytest.mark.parametrize("file", FILES, ids=str)
def test_the_readme_has_a_command_for_every_file(file: Path) -> None:
    assert any(f"--config {file}" in command for command in COMMANDS)


@pytest.mark.parametrize("file", OVERLAYS, ids=str)
def test_an_overlay_lies_in_the_folder_named_after_its_base(file: Path) -> None:
    (command,) = {command for command in COMMANDS if command.endswith(f" --config {file}")}
    assert command.endswith(f" --config {file.parent}.yaml --config {file}")


@pytest.mark.parametrize("base", ["counting_tiny", "geometry3k_7b_8gpu"])
@pytest.mark.parametrize("name", [*ESTIMATORS, *POLICY_LOSSES])
def test_every_algorithm_has_a_small_recipe_and_a_large_one(name: str, base: str) -> None:
    runs = [recipe(command) for command in COMMANDS if f"examples/{base}.yaml" in command]
    assert any(
        isinstance(run, RlConfig) and name in (run.algo.advantage.estimator, run.actor.policy_loss_type) for run in runs
    )
