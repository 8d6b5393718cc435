import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vlmrl.config.data import Data
from vlmrl.config.pairs import PairData
from vlmrl.config.rollout import EvalBase
from vlmrl.data import duplicates
from vlmrl.data.columns import RowRequirements
from vlmrl.data.source import Source
from vlmrl.models.tiny import build


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build("qwen2_5_vl", tmp_path_factory.mktemp("models") / "vlm", size="micro"))


def source(model: str, folder: Path, training: list[Any], evaluation: list[Any] | None = None) -> Source:
    for name, rows in (("train", training), ("test", evaluation or [])):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return Source(
        model=model,
        trust_remote_code=False,
        data=Data(prompt_dataset=str(folder / "train.jsonl")),
        evaluation=EvalBase(dataset=str(folder / "test.jsonl") if evaluation else None),
        seed=0,
    )


def test_duplicates_have_equal_questions_and_images(model: str, tmp_path: Path) -> None:
    for name, colour in (("a", "red"), ("b", "blue"), ("copy", "red")):
        Image.new("RGB", (56, 56), colour).save(tmp_path / f"{name}.png")
    training = [
        {"input": "which colour?", "label": "red", "images": ["a.png"]},
        {"input": "which colour?", "label": "blue", "images": ["b.png"]},
        {"input": "which colour?", "label": "rouge", "images": "copy.png"},
        {"input": "which colour?", "label": "red", "images": []},
        {"input": [{"role": "user", "content": "a"}]},
        7,
        {"input": [{"content": "a", "role": "user"}]},
    ]
    evaluation = [{"input": "another"}, {"input": "which colour?", "images": ["b.png"]}]
    duplicates_found = source(model, tmp_path, training, evaluation).find_duplicates()
    assert duplicates_found.in_training == [("train:2", "train:0"), ("train:6", "train:4")]
    assert duplicates_found.in_evaluation == [("test:1", "train:1")]
    assert duplicates_found.lines() == [
        "data: 2 of the 7 training rows repeat an earlier one: train:2 = train:0, train:6 = train:4",
        (
            "data: 1 evaluation rows have prompts of the 7 training rows, so their scores do not measure "
            "generalisation: test:1 = train:1"
        ),
    ]


def test_no_line_without_duplicates(model: str, tmp_path: Path) -> None:
    rows = [{"input": f"question {i}"} for i in range(9)]
    assert source(model, tmp_path, rows[:6], rows[6:]).find_duplicates().lines() == []


def test_the_search_is_limited_and_reports_how_many_rows_it_compared(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duplicates, "_MAX_ROWS", 4)
    duplicates_found = source(model, tmp_path, [{"input": f"question {i % 2}"} for i in range(9)]).find_duplicates()
    assert duplicates_found.lines() == [
        "data: 2 of the first 4 training rows repeat an earlier one: train:2 = train:0, train:3 = train:1"
    ]
    monkeypatch.setattr(duplicates, "_LIMIT_S", -1.0)
    assert source(model, tmp_path, [{"input": "a"}] * 9).find_duplicates().num_rows == 0


def test_generated_rows_are_skipped(model: str) -> None:
    made = Source(
        model=model,
        trust_remote_code=False,
        data=Data(prompt_dataset="visual_math?families=count&difficulty=1&pixels=56&size=500", max_samples=400),
        evaluation=EvalBase(dataset="visual_math?families=count&difficulty=1&pixels=56&size=500", split="test"),
        seed=0,
    )
    assert made.find_duplicates() == (0, True, [], [])


def pair(question: Any, chosen: Any, rejected: Any) -> dict[str, Any]:
    return {"input": question, "chosen": chosen, "rejected": rejected}


def pair_source(
    model: str, folder: Path, rows: list[Any], evaluation: list[Any] | None = None, *, seed: int = 0, **data: Any
) -> Source:
    for name, lines in (("train", rows), ("test", evaluation or [])):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return Source(
        model=model,
        trust_remote_code=False,
        data=PairData(prompt_dataset=str(folder / "train.jsonl"), **data),
        evaluation=EvalBase(dataset=str(folder / "test.jsonl") if evaluation else None),
        seed=seed,
        requirements=RowRequirements(pair=True),
    )


def test_a_pair_whose_prompt_is_trained_on_is_found_whatever_its_responses(model: str, tmp_path: Path) -> None:
    def conversation(answer: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]

    training = [pair("a", "1", "2"), pair("a", "1", "3"), pair("b", "1", "2"), pair("b", "1", "2")]
    evaluation = [pair("c", "1", "2"), pair("a", "4", "5"), pair(None, conversation("6"), conversation("7"))]
    duplicates_found = pair_source(model, tmp_path, training, evaluation).find_duplicates()
    assert duplicates_found.in_training == [("train:3", "train:2")]
    assert duplicates_found.in_evaluation == [("test:1", "train:0"), ("test:2", "train:0")]


@pytest.mark.parametrize("seed", range(4))
def test_pairs_of_one_prompt_are_all_trained_on_or_all_held_out(model: str, tmp_path: Path, seed: int) -> None:
    """Prompts are told apart by their pictures too."""
    for colour in ("red", "blue"):
        Image.new("RGB", (56, 56), colour).save(tmp_path / f"{colour}.png")
    rows = [
        pair(f"question {number % 5}", f"{number}", "wrong") | {"images": [f"{('red', 'blue')[number % 2]}.png"]}
        for number in range(40)
    ]
    split = pair_source(model, tmp_path, rows, seed=seed, eval_fraction=0.2)
    prompts = [
        {(row["input"], row["images"][0]) for row in part.rows} for part in (*split._training_rows, *split._held_out)
    ]
    assert [len(part) for part in prompts] == [8, 2]
    assert not prompts[0] & prompts[1]
    assert [len(part) for part in (*split._training_rows, *split._held_out)] == [32, 8]
    assert split.find_duplicates().in_evaluation == []
