from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from vlmrl.config.pairs import PairData
from vlmrl.config.rollout import EvalRows
from vlmrl.data.columns import RowRequirements
from vlmrl.data.judgements import Judged, check_classes, judgement_problems, mismatched
from vlmrl.data.source import Source
from vlmrl.errors import DataError
from vlmrl.models import tiny
from vlmrl.types import Sample

JUDGED = RowRequirements(answer=True, judged=True, label_for="dpo.loss kto")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.build("qwen3", tmp_path_factory.mktemp("model") / "micro", size="micro"))


def source(model: str, folder: Path, *rows: object, **settings: object) -> Source:
    from vlmrl.data.judgements import judgement_problems

    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Source(
        model=model,
        trust_remote_code=False,
        data=PairData.model_validate({"prompt_dataset": str(file), "max_dropped_fraction": 0.9} | settings),
        evaluation=EvalRows(),
        seed=1,
        requirements=JUDGED,
        label_problems=judgement_problems,
    )


def test_labels_say_whether_a_response_is_desirable(model: str, tmp_path: Path) -> None:
    good = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "label": True}]
    bad = [{"input": "c", "answer": "d", "label": 0}]
    judged, _ = source(model, tmp_path, *good, *good).draw_judged(2)
    assert judged.desirable.tolist() == [True, True]
    judged, metrics = source(model, tmp_path, *bad, {"input": "e", "answer": "f", "label": "True"}).draw_judged(2)
    assert sorted(judged.desirable.tolist()) == [False, True]
    assert [sample.group for sample in judged.samples] == [sample.response for sample in judged.samples] == [0, 1]
    assert metrics["data/rows_dropped"] == 0


def test_rows_without_a_label_or_with_another_are_dropped(model: str, tmp_path: Path) -> None:
    rows = [
        {"input": "a", "answer": "b", "label": "maybe"},
        {"input": "a", "answer": "b", "label": None},
        {"input": "a", "label": True},
        {"input": "a", "answer": "b", "label": False},
    ]
    judged_source = source(model, tmp_path, *rows)
    judged, metrics = judged_source.draw_judged(1)
    judged, metrics = judged_source.draw_judged(4)
    assert {sample.source for sample in judged.samples} == {"rows:3"}
    assert metrics["data/rows_dropped"] == 3
    assert dict(judged_source.dropped()) == {"label unusable": 1, "no label": 1, "no answer": 1}


def test_a_set_without_one_of_the_classes_is_refused(model: str, tmp_path: Path) -> None:
    row = {"input": "a", "answer": "b", "label": True}
    with pytest.raises(DataError, match=r"all of the 3 rows read are desirable by column 'label' \(data.label_key\)"):
        source(model, tmp_path, *[row] * 3).check_classes()
    source(model, tmp_path, row, row | {"label": False}).check_classes()
    check_classes([], column="label")
    with pytest.raises(DataError, match="undesirable"):
        check_classes(["0", "maybe"], column="label")


def test_labels_are_truth_values() -> None:
    assert judgement_problems(["true", "0", " False ", "1.0"]) == [None] * 4
    assert judgement_problems(["good"]) == ["it is neither true nor false"]


def answered(prompt: list[int], response: list[int]) -> Sample:
    return Sample(np.array(prompt + response), np.array([False] * len(prompt) + [True] * len(response)))


def test_mismatched_samples_have_the_prompt_of_one_and_the_response_of_the_next() -> None:
    samples = [answered([1, 2], [3]), answered([4], [5, 6]), answered([7], [8])]
    moved = mismatched(samples, max_len=9)
    assert [row.tokens.tolist() for row in moved] == [[1, 2, 5, 6], [4, 8], [7, 3]]
    assert [row.sampled.tolist() for row in moved] == [[False, False, True, True], [False, True], [False, True]]
    assert [row.response for row in moved] == [0, 1, 2]
    with pytest.raises(ValueError, match="no other prompt"):
        mismatched(samples[:1], max_len=9)
    with pytest.raises(ValueError, match="longer than 2 tokens"):
        mismatched(samples, max_len=2)


def test_a_mismatched_response_that_is_too_long_gives_way_to_the_first_that_fits() -> None:
    long_prompt, long_response = answered([1, 1, 1], [2]), answered([3], [4, 4, 4])
    moved = mismatched([long_prompt, long_response, answered([5], [6])], max_len=4)
    assert [row.tokens.tolist() for row in moved] == [[1, 1, 1, 6], [3, 6], [5, 2]]


def test_a_mismatched_response_is_cut_where_none_fits() -> None:
    long_prompt, long_response = answered([1, 1, 1], [2]), answered([3], [4, 5, 6])
    moved = mismatched([long_prompt, long_response], max_len=4)
    assert [row.tokens.tolist() for row in moved] == [[1, 1, 1, 4], [3, 2]]
    assert [row.sampled.tolist() for row in moved] == [[False] * 3 + [True], [False, True]]
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 40, size=(50, 2))
    many = [answered([1] * prompt, [2] * response) for prompt, response in lengths]
    longest = max(len(sample.tokens) for sample in many)
    moved = mismatched(many, max_len=longest)
    assert max(len(row.tokens) for row in moved) <= longest
    assert all(row.sampled.any() for row in moved)


def test_every_response_has_a_label() -> None:
    with pytest.raises(ValueError, match="0 responses with 1 labels"):
        Judged([], np.array([True]))
