from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from vlmrl.config.data import Data
from vlmrl.config.rollout import Eval
from vlmrl.data.source import Source
from vlmrl.errors import DataError
from vlmrl.models import tiny

COUNTING = "visual_math?families=count&difficulty=1&pixels=56&size=24"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.build("qwen2_5_vl", tmp_path_factory.mktemp("model") / "micro", size="micro"))


def make_source(model: str, *, dataset: str = COUNTING, evaluation: str | None = None, **columns: object) -> Source:
    return Source(
        model=model,
        trust_remote_code=False,
        data=Data.model_validate({"prompt_dataset": dataset, "max_len": 256} | columns),
        evaluation=Eval.model_validate({"dataset": evaluation} if evaluation else {}),
        seed=1,
    )


def test_a_draw_says_how_many_bytes_of_pixels_it_moved(model: str) -> None:
    prompts, metrics = make_source(model).draw(5)
    unique = {media.hash: media for prompt in prompts for media in prompt.media}
    assert metrics["media/bytes_moved"] == sum(media.fetch().nbytes for media in unique.values()) > 0
    assert metrics["data/rows_dropped"] == 0


def test_text_moves_no_pixels(model: str) -> None:
    _, metrics = make_source(model, dataset="arithmetic?size=16").draw(5)
    assert metrics["media/bytes_moved"] == 0


def test_a_stream_goes_on_where_another_stood(model: str) -> None:
    first, second = make_source(model), make_source(model)
    first.draw(7)
    second.load_state(first.state())
    assert [p.source for p in first.draw(9)[0]] == [p.source for p in second.draw(9)[0]]


def test_evaluation_sets_are_whole_named_and_apart_from_training(model: str) -> None:
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
    found = source.look_at_labels()
    assert found.num_rows == 5
    assert sorted(found.problems) == [f"rows:{n}" for n in range(4)]
    said = str(found)
    assert said.startswith("labels: 4 of the first 5 rows cannot be used by reward.functions, and are dropped when")
    assert said.count("(it is odd)") == 3
    assert source.draw(2)[1]["data/rows_dropped"] > 0
    assert all("label unusable" in line for line in source.take_notes())
    assert str(make_source(model).look_at_labels()) == "labels: those of the first 24 rows can be used"


def test_the_answer_to_learn_is_the_label_where_there_is_no_answer_column(model: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"input": "two?", "label": "2", "said": "two"}\n')
    labelled, _ = make_source(model, dataset=str(file)).draw_samples(1)
    spoken, _ = make_source(model, dataset=str(file), output_key="said").draw_samples(1)
    assert labelled[0].sampled.sum() == 2  # "2" and the end
    assert spoken[0].sampled.sum() == 4


def test_a_row_without_an_answer_is_named(model: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"input": "two?"}\n')
    with pytest.raises(DataError, match=r"rows.*:0 has no answer: neither a column 'answer' \(--data.output_key\)"):
        make_source(model, dataset=str(file)).draw_samples(1)


def test_a_row_that_cannot_be_used_is_named_once(model: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"input": "seen?", "label": "1", "images": "gone.png"}\n' + '{"input": "x", "label": "1"}\n' * 3)
    source = make_source(model, dataset=str(file), max_dropped_fraction=0.5)
    _, metrics = source.draw(4)
    assert metrics["data/rows_dropped"] == 1
    (line,) = source.take_notes()
    assert "gone.png" in line
    assert source.take_notes() == []


def test_images_are_written_once_under_their_hash(model: str, tmp_path: Path) -> None:
    source = make_source(model)
    media = source.draw(1)[0][0].media
    source.save_media(tmp_path / "media", media)
    written = tmp_path / "media" / f"{media[0].hash}.png"
    assert Image.open(written).size == media[0].size
    before = written.stat().st_mtime_ns
    source.save_media(tmp_path / "media", media)
    assert written.stat().st_mtime_ns == before
