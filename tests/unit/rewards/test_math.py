import threading
import time

import pytest

from vlmrl.rewards.math import score


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
        ("\\boxed{5}", "4", 0.0),
        ("\\boxed{}", "4", 0.0),
        ("", "4", 0.0),
        ("I do not know", "4", 0.0),
        ("\\boxed{\\frac{1}{0}}", "4", 0.0),
    ],
)
def test_equal_in_mathematics_is_right(response: str, label: str, value: float) -> None:
    assert score(response, label) == value


def test_an_anagram_is_not_the_word() -> None:
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
def test_a_hostile_answer_scores_zero_and_ends(response: str) -> None:
    start = time.perf_counter()
    assert score(response, "4") == 0.0
    assert time.perf_counter() - start < 9


def test_it_works_outside_the_main_thread() -> None:
    values: list[float] = []
    thread = threading.Thread(target=lambda: values.append(score("\\boxed{1/4}", "\\frac{2}{8}")))
    thread.start()
    thread.join()
    assert values == [1.0]
