import json
from pathlib import Path
from typing import Any

from vlmrl.observe.samples import samples_of_evaluations, samples_of_step


def group(*scores: float | None, **changes: Any) -> dict[str, Any]:
    responses = [{"text": f"r{i}", "score": score, "advantage": 0.5, "tokens": 7} for i, score in enumerate(scores)]
    return {"prompt": "p", "label": 3, "images": ["a", "gone"], "responses": responses} | changes


def write(file: Path, *groups: dict[str, Any]) -> None:
    (file.parent / "media").mkdir(parents=True, exist_ok=True)
    (file.parent / "media" / "a.png").touch()
    file.write_text("".join(json.dumps(line) + "\n" for line in groups))


def test_the_best_and_the_worst_response_of_the_first_prompts_are_taken(tmp_path: Path) -> None:
    write(tmp_path / "step_000010.jsonl", group(0.0, 1.0, 0.5), group(None, 0.25, 1.0), group(1.0))
    samples = samples_of_step(tmp_path, 10, num_prompts=2)
    assert [(sample.response, sample.score) for sample in samples] == [
        ("r1", 1.0),
        ("r0", 0.0),
        ("r2", 1.0),
        ("r0", None),
    ]
    assert samples[0].images == (tmp_path / "media" / "a.png",), "a picture that was not written is left out"
    assert (samples[0].prompt, samples[0].label, samples[0].tokens) == ("p", "3", 7)


def test_long_texts_are_cut(tmp_path: Path) -> None:
    write(tmp_path / "step_000001.jsonl", group(1.0, prompt="x" * 5000, label=None))
    (sample,) = samples_of_step(tmp_path, 1, num_prompts=4)
    assert sample.prompt == "x" * 2000 + " ... (5000 characters)"
    assert sample.label == ""


def test_each_evaluation_of_the_step_has_its_samples(tmp_path: Path) -> None:
    without_advantage = {"text": "r", "score": 1.0, "tokens": 1}
    write(tmp_path / "eval_org%2Fmath_step_000010.jsonl", group(responses=[without_advantage]))
    write(tmp_path / "eval_toy_step_000020.jsonl", group(1.0))
    samples = samples_of_evaluations(tmp_path, 10, num_prompts=4)
    assert {name: len(rows) for name, rows in samples.items()} == {"org/math": 1}
    assert samples["org/math"][0].advantage is None


def test_a_step_without_responses_has_no_samples(tmp_path: Path) -> None:
    assert samples_of_step(tmp_path, 3, num_prompts=4) == []
    assert samples_of_evaluations(tmp_path / "none", 3, num_prompts=4) == {}
