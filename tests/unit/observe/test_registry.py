"""The registry has every metric that the source writes and no other, and the guide shows it."""

import ast
import re
from fnmatch import fnmatch
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from vlmrl.config.verb_list import VERBS
from vlmrl.observe.metric_info import MetricInfo
from vlmrl.observe.registry import describe, group_titles, guide_table, metrics

ROOT = Path(__file__).resolve().parents[3]
GUIDE = ROOT / "vlmrl/observe/README.md"
_NO_METRICS = {"*/*", "application/json", "km/h", "mi/h", "s/step", "tokens/s", "tokens/response"}
"""Strings of the same shape."""
_COMPUTED = {"time/*_s", "time/start/*_s"}
"""One f-string for all phases."""


def phases() -> set[str]:
    """The phases that the source measures."""
    source = "\n".join(path.read_text() for path in (ROOT / "vlmrl").rglob("*.py"))
    starts = {f"start/{name}" for name in re.findall(r'start_times\.end\("(\w+)"\)', source)}
    return starts | set(re.findall(r'\.phase\("(\w+)"\)', source))


def written_metrics() -> set[str]:
    """Names of metrics in the source, with `*` for variable parts."""
    result = set()
    for folder in ("trainer", "learning", "cluster", "data", "verify", "rewards", "observe"):
        for file in (ROOT / "vlmrl" / folder).glob("*.py"):
            if file.name in ("metric_rows.py", "registry.py"):
                continue
            tree = ast.parse(file.read_text())
            inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
                    result.add(node.value)
                elif isinstance(node, ast.JoinedStr):
                    result.add("".join(p.value if isinstance(p, ast.Constant) else "*" for p in node.values))  # type: ignore[misc]
    names = {name for name in result - _NO_METRICS if re.fullmatch(r"([a-z]+|\*)(/[a-z0-9_@*]+)+", name)}
    names = {name for name in names if not name.startswith("samples/") and name != "eval/*"}  # tables and images
    spread = {f"{area}{name[1:]}" for name in names if name.startswith("*/") for area in ("policy", "value", "rm")}
    measured = {f"time/{phase}_s" for phase in phases()}
    return ({name for name in names if not name.startswith("*/")} - _COMPUTED) | spread | measured


def listed_metrics() -> set[str]:
    return {re.sub(r"<\w+>", "*", info.name) for info in metrics()}


def test_every_metric_of_the_source_is_registered_and_no_other() -> None:
    written, listed = written_metrics(), listed_metrics()
    assert len(listed) > 100
    assert not [name for name in sorted(written) if not any(fnmatch(name, pattern) for pattern in listed)]
    assert sorted(listed - written) == []


def test_the_guide_shows_the_registry() -> None:
    spec = spec_from_file_location("metrics_guide", ROOT / "assets/metrics_guide.py")
    assert spec is not None
    assert spec.loader is not None
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.with_tables(GUIDE.read_text()) == GUIDE.read_text(), "run `make metrics`"


def test_a_group_that_does_not_exist_is_an_error_that_names_the_groups() -> None:
    with pytest.raises(ValueError, match="'Money'; there are: Rewards and responses, Environments"):
        guide_table("Money")


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("reward/mean", "reward/mean"),
        ("eval/math/pass@4", "eval/<set>/pass@<k>"),
        ("eval/math/count/pass@1", "eval/<set>/<value>/pass@1"),
        ("eval/org/math/reward", "eval/<set>/reward"),
        ("reward/parts/judge/style", "reward/parts/<source>"),
        ("verify/images/critic_gap", "verify/images/<path>_gap"),
        ("time/rollout_s", "time/rollout_s"),
    ],
)
def test_a_name_is_described_by_its_pattern(name: str, pattern: str) -> None:
    info = describe(name)
    assert info is not None
    assert info.name == pattern
    assert info.group in group_titles()


def test_an_unknown_metric_has_no_description() -> None:
    assert describe("reward/mean/x") is None
    assert describe("own/metric") is None


def test_meanings_are_complete_by_themselves() -> None:
    names = [info.name for info in metrics()]
    assert len(set(names)) == len(names)
    for info in metrics():
        assert info.meaning
        assert not re.match(r"the same|those|as above", info.meaning), info.name
        assert "|" not in info.meaning + info.warning
        assert bool(info.warning) == (info.warn_above is not None or info.warn_below is not None)


def test_settings_in_meanings_exist() -> None:
    settings = {name for verb in VERBS for name in verb.settings()}
    sections = {section for verb in VERBS for section in verb.sections()}
    for info in metrics():
        for name in re.findall(r"`((?:[a-z]\w*\.)+\w+)`", info.meaning + info.warning):
            assert name.partition(".")[0] not in sections or name in settings, f"{info.name}: no setting {name}"


def test_a_value_beyond_a_bound_is_suspicious() -> None:
    info = MetricInfo("a/b", "fraction", "x", warn_above=0.5, warn_below=0.1, warning="y")
    assert [info.is_suspicious(value) for value in (0.6, 0.5, 0.1, 0.05, float("nan"))] == [
        True,
        False,
        False,
        True,
        False,
    ]
    assert not MetricInfo("a/b", "count", "x").is_suspicious(1e9)
