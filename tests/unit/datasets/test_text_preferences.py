"""Right and wrong responses to arithmetic questions."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

import pytest

from vlmrl.data.rows import load_rows
from vlmrl.datasets.arithmetic import rows as arithmetic_rows
from vlmrl.datasets.text_preferences import Expression
from vlmrl.errors import ConfigError

_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def rows(options: str, split: str = "train") -> Any:
    return load_rows(f"text_preferences?{options}", split=split, max_samples=10**9, seed=0)


def calculated(text: str) -> int:
    """The value of an expression, by Python's grammar."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            return _OPERATIONS[type(node.op)](value(node.left), value(node.right))
        assert isinstance(node, ast.Constant)
        return int(node.value)  # type: ignore[arg-type]

    return value(ast.parse(text.replace("×", "*"), mode="eval").body)


def test_the_chosen_response_is_right_and_the_rejected_one_is_not() -> None:
    for row in rows("difficulty=1+2+3&size=300"):
        value = calculated(row["input"].removeprefix("What is ").removesuffix("?"))
        assert int(row["chosen"]) == value != int(row["rejected"])
        assert (value < 0) == row["rejected"].startswith("-")


def test_lengths_and_sizes_do_not_tell_right_from_wrong() -> None:
    pairs = [(row["chosen"], row["rejected"]) for row in rows("difficulty=1+2+3&size=900")]
    longer = sum((len(a) > len(b)) - (len(a) < len(b)) for a, b in pairs)
    assert abs(longer) / len(pairs) < 0.04
    assert 0.45 < sum(int(a) < int(b) for a, b in pairs) / len(pairs) < 0.55


def test_labels_end_at_the_first_wrong_step() -> None:
    wrongs = {(wrong.error, wrong.solution.steps) for wrong in Expression.parse("(2 + 3) × 4").mistakes()}
    assert wrongs >= {
        ("misread number", ("2 + 4 = 6", "6 × 4 = 24")),
        ("misread number", ("2 + 3 = 5", "5 × 5 = 25")),
        ("off by one", ("2 + 3 = 6", "6 × 4 = 24")),
        ("other operation", ("2 - 3 = -1", "-1 × 4 = -4")),
        ("brackets left out", ("3 × 4 = 12", "2 + 12 = 14")),
    }
    for row in rows("kind=steps&difficulty=3&size=100"):
        first, second, answer = row["response"].split("\n\n")
        is_right = calculated(row["input"].removeprefix("What is ").removesuffix("?")) == int(row["label"])
        assert is_right
        left, value = first.split(" = ")
        holds = calculated(left) == int(value)
        assert row["labels"][0] <= holds
        assert row["labels"][2] == (answer == f"The answer is {row['label']}.")
        assert second.split(" = ")[1] == answer.removeprefix("The answer is ").removesuffix(".")


def test_a_question_is_in_the_same_split_as_in_arithmetic() -> None:
    trained = {row["input"] for row in arithmetic_rows(split="train", seed=0, size=2000)}
    assert not trained & {row["input"] for row in rows("size=200", "test")}


@pytest.mark.parametrize("options", ["difficulty=4", "kind=pair"])
def test_options_out_of_range(options: str) -> None:
    with pytest.raises(ConfigError, match=r"text_preferences\?"):
        rows(options)
