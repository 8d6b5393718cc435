from collections.abc import Sequence

import pytest

from vlmrl.data.digests import RowHasher
from vlmrl.data.held_out import hold_out
from vlmrl.data.rows import Rows, first_rows, load_rows
from vlmrl.errors import ConfigError

KEYS = {"input_key": "input", "label_key": None, "image_key": None}


def asking(prompts: Sequence[str], name: str = "mine") -> RowHasher:
    return RowHasher(Rows(name=name, rows=[{"input": prompt} for prompt in prompts], columns=("input",)), KEYS)


def numbered(count: int, name: str = "mine") -> RowHasher:
    return asking([str(n) for n in range(count)], name)


def test_each_source_is_split_without_overlap() -> None:
    kept, held = hold_out([numbered(100, "a"), asking(["200", "201"], "b")], 0.1, seed=3)
    assert [len(rows) for rows in kept] == [90, 1]
    assert [len(rows) for rows in held] == [10, 1]
    for k, h in zip(kept, held, strict=True):
        numbers = [row["input"] for row in [*k, *h]]
        first = 0 if k.name == "a" else 200
        assert sorted(numbers, key=int) == [str(first + n) for n in range(len(numbers))]
        assert k.row_name(0) == f"{k.name}:{int(k[0]['input']) - first}"
        assert h.row_name(len(h) - 1) == f"{h.name}:{int(h[-1]['input']) - first}"
        assert [row["input"] for row in h] == sorted((row["input"] for row in h), key=int)
    assert len(first_rows(held[0], 4)) == 4


def test_the_split_follows_from_the_seed() -> None:
    def held_out(seed: int) -> list[str]:
        return [row["input"] for row in hold_out([numbered(100)], 0.1, seed=seed)[1][0]]

    assert held_out(1) == held_out(1) != held_out(2)


def test_a_source_of_one_row_cannot_be_split() -> None:
    with pytest.raises(ConfigError, match=r"data\.eval_fraction 0\.5 cannot hold out a row of dataset mine"):
        hold_out([numbered(1)], 0.5, seed=0)


def test_rows_of_one_prompt_stay_together_as_far_as_there_is_room() -> None:
    kept, held = hold_out([asking("aaaabbcd" * 5)], 0.25, seed=0)
    assert len(held[0]) == 10  # b alone, or c and d: a has 20 rows
    prompts = [{row["input"] for row in part} for part in (kept[0], held[0])]
    assert not prompts[0] & prompts[1]
    assert "a" in prompts[0]


def test_the_smallest_prompt_is_held_out_where_none_fits() -> None:
    kept, held = hold_out([asking("aaabb")], 0.2, seed=0)
    assert [row["input"] for row in held[0]] == ["b", "b"]
    assert len(kept[0]) == 3


def test_a_source_of_one_prompt_cannot_be_split() -> None:
    with pytest.raises(ConfigError, match="of dataset mine: all of its 3 rows have the same prompt"):
        hold_out([asking("aaa")], 0.5, seed=0)


def test_rows_that_cannot_be_read_are_split_one_by_one() -> None:
    rows = Rows(name="bad", rows=[7, 8, 9], columns=("input",))  # type: ignore[list-item]
    kept, held = hold_out([RowHasher(rows, KEYS)], 0.5, seed=0)
    assert (len(kept[0]), len(held[0])) == (1, 2)


def test_a_generated_question_is_trained_on_or_held_out_however_often_it_is_repeated() -> None:
    rows = load_rows("arithmetic?size=2000", split="train", max_samples=1500, seed=0)
    kept, held = hold_out([RowHasher(rows, KEYS)], 0.1, seed=0)
    trained, tested = ({row["input"] for row in part} for part in (kept[0], held[0]))
    assert len(held[0]) == 150
    assert len(trained) + len(tested) < 1000, "questions are repeated"
    assert not trained & tested


def test_a_picture_is_trained_on_or_held_out_without_being_drawn() -> None:
    rows = load_rows("visual_preferences?size=60&families=count", split="train", max_samples=100, seed=0)
    keys = {rows.question_key(row) for row in range(60)}
    assert None not in keys
    kept, held = hold_out([RowHasher(rows, KEYS)], 0.25, seed=0)
    assert {kept[0].question_key(row) for row in range(len(kept[0]))} == keys - {
        held[0].question_key(row) for row in range(len(held[0]))
    }


def prompts_of(parts: Sequence[Rows]) -> set[str]:
    return {row["input"] for part in parts for row in part}


@pytest.mark.parametrize("seed", range(4))
def test_a_prompt_of_several_sources_is_on_one_side_in_all_of_them(seed: int) -> None:
    sources = [numbered(100, "a"), asking([str(n) for n in range(60, 140)], "b"), numbered(140, "c")]
    kept, held = hold_out(sources, 0.1, seed=seed)
    assert not prompts_of(kept) & prompts_of(held)
    assert len(held[0]) == 10
    assert len(held[1]) >= 8
    assert prompts_of(held[:2]) <= prompts_of(held[2:])


def test_a_source_whose_prompts_are_all_trained_on_holds_nothing_out() -> None:
    trained = prompts_of(hold_out([numbered(100, "a")], 0.1, seed=0)[0])
    kept, held = hold_out([numbered(100, "a"), asking(sorted(trained)[:5], "b")], 0.1, seed=0)
    assert [(len(k), len(h)) for k, h in zip(kept, held, strict=True)] == [(90, 10), (5, 0)]


def test_a_source_whose_prompts_are_all_held_out_cannot_be_trained_on() -> None:
    tested = prompts_of(hold_out([numbered(100, "a")], 0.1, seed=0)[1])
    with pytest.raises(ConfigError, match="leaves no row of dataset b to train on: all of its prompts are held out"):
        hold_out([numbered(100, "a"), asking(sorted(tested)[:5], "b")], 0.1, seed=0)


def test_unreadable_rows_of_several_sources_have_no_prompt_in_common() -> None:
    bad = [
        RowHasher(Rows(name=name, rows=[7] * 9, columns=("input",)), KEYS)  # type: ignore[list-item]
        for name in ("a", "b")
    ]
    kept, held = hold_out(bad, 0.1, seed=0)
    assert [(len(k), len(h)) for k, h in zip(kept, held, strict=True)] == [(8, 1), (8, 1)]
