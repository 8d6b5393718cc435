import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import math_verify.parser
import pytest
from math_verify.errors import TimeoutException

from vlmrl.rewards.failures import TooHardError
from vlmrl.rewards.math import score, unusable
from vlmrl.rewards.spelling import needs_no_parser


@pytest.mark.parametrize(
    ("response", "label", "value"),
    [
        ("so the answer is \\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("\\boxed{0.5}", "\\frac{1}{2}", 1.0),
        ("The answer is 1/2.", "0.5", 1.0),
        ("\\boxed{x = 4}", "4", 1.0),
        ("\\boxed{2\\sqrt{2}}", "\\sqrt{8}", 1.0),
        ("\\boxed{2\\sqrt{2}}", "$\\sqrt{8}$", 1.0),
        ("\\boxed{(1, 2)}", "(1,2)", 1.0),
        ("\\boxed{(2, 1)}", "(1,2)", 0.0),
        ("\\boxed{50\\%}", "50\\%", 1.0),
        ("\\boxed{4 \\text{ cm}}", "4", 1.0),
        ("\\boxed{\\text{red}}", "Red", 1.0),
        ("\\boxed{4}, so \\boxed{5}", "4", 0.0),
        ("\\boxed{１／２}", "0.5", 1.0),
        ("\\boxed{0.5}", "０．５", 1.0),
        ("\\boxed{cafe\u0301}", "Café", 1.0),
        ("\\boxed{x2}", "x²", 0.0),
        ("word " * 2000 + "so it is ４２", "42", 1.0),
        ("\\boxed{5}", "4", 0.0),
        ("\\boxed{}", "4", 0.0),
        ("", "4", 0.0),
        ("I do not know", "4", 0.0),
        ("\\boxed{\\frac{1}{0}}", "4", 0.0),
    ],
)
def test_mathematically_equal_answers_match(response: str, label: str, value: float) -> None:
    assert score(response, label) == value


@pytest.mark.parametrize(
    ("content", "label"),
    [
        ("4", "4"),
        ("A", "A"),
        ("(A)", "A"),
        ("B. 12 cm", "B"),
        ("(B) 12 cm", "(B)"),
        ("yes", "Yes"),
        ("3.5", "7/2"),
        ("12 cm", "12"),
        ("12 cm", "12 cm"),
        ("12 square cm", "12"),
        ("3:30", "03:30"),
        ("$\\frac{1}{2}$", "0.5"),
        ("\\frac{1}{2}", "0.5"),
        ("x = 4", "4"),
        ("The answer is 4.", "4"),
        ("The answer is $\\sqrt{8}$.", "2\\sqrt{2}"),
        ("it is \\boxed{4}", "4"),
        ("red.", "red"),
    ],
)
def test_the_content_of_answer_tags_is_the_answer(content: str, label: str) -> None:
    assert score(f"<think>1+1</think><answer>{content}</answer>", label) == 1.0
    assert score(f"<think>\\boxed{{99}}</think>\n<answer>\n{content}\n</answer>\n", label) == 1.0
    assert score(f"<think>{content}</think><answer>99</answer>", label) == 0.0
    assert score(f"<think>{content}</think><answer></answer>", label) == 0.0


@pytest.mark.parametrize(
    ("response", "label"),
    [
        ("145", "145°"),
        ("145°", "145"),
        ("145^\\circ", "145°"),
        ("145°", "145^\\circ"),
        ("145^{\\circ}", "145 degrees"),
        ("36", "\\$36"),
        ("\\$36", "36"),
        ("\\$36.00", "\\$36"),
        ("\\$36", "$36$"),
        ("36 dollars", "\\$36"),
        ("7", '["7"]'),
        ("7", "[7]"),
        ("four", '["4", "four"]'),
        ("4", '["4", "four"]'),
        ("1, 2", "[1, 2]"),
        ("[1, 2]", "[1, 2]"),
        ("2, 1", '["1", "2"]'),
        ("\\frac{1}{2}", '["0.5"]'),
        ("ab", "ab"),
        ("AB", "ab"),
        ("\\text{ab}", "$ab$"),
        ("a \\cdot b", "ab"),
        ("x1", "x1"),
        ("\\text{H2O}", "H2O"),
        ("\\pi", "pi"),
        ("\\frac{\\pi}{2}", "π/2"),
        ("3\\sqrt{2}", "3√2"),
        ("x^2", "x²"),
        ("12", "12 cm"),
        ("12 cm", "12"),
        ("12 cm", "12 centimeters"),
        ("12", "12 cm^2"),
        ("12 \\text{ cm}^2", "12 square centimeters"),
        ("0.5 m", "\\frac{1}{2} meters"),
        ("5 am", "5 a.m."),
        ("5:30 pm", "5:30 PM"),
        ("5:30", "5:30 pm"),
        ("20°", "20°C"),
        ("4m^2", "(2m)^2"),
        ("2, 1", "\\{1, 2\\}"),
        ("\\{2, 1\\}", "\\{1, 2\\}"),
        ("1, 2", "(1, 2)"),
        ("(1, 2)", "1, 2"),
        ("\\left(1, 2\\right)", "(1,2)"),
        ("C", "\\text{(C)}"),
        ("3", "<answer> 3 </answer>"),
    ],
)
def test_a_label_is_matched_in_every_spelling(response: str, label: str) -> None:
    assert score(f"\\boxed{{{response}}}", label) == 1.0


@pytest.mark.parametrize(
    ("response", "label"),
    [
        ("144", "145°"),
        ("145 cm", "145°"),
        ("35", "\\$36"),
        ("€36", "\\$36"),
        ("8", '["7"]'),
        ("five", '["4", "four"]'),
        ("1", "[1, 2]"),
        ("1", '["1", "2"]'),
        ("A", '["A", "B"]'),
        ("1, 3", "[1, 2]"),
        ("ba", "ab"),
        ("ba", "$ab$"),
        ("ba", "\\text{ab}"),
        ("b \\cdot a", "ab"),
        ("1x", "x1"),
        ("2HO", "H2O"),
        ("B", "A"),
        ("A. 5 or B. 6", "A"),
        ("12 m", "12 cm"),
        ("12 \\text{ m}", "12 \\text{ cm}"),
        ("12 cm^2", "12 cm"),
        ("12 cm", "12 cm^3"),
        ("120 mm", "12 cm"),
        ("13 cm", "12 cm"),
        ("5 am", "5 pm"),
        ("5:30 am", "5:30 pm"),
        ("20°F", "20°C"),
        ("60 km/h", "60 mph"),
        ("(1, 2)", "\\{1, 2\\}"),
        ("\\{1, 2\\}", "(1, 2)"),
        ("(2, 1)", "(1, 2)"),
        ("2, 1", "(1, 2)"),
        ("[1, 2]", "(1, 2)"),
        ("\\{1, 3\\}", "\\{1, 2\\}"),
        ("3m^2", "(2m)^2"),
        ("", "145°"),
    ],
)
def test_a_different_value_unit_bracket_or_letter_is_wrong(response: str, label: str) -> None:
    assert score(f"\\boxed{{{response}}}", label) == 0.0
    assert score(f"<think>so</think><answer>{response}</answer>", label) == 0.0


def test_a_sentence_must_match_the_unit() -> None:
    assert score("The rod is 12 cm.", "12 cm") == 1.0
    assert score("The rod is 12 m.", "12 cm") == 0.0
    assert score("The rod is 12.", "12 cm") == 1.0
    assert score("<answer>It opens at 5 am</answer>", "5 pm") == 0.0


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        ("4", None),
        ("145°", None),
        ("\\frac{1}{2}", None),
        ("The cat, who sat.", None),
        ("y = 2x + 3", None),
        ('["7"]', None),
        ("½", None),
        ("\\frac{1}{", "it cannot be parsed"),
        ("x^2 +", "it cannot be parsed"),
        ("", "it is empty"),
        ('[""]', "it is empty"),
        (">", None),
        ("?", None),
        ("file_name.txt", None),
        ("\\emptyset", None),
        ("\\$5-\\$10", None),
        ("\\{1, 2\\}", None),
        ("1 + " * 400, "it is longer than 1000 characters"),
    ],
)
def test_a_label_that_no_response_can_match_is_reported(label: str, reason: str | None) -> None:
    assert unusable(label) == reason
    assert reason in (None, "it is empty") or not needs_no_parser(label)


