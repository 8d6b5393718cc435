import json
import math
from pathlib import Path

import pytest
from PIL import Image

from vlmrl.config.ckpt import Logger
from vlmrl.observe.samples import Sample
from vlmrl.observe.sinks import JsonlSink, TensorBoardSink, open_sinks, read_metrics


def write(file: Path, steps: range, *, first_step: int = 0, reward: float = 0.5) -> None:
    sink = JsonlSink(file, first_step=first_step)
    for step in steps:
        sink.write(step, {"reward/mean": reward})
    sink.close()


def test_each_step_is_one_line_of_json(tmp_path: Path) -> None:
    write(tmp_path / "new" / "metrics.jsonl", range(2))
    lines = (tmp_path / "new" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": 0, "reward/mean": 0.5}, {"step": 1, "reward/mean": 0.5}]


def test_metrics_can_be_read_before_the_sink_is_closed(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m.jsonl", first_step=0)
    sink.write(1, {"reward/mean": 1.0})
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 1, "reward/mean": 1.0}]
    sink.close()


def test_a_resumed_run_has_no_step_twice(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    write(file, range(8))
    with file.open("a") as torn:
        torn.write('{"step": 8, "rew')
    write(file, range(6, 9), first_step=6, reward=0.75)
    records = read_metrics(file)
    assert [record["step"] for record in records] == list(range(9))
    assert [record["reward/mean"] for record in records] == [0.5] * 6 + [0.75] * 3
    assert [p.name for p in tmp_path.iterdir()] == ["m.jsonl"]


def test_a_run_resumes_after_lines_that_a_disk_has_damaged(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    write(file, range(3))
    with file.open("ab") as damaged:
        for line in (b'{"step": 3, "reward/\xff\xfe": 1.0}', b"\0" * 64, b"[" * 100_000, b"[3]", b'{"step": "3"}'):
            damaged.write(line + b"\n")
    write(file, range(3, 5), first_step=3)
    assert [record["step"] for record in read_metrics(file)] == [0, 1, 2, 3, 4]
    assert len(file.read_text(encoding="utf-8").splitlines()) == 5


def test_an_evaluation_that_a_resumed_run_makes_joins_the_record_of_its_step(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    sink = JsonlSink(file, first_step=0)
    sink.write(1, {"reward/mean": 0.5})
    sink.write(2, {"reward/mean": 0.75, "time/step_s": 10.0})
    sink.close()
    for accuracy in (0.25, 0.5):  # the first run that resumes is killed before its next checkpoint
        sink = JsonlSink(file, first_step=3)
        sink.write(2, {"eval/toy/pass@1": accuracy, "time/eval_s": 2.0, "time/step_s": 2.0})
        sink.write(3, {"reward/mean": 1.0})
        sink.close()
    first, evaluated, last = read_metrics(file)
    assert (first, last) == ({"step": 1, "reward/mean": 0.5}, {"step": 3, "reward/mean": 1.0})
    times = {"time/eval_s": 4.0, "time/step_s": 14.0}
    assert evaluated == {"step": 2, "reward/mean": 0.75, "eval/toy/pass@1": 0.5} | times
    assert [path.name for path in tmp_path.iterdir()] == ["m.jsonl"]


def test_nan_and_infinity_are_written_as_null(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m.jsonl", first_step=0)
    sink.write(1, {"policy/grad_norm": math.nan, "policy/loss": math.inf})
    sink.close()
    assert (tmp_path / "m.jsonl").read_text() == '{"step": 1, "policy/grad_norm": null, "policy/loss": null}\n'


def test_a_name_without_an_area_is_refused(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m.jsonl", first_step=0)
    with pytest.raises(ValueError, match="area/quantity"):
        sink.write(1, {"loss": 1.0})
    sink.close()


def test_tensorboard_hides_repeated_steps_of_a_resumed_run(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps, first, value in ((range(1, 8), 0, 0.25), (range(6, 9), 6, 0.75)):
        sink = TensorBoardSink(tmp_path, first_step=first)
        for step in steps:
            sink.write(step, {"reward/mean": value})
        sink.close()
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("reward/mean")
    assert [event.step for event in events] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [event.value for event in events] == [0.25] * 5 + [0.75] * 3


@pytest.mark.parametrize("elsewhere", [None, "elsewhere"])
def test_tensorboard_files_may_be_elsewhere(tmp_path: Path, elsewhere: str | None) -> None:
    logger = Logger(tensorboard_dir=None if elsewhere is None else str(tmp_path / elsewhere))
    folder = tmp_path / "tensorboard"
    sinks = open_sinks(logger, metrics=tmp_path / "m.jsonl", tensorboard=folder, first_step=0)
    for sink in sinks:
        sink.write(1, {"reward/mean": 0.5})
        sink.close()
    assert [type(sink) for sink in sinks] == [JsonlSink, TensorBoardSink]
    assert {p.name for p in tmp_path.iterdir()} == {"m.jsonl", elsewhere or "tensorboard"}


def test_tensorboard_has_samples_as_text_that_is_no_markup_and_images(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    Image.new("RGB", (1200, 600), "red").save(tmp_path / "a.png")
    hostile = "</pre><img src=x onerror=alert(1)>\n# 1"
    sample = Sample("How many?", "3", hostile, 0.5, None, 7, (tmp_path / "a.png",))
    sink = TensorBoardSink(tmp_path / "tensorboard", first_step=0)
    sink.write_samples(4, "train", [sample, sample])
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (text,) = events.Tensors("samples/train/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert text.step == 4
    assert "\n    </pre><img src=x onerror=alert(1)>\n    # 1" in shown
    assert shown.startswith("score 0.5, advantage None, 7 tokens")
    (image,) = events.Images("samples/train/0")
    assert (image.width, image.height) == (512, 256)
