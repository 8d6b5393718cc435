import time

import pytest

from vlmrl.rewards.exact import number, score, unusable


@pytest.mark.parametrize(
    ("response", "label", "value"),
    [
        ("4", "4", 1.0),
        (" 4\n", "4", 1.0),
        ("4.0", "4", 1.0),
        ("4.", "4", 1.0),
        ("8/2", "4", 1.0),
        ("1,000", "1000", 1.0),
        ("4e2", "400", 1.0),
        ("The answer is \\boxed{4}.", "4", 1.0),
        ("\\boxed{3} or rather \\boxed{4}", "4", 1.0),
        ("\\boxed{4} or rather \\boxed{3}", "4", 0.0),
        ("4", "\\boxed{4}", 1.0),
        ("red", "red", 1.0),
        ("Red", "red", 0.0),
        ("The answer is 4", "4", 0.0),
        ("5", "4", 0.0),
        ("44", "4", 0.0),
        ("", "4", 0.0),
        ("", "", 0.0),
        ("\\boxed{}", "", 0.0),
        ("nan", "nan", 1.0),
        ("1,00", "100", 0.0),
        ("<think>1+1</think><answer>4</answer>", "4", 1.0),
        ("<think>1+1</think><answer> A </answer>", "A", 1.0),
        ("<think>1+1</think><answer>yes</answer>", "yes", 1.0),
        ("<think>1+1</think><answer>3.50</answer>", "3.5", 1.0),
        ("<think>1+1</think><answer>12 cm</answer>", "12 cm", 1.0),
        ("<think>1+1</think><answer>3:30</answer>", "3:30", 1.0),
        ("<answer>it is \\boxed{4}</answer>", "4", 1.0),
        ("<think>\\boxed{3}</think><answer>4</answer>", "4", 1.0),
        ("<think>\\boxed{4}</think><answer>5</answer>", "4", 0.0),
        ("<answer>4</answer><answer>5</answer>", "4", 0.0),
        ("<answer>4", "4", 0.0),
        ("<answer></answer>", "4", 0.0),
        ("<answer></answer>", "", 0.0),
        ("\\boxed{3}", "<answer> 3 </answer>", 1.0),
        ("7", '["7"]', 1.0),
        ("four", '["4", "four"]', 1.0),
        ("1, 2", "[1, 2]", 1.0),
        ("1", "[1, 2]", 0.0),
        ("[", "[", 1.0),
        ("cafe\u0301", "café", 1.0),
        ("\\boxed{café}", "cafe\u0301", 1.0),
        ("<answer>４２</answer>", "42", 1.0),
        ("-1.5", "－１．５", 1.0),
        ("Ａ", "A", 1.0),
        ("x2", "x²", 0.0),
        ("naïve", "naive", 0.0),
    ],
)
def test_an_answer_equal_to_the_label_scores_1(response: str, label: str, value: float) -> None:
    assert score(response, label) == value


@pytest.mark.parametrize(("label", "reason"), [("4", None), ("", "it is empty"), ('[""]', "it is empty")])
def test_an_empty_label_matches_nothing(label: str, reason: str | None) -> None:
    assert unusable(label) == reason


@pytest.mark.parametrize(
    "text", ["", "-", ".", "+e4", "e4", "1/0", "inf", "nan", "1e9999", "9" * 500, "٤", "1_000", "1.2.3"]
)
def test_other_text_is_compared_as_text(text: str) -> None:
    assert number(text) is None


@pytest.mark.parametrize(
    "response",
    [
        "1e999999999",
        "9" * 1_000_000,
        "\\boxed{" * 100_000,
        "{" * 1_000_000,
        "\x00\ud800",
        "1/" * 9999,
        "<answer>" * 100_000 + "</answer>" * 9,
        "\u0301\u0316" * 500_000,
        "\\boxed{" + "\u0301\u0316" * 2000 + "}",
    ],
)
def test_a_hostile_response_scores_zero_at_once(response: str) -> None:
    start = time.perf_counter()
    assert score(response, "4") == 0.0
    assert time.perf_counter() - start < 2