def test_a_parse_that_was_stopped_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if the machine had paused: math-verify's alarm interrupts its work once.
    extract, rings = math_verify.parser.extract_target_from_pred, iter([True])

    def stalled(*given: Any, **options: Any) -> Any:
        if next(rings, False):
            os.kill(os.getpid(), signal.SIGALRM)
        return extract(*given, **options)

    monkeypatch.setattr(math_verify.parser, "extract_target_from_pred", stalled)
    label = "\\frac{17}{34} + 1"
    with pytest.raises(TooHardError, match="parsing took longer than 2 s"):
        score("\\boxed{\\frac{3}{2}}", label)
    assert score("\\boxed{\\frac{3}{2}}", label) == 1.0


def test_a_stopped_comparison_has_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["vlmrl.rewards.math"]

    def stalled(*_: Any, **options: Any) -> bool:
        if options.get("raise_on_error"):
            raise TimeoutException("Timeout during comparison")
        return False  # math-verify's default

    monkeypatch.setattr(module, "verify", stalled)
    with pytest.raises(TooHardError, match="comparing took longer than 2 s"):
        score("\\boxed{x + 1}", "1 + x")


def test_an_anagram_does_not_match() -> None:
    assert score("\\boxed{listen}", "silent") == 0.0
    assert score("\\boxed{silent}", "silent") == 1.0


def test_a_clock_time_is_not_a_fraction() -> None:
    assert score("\\boxed{1:10}", "3:30") == 0.0
    assert score("\\boxed{03:30}", "3:30") == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "\\boxed{9^{9^{9^9}}}",
        "\\boxed{(10^9)!}",
        "\\boxed{" + "(" * 400 + "1" + ")" * 400 + "}",
        "\\boxed{" + "\\frac{1}{" * 100 + "2" + "}" * 100 + "}",
        "\\boxed{" + "1" * 5000 + "}",
        "$" * 200_000,
        "1 + " * 100_000,
        "\\boxed{\x00\ud800}",
    ],
    ids=["tower", "factorial", "parentheses", "fractions", "digits", "dollars", "sum", "not-unicode"],
)
def test_a_hostile_response_scores_zero_in_time(response: str) -> None:
    start = time.perf_counter()
    with suppress(TooHardError):
        assert score(response, "4") == 0.0
    assert time.perf_counter() - start < 9


def test_it_works_outside_the_main_thread() -> None:
    values: list[float] = []
    thread = threading.Thread(target=lambda: values.append(score("\\boxed{1/4}", "\\frac{2}{8}")))
    thread.start()
    thread.join()
    assert values == [1.0]
