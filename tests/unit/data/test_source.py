from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vlmrl.config.data import Data
from vlmrl.config.rollout import Eval
from vlmrl.data.columns import NO_REQUIREMENTS, RowRequirements
from vlmrl.data.source import Source
from vlmrl.errors import DataError
from vlmrl.models import tiny
from vlmrl.plugins import processor

COUNTING = "visual_math?families=count&difficulty=1&pixels=56&size=24"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.build("qwen2_5_vl", tmp_path_factory.mktemp("model") / "micro", size="micro"))


def make_source(
    model: str,
    *,
    dataset: str = COUNTING,
    evaluation: str | None = None,
    requirements: RowRequirements = NO_REQUIREMENTS,
    **columns: object,
) -> Source:
    return Source(
        model=model,
        trust_remote_code=False,
        data=Data.model_validate({"prompt_dataset": dataset, "max_len": 256} | columns),
        evaluation=Eval.model_validate({"dataset": evaluation} if evaluation else {}),
        seed=1,
        requirements=requirements,
    )


def test_a_draw_counts_the_bytes_of_its_images(model: str) -> None:
    prompts, metrics = make_source(model).draw(5)
    unique = {media.hash: media for prompt in prompts for media in prompt.media}
    assert metrics["media/bytes_moved"] == sum(media.fetch().nbytes for media in unique.values()) > 0
    assert metrics["data/rows_dropped"] == 0


def test_text_moves_no_bytes_of_images(model: str) -> None:
    _, metrics = make_source(model, dataset="arithmetic?size=16").draw(5)
    assert metrics["media/bytes_moved"] == 0


def test_a_stream_continues_from_a_saved_state(model: str) -> None:
    first, second = make_source(model), make_source(model)
    first.draw(7)
    second.load_state(first.state())
    assert [p.source for p in first.draw(9)[0]] == [p.source for p in second.draw(9)[0]]


def test_evaluation_sets_are_complete_and_named(model: str) -> None:
    source = make_source(model, evaluation=f"{COUNTING},arithmetic?size=8")
    sets = source.evaluation()
    assert {name: len(prompts) for name, prompts in sets.items()} == {"visual_math": 24, "arithmetic": 8}
    assert make_source(model).evaluation() == {}


def test_bad_labels_are_counted_and_three_of_them_named(model: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    bad = "".join(f'{{"input": "q", "label": "?{n}"}}\n' for n in range(4))
    file.write_text(bad + '{"input": "two?", "label": "2"}\n{"input": "no label"}\n')
    source = Source(
        model=model,
        trust_remote_code=False,
        data=Data.model_validate({"prompt_dataset": str(file), "max_dropped_fraction": 1.0}),
        evaluation=None,
        seed=1,
        label_problems=lambda labels, limit_s=None: ["it is odd" if "?" in label else None for label in labels],
    )
    bad_labels = source.check_labels()
    assert bad_labels.num_rows == 5
    assert sorted(bad_labels.problems) == [f"rows:{n}" for n in range(4)]
    message = str(bad_labels)
    assert message.startswith(
        "labels: 4 of the first 5 rows cannot be used by reward.functions, and their rows are dropped when"
    )
    assert message.count("(it is odd)") == 3
    assert source.draw(2)[1]["data/rows_dropped"] > 0
    assert all("label unusable" in line for line in source.take_warnings())
    assert str(make_source(model).check_labels()) == "labels: those of the first 24 rows can be used"


def test_the_answer_is_the_label_without_an_answer_column(model: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"input": "two?", "label": "2", "said": "two"}\n')
    labelled, _ = make_source(model, dataset=str(file), requirements=RowRequirements(answer=True)).draw_samples(1)
    spoken, _ = make_source(
        model, dataset=str(file), requirements=RowRequirements(answer=True), output_key="said"
    ).draw_samples(1)
    assert labelled[0].sampled.sum() == 2  # "2" and the end
    assert spoken[0].sampled.sum() == 4


def test_a_row_without_an_answer_is_dropped_and_named(model: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"input": "two?"}\n{"input": "three?", "answer": "3"}\n')
    source = make_source(model, dataset=str(file), requirements=RowRequirements(answer=True), max_dropped_fraction=0.5)
    samples, metrics = source.draw_samples(2)
    assert [sample.source for sample in samples] == ["rows:1", "rows:1"]
    assert metrics["data/rows_dropped"] == 1
    (line,) = source.take_warnings()
    assert "rows:0 dropped, no answer: it has no final assistant message, no value in column 'answer'" in line


@pytest.mark.parametrize(
    "row",
    [
        {"input": "2 + 2?", "answer": "four"},
        {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "four"}]},
        {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "four"}]},
        {"prompt": [{"role": "user", "content": "2 + 2?"}], "completion": [{"role": "assistant", "content": "four"}]},
        {"prompt": "2 + 2?", "completion": "four"},
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}], "label": "four"},
    ],
)
def test_all_formats_of_supervised_data_give_the_same_tokens(model: str, tmp_path: Path, row: dict[str, Any]) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row))
    (sample,), _ = make_source(model, dataset=str(file), requirements=RowRequirements(answer=True)).draw_samples(1)
    model_processor = processor(model, min_pixels=3136, max_pixels=12544)
    assert model_processor.decode(sample.tokens[~sample.sampled]) == "user\n2 + 2?\nassistant\n"
    assert model_processor.tokenizer.decode(sample.tokens[sample.sampled]) == "four<|im_end|>"


