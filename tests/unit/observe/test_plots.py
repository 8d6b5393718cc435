import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from vlmrl.observe.plots import Records, _draw_gaps, _draw_reward, _draw_times, draw_curves


def rl(step: int) -> dict[str, Any]:
    numbers = {"reward/mean": 0.4, "reward/std": 0.1, "response/tokens_mean": 20.0, "response/truncated_fraction": 0.1}
    numbers |= {"sync/logprob_diff_max": 1e-6, "sync/kl_rollout_train": 0.0, "time/rollout_s": 2.0, "time/step_s": 3.0}
    return {"step": step} | numbers


EVALUATION = {"step": 0, "eval/visual_math/pass@1": 0.4, "eval/arithmetic/pass@1": 0.9}
PARTS = {"eval/visual_math/clock/pass@1": 0.3, "eval/visual_math/count/pass@1": 0.5}
SFT = {"step": 1, "policy/loss": 2.0, "policy/grad_norm": 1.0, "policy/lr": 1e-3, "time/update_s": 1.0}

RUNS: dict[str, list[dict[str, Any]]] = {
    "nothing": [],
    "one step": [rl(1)],
    "many steps": [rl(step) for step in range(1, 200)],
    "evaluation alone": [EVALUATION],
    "evaluations between": [EVALUATION, rl(1), rl(2) | EVALUATION | {"step": 2}],
    "an evaluation in parts": [EVALUATION | PARTS],
    "supervised": [SFT],
    "a reward model": [
        {"step": 0, "eval/pairs/accuracy": 0.5, "eval/pairs/loss": 0.7},
        {"step": 1, "rm/loss": 1.7, "rm/grad_norm": 1.0, "rm/accuracy": 0.8, "eval/pairs/accuracy": 0.9},
    ],
    "preferences": [
        {"step": 0, "eval/pairs/accuracy": 0.5, "eval/pairs/pass@1": 0.4},
        {"step": 1, "policy/loss": 0.7, "dpo/accuracy": 0.6, "dpo/reward_chosen": 0.1, "dpo/reward_rejected": -2.0},
        {"step": 2, "policy/loss": 1.7, "dpo/accuracy": 0.8, "eval/pairs/accuracy": 0.9, "eval/pairs/pass@1": 0.7},
    ],
    "negative rewards": [EVALUATION, rl(1) | {"reward/mean": -7.0}],
    "numbers that are missing": [rl(1) | {"reward/mean": None, "time/rollout_s": None}, rl(2)],
    "a teacher alone": [SFT | {"distill/kl": 0.5}, SFT | {"step": 2, "distill/kl": 0.3}],
    "unknown names": [{"step": 1, "area/quantity": 1.0, "time/thinking_s": 1.0}],
}


@pytest.mark.parametrize("name", RUNS)
def test_any_metrics_give_a_picture(name: str, tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in RUNS[name]) + '{"step": 9, "torn')
    draw_curves(file, tmp_path / "curves.png")
    with Image.open(tmp_path / "curves.png") as image:
        assert image.format == "PNG"
        assert image.size[0] > 1000
        assert len(image.convert("L").getcolors(256) or []) > 10
    assert {p.name for p in tmp_path.iterdir()} == {"metrics.jsonl", "curves.png"}


def test_a_missing_metrics_file_gives_a_picture(tmp_path: Path) -> None:
    draw_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").exists()


def test_a_reward_model_has_a_curve_of_its_accuracy_beside_the_loss() -> None:
    lines = lines_of(_draw_reward, RUNS["a reward model"])
    assert lines["pairs accuracy"] == [0.5, 0.9]
    assert lines["training loss"] == [1.7]
    assert lines["training accuracy"] == [0.8]


def lines_of(draw: Callable[[Axes, Records], bool], records: Records) -> dict[str, list[float]]:
    axes = Figure().subplots()
    assert draw(axes, records)
    return {str(line.get_label()): list(line.get_ydata()) for axis in axes.figure.axes for line in axis.lines}


def test_preferences_have_curves_of_their_accuracy_of_the_models_responses_and_of_rewards() -> None:
    lines = lines_of(_draw_reward, RUNS["preferences"])
    assert lines["training loss"] == [0.7, 1.7]
    assert lines["training accuracy"] == [0.6, 0.8]
    assert lines["pairs accuracy"] == [0.5, 0.9]
    assert lines["pairs pass@1"] == [0.4, 0.7]
    assert lines_of(_draw_gaps, RUNS["preferences"]) == {"chosen": [0.1], "rejected": [-2.0]}


def test_the_seconds_of_environments_are_a_part_of_the_rollouts() -> None:
    axes = Figure().subplots()
    assert _draw_times(axes, [rl(1) | {"time/env_s": 1.5}])
    assert "env" not in axes.get_legend_handles_labels()[1]
