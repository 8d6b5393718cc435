"""The guides for users of other libraries: names there and here exist, defaults and reasons are those of the code."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest
from guide_commands import ROOT

from vlmrl.config.aliases import ALIASES
from vlmrl.config.help import default_of
from vlmrl.config.openrlhf import REFUSED, REFUSED_VALUES
from vlmrl.config.verbs import RlConfig

CONFIG_TESTS = Path(__file__).parent / "config"
LIBRARIES = ("openrlhf", "trl", "verl")


def table(library: str, title: str) -> list[list[str]]:
    """The cells of the last table under a title, without its head."""
    guide = (ROOT / "examples" / f"from_{library}" / "README.md").read_text()
    section = guide.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r" ?\|", row)[1:-1]] for row in rows[2:]]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("library", LIBRARIES)
def test_our_defaults_are_those_of_the_settings(library: str) -> None:
    rows = table(library, "Defaults that differ")
    assert len(rows) > 8
    for _, theirs, ours, value in rows:
        (name,), (default,) = names(ours), names(value)
        assert default_of(RlConfig.settings()[name]) == default
        assert theirs != value


def test_trls_defaults_are_those_of_trl() -> None:
    trl = pytest.importorskip("trl")
    defaults = {field.name: field.default for field in fields(trl.GRPOConfig)}
    for theirs, value, _, _ in table("trl", "Defaults that differ"):
        assert str(getattr(defaults[names(theirs)[0]], "value", defaults[names(theirs)[0]])) == names(value)[0], theirs
    guide = (ROOT / "examples/from_trl/README.md").read_text()
    assert f"TRL {trl.__version__}." in guide
    for trainer in set(re.findall(r"`(\w+Trainer)`", guide)):
        assert trainer in trl.__all__


def test_the_arguments_in_trls_run_exist_and_are_those_of_our_command() -> None:
    trl = pytest.importorskip("trl")
    guide = (ROOT / "examples/from_trl/README.md").read_text()
    (call,) = re.findall(r"^GRPOConfig\(.*?\)$", guide, re.DOTALL | re.MULTILINE)
    tree = ast.parse(call, mode="eval").body
    assert isinstance(tree, ast.Call)
    given = {word.arg: ast.literal_eval(word.value) for word in tree.keywords}
    assert given.keys() <= {field.name for field in fields(trl.GRPOConfig)}
    per_step = 4 * given["per_device_train_batch_size"] * given["gradient_accumulation_steps"]
    assert f"--train.batch_size {per_step}" in guide
    assert f"--rollout.batch_size {per_step // given['num_generations']}" in guide


def test_reasons_are_those_of_the_messages() -> None:
    refused = {names(cell)[0]: reason for cell, reason in table("openrlhf", "Refused")}
    values = {f"{name} {value}": reason for name, row in REFUSED_VALUES.items() for value, reason in row.items()}
    assert refused == REFUSED | values
    for theirs, reason in table("trl", "Not here"):
        (name,) = names(theirs)
        assert not ALIASES[name].ours
        assert reason == ALIASES[name].note


def test_settings_of_easyr1_and_verl_exist_there() -> None:
    of_easyr1 = set((CONFIG_TESTS / "easyr1_settings.txt").read_text().split())
    of_verl = set((CONFIG_TESTS / "verl_settings.txt").read_text().split())
    ours = RlConfig.settings().keys()
    rows = table("verl", "Settings")
    assert len(rows) > 50
    for easyr1, verl, here, _ in rows:
        assert set(names(easyr1)) <= of_easyr1
        assert set(names(verl)) <= of_verl
        assert names(here)
        assert set(names(here)) <= ours
    for theirs, *_ in table("verl", "Defaults that differ"):
        assert set(names(theirs)) <= of_easyr1


@pytest.mark.parametrize("library", LIBRARIES)
def test_overrides_in_the_runs_exist(library: str) -> None:
    guide = (ROOT / "examples" / f"from_{library}" / "README.md").read_text()
    (block,) = re.findall(r"^```text\n(.*?)^```$", guide, re.DOTALL | re.MULTILINE)
    if library == "openrlhf":
        known = set((CONFIG_TESTS / "openrlhf_flags.txt").read_text().split())
        assert set(re.findall(r"--([\w.]+)", block)) <= known
    if library == "verl":
        known = {"config"} | {
            name for file in ("easyr1", "verl") for name in (CONFIG_TESTS / f"{file}_settings.txt").read_text().split()
        }
        assert set(re.findall(r"(?:^|\s)([\w.]+)=", block)) <= known
