"""Rows made of responses and their scores."""

from __future__ import annotations

import numpy as np
import pytest

from vlmrl.trainer.generation import Record, Totals, records, rows
from vlmrl.types import Group, Prompt, Rollout, Score


def response(text: str, finish: str = "stop") -> Rollout:
    tokens = np.array([1, *range(2, 3 + len(text))])
    sampled = np.arange(len(tokens)) > 0
    return Rollout.of_response(tokens, sampled, np.zeros(len(tokens), np.float32), text, finish, 0)  # type: ignore[arg-type]


def record(*texts: str, scores: list[Score] | None) -> Record:
    prompt = Prompt(
        index=7,
        source="toy:7",
        text="<user>?",
        tokens=np.array([1]),
        request=np.array([1]),
        label="3",
        metadata={"family": "count", "answer": "3"},
        question="How many?",
    )
    group = Group(prompt, tuple(response(text) for text in texts))
    (one,) = records([group], None if scores is None else [scores])
    return one


BASE = {"family": "count", "source": "toy:7", "input": "How many?", "label": "3"}
FAILED = Score(-1.0, failure="response", problem="it raised")
FOUR = record("a", "b", "c", "d", scores=[Score(0.5), Score(1.0), Score(0.0), Score(1.0)])


def made(of: Record, keep: str, threshold: float = 0.5) -> list[dict[str, object]]:
    return list(rows(of, keep=keep, label_threshold=threshold))


def test_the_first_of_equally_good_responses_is_the_best() -> None:
    assert made(FOUR, "best") == [{**BASE, "answer": "b", "score": 1.0}]


def test_pairs_hold_the_best_and_the_worst() -> None:
    expected = {**BASE, "chosen": "b", "rejected": "c", "score": 1.0, "margin": 1.0}
    assert made(FOUR, "pairs") == [expected]


def test_responses_that_were_cut_are_rows_of_all_only() -> None:
    """Supervised training would teach an end where the model made none."""
    cut = [{**one, "is_truncated": one["text"] in ("b", "c")} for one in FOUR["responses"]]
    of = {**FOUR, "responses": cut}
    assert [row["truncated"] for row in made(of, "all")] == [False, True, True, False]
    assert [row["answer"] for row in made(of, "best")] == ["d"]
    assert [(row["chosen"], row["rejected"]) for row in made(of, "pairs")] == [("d", "a")]
    assert [row["answer"] for row in made(of, "labels")] == ["a", "d"]


def test_a_response_is_good_if_it_is_correct_whatever_the_weights() -> None:
    scores = [Score(1.0, {"math": 0.0, "format": 1.0}), Score(0.4, {"math": 1.0, "format": 0.0})]
    of = record("boxed but wrong", "right", scores=scores)
    assert [row["label"] for row in rows(of, keep="labels")] == [False, True]
    assert [row["label"] for row in rows(of, keep="labels", label_threshold=0.5)] == [True, False]


def test_equal_scores_make_no_pair() -> None:
    assert made(record("a", "b", scores=[Score(1.0), Score(1.0)]), "pairs") == []
    assert made(record("a", scores=[Score(1.0)]), "pairs") == []
    assert made(record("a", "a", scores=[Score(1.0), Score(0.0)]), "pairs") == [], "a reward with noise"


def test_a_best_response_below_the_minimum_makes_no_row() -> None:
    assert [len(list(rows(FOUR, keep="best", label_threshold=0.5, min_score=low))) for low in (1.0, 1.1)] == [1, 0]
    assert [len(list(rows(FOUR, keep="pairs", label_threshold=0.5, min_score=low))) for low in (1.0, 1.1)] == [1, 0]


def test_labels_compare_with_the_threshold() -> None:
    labelled = made(FOUR, "labels")
    assert [(row["answer"], row["label"], row["expected"]) for row in labelled] == [
        ("a", False, "3"),
        ("b", True, "3"),
        ("c", False, "3"),
        ("d", True, "3"),
    ]
    assert [row["label"] for row in made(FOUR, "labels", 0.2)] == [True, True, False, True]


def test_a_response_without_a_score_is_neither_best_nor_worst_nor_labelled() -> None:
    one = record("a", "b", "c", scores=[Score(0.2), FAILED, Score(0.1)])
    assert made(one, "best")[0]["answer"] == "a"
    (pair,) = made(one, "pairs")
    assert (pair["chosen"], pair["rejected"]) == ("a", "c")
    assert [row["answer"] for row in made(one, "labels")] == ["a", "c"]
    assert ["score" in row for row in made(one, "all")] == [True, False, True]
    assert made(record("a", scores=[FAILED]), "best") == []


def test_empty_responses_are_in_no_row() -> None:
    one = record("", " \n", "c", scores=[Score(1.0), Score(1.0), Score(0.0)])
    assert [[row.get("answer") for row in made(one, keep)] for keep in ("all", "best")] == [["c"], ["c"]]
    assert made(one, "pairs") == []


def test_responses_that_nothing_scores_are_rows_without_scores() -> None:
    (row,) = made(record("a", scores=None), "all")
    assert row == {**BASE, "answer": "a", "truncated": False}


def test_totals_are_over_the_scored_responses() -> None:
    totals = Totals()
    totals.add(FOUR)  # two of four are correct
    totals.add(record("eeee", "", scores=[Score(0.0), FAILED]))
    metrics = totals.metrics(written=3, tokens_per_s=None)
    assert metrics["generate/written"] == 3
    assert metrics["generate/rows"] == 2
    assert metrics["generate/responses"] == 6
    assert metrics["generate/failed"] == 1
    assert metrics["generate/empty"] == 1
    assert metrics["generate/reward"] == pytest.approx(2.5 / 5)
    assert metrics["generate/pass@1"] == pytest.approx((0.5 + 0.0) / 2)
    assert metrics["generate/tokens_mean"] == pytest.approx((4 * 2 + 5 + 1) / 6)
    assert totals.batch_metrics(seconds=2.0)["throughput/tokens_per_s"] == (4 * 2 + 5 + 1) / 2
    assert totals.batch_metrics(seconds=2.0)["reward/mean"] == pytest.approx(2.5 / 5)
    assert "generate/reward" not in Totals().metrics(written=0, tokens_per_s=1.0)
