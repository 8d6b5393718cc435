import pytest

from vlmrl.rewards.format import score

TAGS = "Answer as <think>...</think><answer>...</answer>. How many?"


@pytest.mark.parametrize(
    ("prompt", "response", "value"),
    [
        ("How many?", "so \\boxed{4}", 1.0),
        ("How many?", "<think>a</think> <answer>4</answer>", 1.0),
        ("How many?", "4", 0.0),
        ("How many?", "\\boxed{}", 0.0),
        ("How many?", "\\boxed{4", 0.0),
        (TAGS, "<think>a</think>\n<answer>4</answer>\n", 1.0),
        (TAGS, "\\boxed{4}", 0.0),
        (TAGS, "<answer>4</answer>", 0.0),
        (TAGS, "<think>a</think><answer>  </answer>", 0.0),
        (TAGS, "<think>a</think> hm <answer>4</answer>", 0.0),
        (TAGS, "<think>a</think><answer>4</answer><answer>5</answer>", 0.0),
        (TAGS, "<answer>4</answer><think>a</think>", 0.0),
        (TAGS + "<think>\n", "a</think><answer>4</answer>", 1.0),
        (TAGS + "<think>\n", "</think><answer>4</answer>", 0.0),
        (TAGS, "<think></think><answer>4</answer>", 0.0),
        (TAGS, "<think> \n</think><answer>4</answer>", 0.0),
        (TAGS, "<think>a</think><answer>\\boxed{4}</answer>", 1.0),
        (TAGS, "<think>a</think><answer>\\boxed{}</answer>", 0.0),
        ("How many?", "<think></think><answer>4</answer>", 0.0),
        (TAGS, "", 0.0),
    ],
)
def test_the_requested_format_scores_1(prompt: str, response: str, value: float) -> None:
    assert score(prompt, response) == value
