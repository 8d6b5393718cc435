"""Right and wrong responses to `visual_math`: wrong ones are wrong, and only the picture tells them apart."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from vlmrl.data.rows import load_rows
from vlmrl.datasets.visual_math import FAMILIES
from vlmrl.datasets.visual_math import rows as visual_math_rows
from vlmrl.errors import ConfigError


def rows(options: str, split: str = "train", seed: int = 0) -> Any:
    return load_rows(f"visual_preferences?pixels=56&{options}", split=split, max_samples=10**9, seed=seed)


def best_threshold(right: list[int], wrong: list[int]) -> float:
    """Accuracy of the best classifier that compares one number with a threshold."""
    size = len(right) + len(wrong)
    above = [(sum(x > t for x in right) + sum(x <= t for x in wrong)) / size for t in {*right, *wrong}]
    return max(max(share, 1 - share) for share in above)


@pytest.mark.parametrize("worked", ["false", "true"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_only_the_rejected_response_has_another_answer(family: str, worked: str) -> None:
    for row in rows(f"families={family}&difficulty=1+2+3&size=60&worked={worked}&boxed=true"):
        chosen, rejected = (re.findall(r"\\boxed\{(.*?)\}", row[name]) for name in ("chosen", "rejected"))
        assert chosen == [row["label"]]
        assert len(rejected) == 1
        assert rejected != chosen
        assert row["error"]
        assert len(row["images"]) == 1


@pytest.mark.parametrize("worked", ["false", "true"])
def test_form_does_not_tell_right_from_wrong(worked: str) -> None:
    pairs = list(rows(f"difficulty=1+2+3&size=900&worked={worked}"))
    for feature in (
        len,
        lambda text: sum(character.isdigit() for character in text),
        lambda text: text.count("\n"),
        lambda text: text.count(" "),
        lambda text: int("-" in text),
        lambda text: int("boxed" in text),
    ):
        values = [[feature(row[name]) for row in pairs] for name in ("chosen", "rejected")]
        assert best_threshold(*values) < 0.53
    # Within a pair, too, and also the answers themselves.
    longer = Counter(
        (len(row["chosen"]) > len(row["rejected"])) - (len(row["chosen"]) < len(row["rejected"])) for row in pairs
    )
    assert abs(longer[1] - longer[-1]) / len(pairs) < 0.06
    if worked == "false":
        larger = [int(row["rejected"].replace(":", "")) > int(row["chosen"].replace(":", "")) for row in pairs]
        assert 0.45 < sum(larger) / len(larger) < 0.55


@pytest.mark.parametrize("family", list(FAMILIES))
def test_splits_share_no_picture_and_those_of_visual_math_no_question(family: str) -> None:
    pictures = {
        split: {(row["images"][0].tobytes(), row["input"]) for row in rows(f"families={family}&size=100", split)}
        for split in ("train", "test")
    }
    assert len(pictures["test"]) > 40
    assert not {picture for picture, _ in pictures["train"]} & {picture for picture, _ in pictures["test"]}
    trained = visual_math_rows(split="train", seed=0, size=150, families=(family,), pixels=56)
    assert not {(row["images"][0].tobytes(), row["input"]) for row in trained} & pictures["test"]


def test_unpaired_rows_have_one_response_and_whether_it_is_right() -> None:
    unpaired = list(rows("kind=unpaired&size=200"))
    assert all((row["response"] == row["expected"]) is row["label"] for row in unpaired)
    assert all(bool(row["error"]) is not row["label"] for row in unpaired)
    assert 70 < sum(row["label"] for row in unpaired) < 130
    assert {family: len({row["label"] for row in unpaired if row["family"] == family}) for family in FAMILIES} == (
        dict.fromkeys(FAMILIES, 2)
    )


def test_steps_are_labelled_up_to_the_first_mistake() -> None:
    solutions = list(rows("families=count&difficulty=1&kind=steps&size=60"))
    for row in solutions:
        steps = row["response"].split("\n\n")
        assert len(steps) == len(row["labels"]) == 6  # four rows of the grid, their sum, the answer
        counts = [int(step.partition(": ")[2]) for step in steps[:4]]
        assert steps[4] == f"{' + '.join(map(str, counts))} = {sum(counts)}"
        assert steps[5] == f"The answer is {sum(counts)}."
        assert (row["labels"][-1] == 1) == (str(sum(counts)) == row["label"]) == (not row["error"])
        assert row["labels"] == sorted(row["labels"], reverse=True)
    assert {sum(row["labels"]) for row in solutions} >= {0, 1, 2, 3, 6}


def test_a_separator_of_the_users_own() -> None:
    (row,) = rows("families=clock&kind=steps&size=1&separator=;")
    assert len(row["response"].split(";")) == len(row["labels"]) == 3


def test_rows_depend_only_on_seed_split_and_row() -> None:
    first, again = rows("size=10"), rows("size=30")
    for i in (7, 0, 3):
        a, b = first[i], again[i]
        assert a.pop("images")[0].tobytes() == b.pop("images")[0].tobytes()
        assert a == b
    assert [row["chosen"] for row in rows("size=20", seed=1)] != [row["chosen"] for row in rows("size=20")]


@pytest.mark.parametrize("options", ["families=algebra", "difficulty=4", "pixels=20", "kind=triples"])
def test_options_out_of_range(options: str) -> None:
    with pytest.raises(ConfigError, match=r"visual_preferences\?"):
        load_rows(f"visual_preferences?{options}", split="train", max_samples=1, seed=0)
