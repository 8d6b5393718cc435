import re

import pytest

from vlmrl.data.rows import load_rows
from vlmrl.errors import ConfigError


@pytest.mark.parametrize("difficulty", [1, 2, 3])
def test_labels_equal_pythons_results(difficulty: int) -> None:
    rows = load_rows(f"arithmetic?difficulty={difficulty}&size=200", split="train", max_samples=999, seed=0)
    for row in rows:
        text = re.fullmatch(r"What is ([-+×() \d]+)\?", row["input"])
        assert text is not None
        assert row["label"] == str(eval(text[1].replace("×", "*")))  # noqa: S307 - only digits and signs
        assert row["answer"] == row["label"]
        assert row["difficulty"] == difficulty


def test_no_sum_is_in_two_splits() -> None:
    questions = {
        split: {
            row["input"]
            for seed in (0, 1)
            for row in load_rows("arithmetic?size=300", split=split, max_samples=999, seed=seed)
        }
        for split in ("train", "test", "validation")
    }
    assert not questions["train"] & questions["test"]
    assert not questions["train"] & questions["validation"]
    assert not questions["test"] & questions["validation"]


def test_only_the_answer_is_boxed() -> None:
    row = load_rows("arithmetic?boxed=true&size=1", split="train", max_samples=9, seed=0)[0]
    assert row["answer"] == f"\\boxed{{{row['label']}}}"


def test_an_unknown_difficulty_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"difficulty=1\+4: choose among 1, 2 and 3"):
        load_rows("arithmetic?difficulty=1+4", split="train", max_samples=9, seed=0)
