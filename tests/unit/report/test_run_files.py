from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlmrl.report.run_files import read_facts, read_parameters, read_records, read_settings

DEEP = b"[" * 10**5 + b"]" * 10**5


def test_metrics_are_numbers_by_step_whatever_the_file_holds(tmp_path: Path) -> None:
    lines = [
        b'{"step": 2, "a/b": 0.5, "a/c": NaN, "a/d": "high", "a/e": [1], "a/f": 1' + b"0" * 400 + b', "a/g": true}',
        b'{"step": 1, "a/b": 0.25, "a/\xff": 1}',
        *(b"[1, 2]", b"3", b'{"step": true}', b'{"step": 1e3}', b'{"step": "1"}', b'{"step": 1' + b"0" * 30 + b"}"),
        b'{"step": 3, "a/b": ' + DEEP + b"}",
        b'{"step": 4, "a/',
    ]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
    assert read_records(tmp_path / "metrics.jsonl") == [
        {"step": 1, "a/b": 0.25, "a/\ufffd": 1},
        {"step": 2, "a/b": 0.5, "a/c": None, "a/f": None},
    ]
    assert read_records(tmp_path / "none") == []


def test_rows_of_parameters_that_are_numbers_are_read(tmp_path: Path) -> None:
    lines = ["part\ttrainable\tall", "a", "x\t\u00b2\t3", "y\t1"]
    (tmp_path / "parameters.tsv").write_bytes("\n".join(lines).encode() + b"\n\xff\t1\t2\n")
    assert read_parameters(tmp_path / "parameters.tsv") == [("\ufffd", 1, 2)]


@pytest.mark.parametrize(
    "text",
    [
        '{"total_steps": NaN, "placement": [1, [2]], "versions": "x", "unit": 3, "end": "x"}',
        '{"total_steps": -1, "placement": [[{}]], "versions": {"a": {"b": 1}}, "end": {"state": ["a"]}}',
        '{"total_steps": 1e300, "placement": [[NaN]], "other": 1}',
        '{"a": ' + DEEP.decode() + "}",
        "[1]",
        '{"cut',
    ],
)
def test_facts_of_another_form_are_left_out(text: str, tmp_path: Path) -> None:
    (tmp_path / "facts.json").write_text(text)
    assert read_facts(tmp_path / "facts.json") == {}


def test_facts_of_a_run_are_read(tmp_path: Path) -> None:
    facts = {"total_steps": 3, "placement": [["actor", 2, "0"]], "end": {"state": "failed"}}
    (tmp_path / "facts.json").write_text(json.dumps(facts))
    assert read_facts(tmp_path / "facts.json") == facts


@pytest.mark.parametrize(
    "text", ["a: &a [*a]", "a: &a {b: *a}", "? [a]\n: 1", "a: " + "[" * 3000, "a: 2020-99-99", "- a"]
)
def test_settings_that_are_none_are_left_out(text: str) -> None:
    assert read_settings(text) == {}