def test_only_the_last_assistant_message_is_trained_on(model: str, tmp_path: Path) -> None:
    turns = ["a", "b", "c", "d"]
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": messages}))
    (sample,), _ = make_source(model, dataset=str(file), requirements=RowRequirements(answer=True)).draw_samples(1)
    model_processor = processor(model, min_pixels=3136, max_pixels=12544)
    assert model_processor.decode(sample.tokens[~sample.sampled]) == "user\na\nassistant\nb\nuser\nc\nassistant\n"
    assert model_processor.tokenizer.decode(sample.tokens[sample.sampled]) == "d<|im_end|>"


def test_held_out_rows_are_evaluated_under_their_original_numbers(model: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"input": "q{n}", "label": "{n}"}}\n' for n in range(20)))
    source = make_source(model, dataset=str(file), eval_fraction=0.25)
    assert source.num_rows() == 15
    trained = {prompt.source: prompt.label for prompt in source.draw(30)[0]}
    (name, prompts) = next(iter(source.evaluation().items()))
    held = {prompt.source: prompt.label for prompt in prompts}
    assert name == "rows"
    assert len(held) == 5
    assert trained | held == {f"rows:{n}": str(n) for n in range(20)}
    again = make_source(model, dataset=str(file), eval_fraction=0.25).evaluation()["rows"]
    assert [prompt.source for prompt in again] == list(held)
    both = make_source(model, dataset=str(file), evaluation="arithmetic?size=8", eval_fraction=0.25).evaluation()
    assert {name: len(prompts) for name, prompts in both.items()} == {"arithmetic": 8, "rows": 5}


def test_held_out_rows_of_several_datasets_keep_their_columns(model: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(f'{{"input": "q{n}", "gold": "{n}"}}\n' for n in range(20)))
    source = make_source(model, dataset=f"arithmetic?size=16,{file}", label_key="gold", eval_fraction=0.25)
    assert all(prompt.label is not None for prompt in source.draw(27)[0])
    sets = source.evaluation()
    assert {name: len(prompts) for name, prompts in sets.items()} == {"arithmetic": 4, "mine": 5}
    assert {prompts[0].label_key for prompts in sets.values()} == {"label", "gold"}
    assert all(prompt.label is not None for prompts in sets.values() for prompt in prompts)
    assert source.find_duplicates().in_evaluation == []


def test_a_dataset_that_another_trains_on_whole_makes_no_evaluation_set(model: str, tmp_path: Path) -> None:
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    lines = [f'{{"input": "q{n}", "label": "{n}"}}\n' for n in range(20)]
    one.write_text("".join(lines))
    held = make_source(model, dataset=str(one), eval_fraction=0.25).evaluation()["one"]
    names = {prompt.source for prompt in held}
    other.write_text("".join([line for n, line in enumerate(lines) if f"one:{n}" not in names][:3]))
    source = make_source(model, dataset=f"{one},{other}", eval_fraction=0.25)
    assert {name: len(prompts) for name, prompts in source.evaluation().items()} == {"one": 5}
    assert source.num_rows() == 18
    assert source.find_duplicates().in_evaluation == []


def test_dropped_held_out_rows_count_as_a_fraction_of_their_dataset(model: str, tmp_path: Path) -> None:
    file, rows = tmp_path / "rows.jsonl", [{"input": f"q{n}", "label": str(n)} for n in range(100)]

    def source() -> Source:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return make_source(model, dataset=str(file), eval_fraction=0.1)

    held = [int(prompt.source.partition(":")[2]) for prompt in source().evaluation()["rows"]]
    rows[held[0]] = {"input": "", "label": "4"}
    assert len(source().evaluation()["rows"]) == 9, "one in a hundred"
    for number in held:
        rows[number] = {"input": "", "label": "4"}
    with pytest.raises(DataError, match="10 of the first 10 rows cannot be used"):
        source().evaluation()


def test_an_evaluation_set_need_not_have_the_columns_of_the_training_set(model: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(f'{{"input": "q{n}", "gold": "{n}"}}\n' for n in range(20)))
    sets = make_source(model, dataset=str(file), label_key="gold", evaluation="arithmetic?size=4").evaluation()
    assert [prompt.label is not None for prompt in sets["arithmetic"]] == [True] * 4
    with pytest.raises(DataError, match="dataset arithmetic has no column 'gone'"):
        make_source(model, dataset="arithmetic?size=4", label_key="gone")


def test_an_evaluation_row_without_a_needed_label_is_dropped(model: str, tmp_path: Path) -> None:
    file = tmp_path / "test.jsonl"
    file.write_text('{"input": "q", "label": "1"}\n{"input": "q", "label": null}\n')
    source = make_source(model, evaluation=str(file), requirements=RowRequirements(label_for="reward.functions math"))
    with pytest.raises(DataError, match=r"1 of the first 2 rows .*no label.*test:1 .*reward\.functions math needs it"):
        source.evaluation()


def test_an_unusable_row_is_reported_once(model: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"input": "seen?", "label": "1", "images": "gone.png"}\n' + '{"input": "x", "label": "1"}\n' * 3)
    source = make_source(model, dataset=str(file), max_dropped_fraction=0.5)
    _, metrics = source.draw(4)
    assert metrics["data/rows_dropped"] == 1
    (line,) = source.take_warnings()
    assert "gone.png" in line
    assert source.take_warnings() == []


def test_images_are_written_once_under_their_hash(model: str, tmp_path: Path) -> None:
    source = make_source(model)
    media = source.draw(1)[0][0].media
    source.save_media(tmp_path / "media", media)
    written = tmp_path / "media" / f"{media[0].hash}.png"
    assert Image.open(written).size == media[0].size
    before = written.stat().st_mtime_ns
    source.save_media(tmp_path / "media", media)
    assert written.stat().st_mtime_ns == before
