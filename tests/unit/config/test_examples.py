"""Every example loads, and the README's table lists it."""

from pathlib import Path

import pytest

from vlmrl.config.built_in import ESTIMATORS, POLICY_LOSSES
from vlmrl.config.load import load
from vlmrl.config.run import VERBS, RlConfig

FOLDER = Path(__file__).parents[3] / "examples"
FILES = sorted(FOLDER.glob("*.yaml"))
KINDS = {kind.verb: kind for kind in VERBS}


def test_there_are_examples() -> None:
    assert {"quickstart_sft.yaml", "quickstart_rl.yaml"} < {file.name for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_example_loads_by_the_command_in_its_first_line(file: Path) -> None:
    program, verb, *flags = file.read_text().splitlines()[0].removeprefix("# ").split()
    assert program == "vlmrl"
    assert flags == ["--config", f"examples/{file.name}"]
    load(KINDS[verb], ["--config", str(file)])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_example_is_in_the_table(file: Path) -> None:
    assert f"[{file.name}]({file.name})" in (FOLDER / "README.md").read_text()


@pytest.mark.parametrize("size", ["tiny", "8gpu"])
@pytest.mark.parametrize("name", [*ESTIMATORS, *POLICY_LOSSES])
def test_every_algorithm_has_a_small_recipe_and_a_large_one(name: str, size: str) -> None:
    runs = [load(RlConfig, ["--config", str(file)]) for file in FILES if file.stem.endswith(size) and is_rl(file)]
    assert any(name in (run.algo.advantage.estimator, run.actor.policy_loss_type) for run in runs)


def is_rl(file: Path) -> bool:
    return file.read_text().startswith("# vlmrl rl ")
