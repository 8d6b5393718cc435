"""Labels are parsed in a process that may hang."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest

from vlmrl.config.reward import Scoring
from vlmrl.rewards import label_check
from vlmrl.rewards.label_check import LabelCheck, functions_that_need_labels, label_substitutes, other_columns


def test_built_in_functions_that_compare_with_a_label_need_one() -> None:
    assert functions_that_need_labels(Scoring(functions={"math": 1.0})) == "reward.functions math"
    assert functions_that_need_labels(Scoring(functions={"exact": 1.0})) == "reward.functions exact"
    assert functions_that_need_labels(Scoring(functions={"format": 1.0})) is None
    both = Scoring(functions={"format": 1.0, "math": 1.0, "exact": 1.0})
    assert functions_that_need_labels(both) == "reward.functions math and exact"


@pytest.mark.parametrize(
    ("parameters", "demands"),
    [
        ("response, label", True),
        ("response, label='x'", False),
        ("label, response, prompt=''", True),
        ("response, *, label", True),
        ("response, *, label=None, prompt", False),
        ("response", False),
        ("response, **others", False),
        ("queries, prompts, labels", False),
        ("completions, answer, **others", True),
        ("prompts, completions, *, solution", True),
        ("completions, answer=None, **others", False),
        ("completions, family", False),
    ],
)
def test_a_users_function_needs_a_label_when_its_parameter_has_no_default(
    parameters: str, demands: bool, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    for kind in ("def", "async def"):
        file.write_text(f"raise SystemExit  # never run\n{kind} score({parameters}):\n    return 1.0\n")
        needed = functions_that_need_labels(Scoring(remote_url=f"{file}:score"))
        assert (needed is not None) == demands
        assert needed is None or needed.startswith(f"reward.remote_url {file}:score (its parameter ")


def test_a_column_that_a_trl_function_requires_replaces_the_label(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def trl(completions, answer): ...\ndef user_rewarder(response, label): ...\n")
    assert label_substitutes(Scoring(remote_url=f"{file}:trl")) == {"answer"}
    assert not label_substitutes(Scoring(remote_url=f"{file}:own"))
    assert not label_substitutes(Scoring(remote_url=f"{file}:trl", functions={"math": 1.0}))


def test_other_columns_are_those_that_a_trl_function_requires(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    declared = "completions, prompts, images, answer, level, completion_ids, seldom=0, *, kind, often=1, **columns"
    file.write_text(f"def trl({declared}): ...\ndef user_rewarder(response, level): ...\n")
    assert other_columns(Scoring(remote_url=f"{file}:trl")) == {"level", "kind"}
    assert not other_columns(Scoring(remote_url=f"{file}:own"))
    assert not other_columns(Scoring(functions={"math": 1.0}))


def test_an_unreadable_file_is_left_to_the_loader(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def score(label:")
    for spec in ("gone.py:score", "bad.py:score", "~nosuchuser/x.py:score"):
        assert functions_that_need_labels(Scoring(remote_url=f"{tmp_path / spec}" if "~" not in spec else spec)) is None


def test_labels_without_formulas_start_no_process() -> None:
    with closing(LabelCheck(["math", "exact", "format"])) as check:
        assert check(["4", "145°", "red", "3:30", "12 cm", "x > 2", ""]) == [None] * 6 + ["it is empty"]
        assert not multiprocessing.active_children()


def test_formulas_are_parsed_once_and_apart() -> None:
    with closing(LabelCheck(["math"])) as check:
        assert check(["\\frac{1}{2}", "\\frac{1}{", "4", "\\frac{1}{"]) == [
            None,
            "it cannot be parsed",
            None,
            "it cannot be parsed",
        ]
        (process,) = multiprocessing.active_children()
        os.kill(int(process.pid or 0), signal.SIGKILL)
        time.sleep(0.3)
        assert check(["\\frac{1}{", "x^2 +"]) == ["it cannot be parsed"] * 2, "a new process takes over"
    assert not multiprocessing.active_children()


def test_other_functions_take_any_label() -> None:
    with closing(LabelCheck(["format"])) as check:
        assert check(["", "\\frac{1}{"]) == [None, None]
    with closing(LabelCheck(["exact"])) as check:
        assert check(["", "\\frac{1}{"]) == ["it is empty", None]


def test_a_timeout_leaves_labels_unknown() -> None:
    with closing(LabelCheck(["math"])) as check:
        assert check(["\\frac{1}{", "4"], limit_s=0.0) == [None, None]
        assert check(["\\frac{1}{", "4"]) == ["it cannot be parsed", None]


def test_a_label_is_blamed_after_two_hanging_parses(monkeypatch: pytest.MonkeyPatch) -> None:
    # A limit that no parse meets stands for a label whose parse never ends.
    monkeypatch.setattr(label_check, "_TIME_LIMIT_S", 0.001)
    with closing(LabelCheck(["math"])) as check:
        start = time.perf_counter()
        assert check(["\\int_0^1 \\frac{x^{12} + \\sqrt{x}}{1 + x} dx"]) == ["it takes too long to parse"]
        assert time.perf_counter() - start < 20
