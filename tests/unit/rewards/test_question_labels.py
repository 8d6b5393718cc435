"""Held-out questions of supervised training are compared with labels that a response can match."""

from __future__ import annotations

import numpy as np
import pytest

from vlmrl.config.reward import Scoring
from vlmrl.errors import DataError
from vlmrl.rewards.question_labels import label_questions
from vlmrl.types import Prompt

REASONING = "There are 3 red circles. Then there are 2 blue ones, so I count 5 of them."
MATH, EXACT = Scoring(functions={"math": 1.0}), Scoring(functions={"exact": 1.0})


def question(row: int, answer: str, label: str | None = None) -> Prompt:
    tokens = np.zeros(1, np.int64)
    return Prompt(index=row, source=f"rows:{row}", text="q", tokens=tokens, request=tokens, label=label, answer=answer)


def refuse(line: str) -> None:
    raise AssertionError(line)


def test_a_row_without_a_label_is_compared_with_its_response() -> None:
    rows = [question(0, "4"), question(1, "It is 5.\nSo \\boxed{5}"), question(2, REASONING, label="5")]
    assert [row.label for row in label_questions("s", rows, MATH, refuse)] == ["4", rows[1].answer, "5"]


def test_responses_that_reason_are_no_labels() -> None:
    rows = [question(0, REASONING), question(1, "<think>\nhm\n</think>\n\n4")]
    with pytest.raises(DataError) as error:
        label_questions("s", rows, MATH, refuse)
    message = str(error.value)
    assert "evaluation set s: 2 of 2 rows have labels that reward.functions math cannot use: rows:0 " in message
    assert "set data.label_key to the column of the final answers, end responses with \\boxed{...}" in message


def test_rows_without_usable_labels_get_no_responses() -> None:
    said: list[str] = []
    rows = [question(0, REASONING), question(1, "4"), question(2, "two lines\nof text", label=" ")]
    assert [row.source for row in label_questions("s", rows, MATH, said.append)] == ["rows:1"]
    assert said[0].startswith("evaluation set s: 2 of 3 rows")
    assert "rows:2 ' ' (it is empty)" in said[0]
    assert said[0].endswith("These rows get no responses")


def test_labels_of_a_column_are_not_taken_for_responses() -> None:
    with pytest.raises(DataError, match=r"\(it is empty\); set data.label_key to the column of the final answers$"):
        label_questions("s", [question(0, "4", label="")], EXACT, refuse)


@pytest.mark.parametrize("reward", [EXACT, Scoring(functions={"format": 1.0}), Scoring(functions={})])
def test_functions_that_compare_whole_texts_or_none_take_any_response(reward: Scoring) -> None:
    assert label_questions("s", [question(0, REASONING)], reward, refuse)[0].label == REASONING
