"""What the verbs share that learn from rows. Whole runs: end_to_end/test_sft.py."""

from __future__ import annotations

import json
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from vlmrl.commands import stage as stage_module
from vlmrl.commands.stage import Stage, StageRun
from vlmrl.config.load import load
from vlmrl.config.stages import SftConfig
from vlmrl.observe.run_folder import RunFolder
from vlmrl.types import Metrics

LOSS = "eval/toy/loss"


class Checkpoints:
    """Checkpoints of a run that has made some steps; nothing is written."""

    evaluation_is_pending = False
    drawn = 0

    def __init__(self, config: SftConfig, folder: RunFolder, *_: Any) -> None:
        self.folder = folder
        self.is_finished = False

    def saving_on_stop(self) -> Any:
        return nullcontext()

    def save(self, *_: Any, force: bool) -> None:
        """Nothing is written."""

    def finish(self, *, has_adapter: bool) -> None:
        """Nothing is written."""

    def keep_best(self, step: int, metrics: Metrics) -> None:
        """No model is better."""


class Report:
    def __init__(self) -> None:
        self.lines: list[str] = []

    @contextmanager
    def phase(self, name: str) -> Any:
        yield

    def say(self, line: str) -> None:
        self.lines.append(line)

    def evaluation(self, step: int, metrics: Metrics) -> None:
        """Nothing is shown."""

    def step(self, *_: Any) -> None:
        """Nothing is shown."""


def steps_after(done: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[str]]:
    """Return how many more steps a run makes that is resumed after `done` of 40, and what it says."""
    words = {
        "actor.model_name_or_path": "m",
        "data.prompt_dataset": "d",
        "eval.dataset": "toy",
        "eval.steps": "5",
        "eval.early_stop_patience": "2",
        "ckpt.best_metric_key": LOSS,
    }
    config = load(SftConfig, [word for name, value in words.items() for word in (f"--{name}", value)])
    monkeypatch.setattr(stage_module, "RunCheckpoints", Checkpoints)
    monkeypatch.setattr(stage_module, "begin_steps", lambda *_, **__: (done, 40, None))
    updates, report = [], Report()

    class Builder:
        stack = ExitStack()

    def update(batch: Any) -> Metrics:
        updates.append(batch)
        return {}

    run: Any = StageRun(RunFolder(folder), None, None, Builder(), report, None, 1000)  # type: ignore[arg-type]
    stage: Any = Stage(None, lambda count: ([], {}), update, lambda step: {LOSS: 2.0})  # type: ignore[arg-type]
    stage_module._train(config, run, stage, has_adapter=False)
    return len(updates), report.lines


@pytest.mark.parametrize(("done", "steps"), [(20, 0), (15, 25)])
def test_a_run_that_had_ended_early_does_not_train_on_when_it_is_resumed(
    done: int, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = tmp_path / "best"
    best.mkdir()
    (best / "best.json").write_text(json.dumps({"metric": LOSS, "value": 1.0, "step": 10}))
    made, lines = steps_after(done, tmp_path, monkeypatch)
    assert made == steps
    assert bool(lines) == (steps == 0)
    if lines:
        assert lines == [f"{LOSS} has not been better than at step 10 (1) in 2 evaluations (eval.early_stop_patience)"]
