import time

import pytest

from vlmrl.rewards.boxed import last_boxed


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("so \\boxed{4}", "4"),
        ("\\boxed{1}, no: \\boxed{ 2 }.", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{\\boxed{3}}", "3"),
        ("\\boxed {5}", "5"),
        ("}} { \\boxed{6}", "6"),
        ("\\boxed{7} and then \\boxed{8", "7"),
        ("\\boxed{}", ""),
        ("\\boxed{1\\\\}", "1\\\\"),
        ("no box", None),
        ("\\boxed 9", None),
        ("", None),
    ],
)
def test_the_last_closed_box_counts(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


def test_a_hundred_thousand_open_boxes_are_fast() -> None:
    start = time.perf_counter()
    assert last_boxed("\\boxed{" * 100_000) is None
    assert time.perf_counter() - start < 2
