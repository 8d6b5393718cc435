"""The best model of a run: kept until a better one is complete."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from vlmrl.errors import ConfigError
from vlmrl.system.atomic_folders import checkpoints, prune, remove_partial
from vlmrl.trainer.best_model import Best, keep_best, read_best

PASS = "eval/toy/pass@1"


def model(text: str) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "model").write_text(text)

    return save


def kept(folder: Path, value: float, step: int) -> bool:
    return keep_best(folder, {PASS: value}, metric=PASS, step=step, save=model(f"of {step}"))[1]


def test_only_a_better_model_replaces_the_best(tmp_path: Path) -> None:
    best = tmp_path / "best"
    assert [kept(best, value, step) for step, value in enumerate([0.5, 0.4, 0.5, 0.75])] == [True, False, False, True]
    assert (best / "model").read_text() == "of 3"
    assert read_best(best, metric=PASS) == Best(PASS, 0.75, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_nothing_is_written_for_a_model_that_is_not_better(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        raise AssertionError(folder)

    assert kept(tmp_path / "best", 0.5, 1)
    best, is_new = keep_best(tmp_path / "best", {PASS: 0.25}, metric=PASS, step=2, save=fail)
    assert (best, is_new) == (Best(PASS, 0.5, 1), False)


def test_nan_is_better_than_no_model_only(tmp_path: Path) -> None:
    assert kept(tmp_path / "best", math.nan, 1)
    assert not kept(tmp_path / "best", math.nan, 2)
    assert kept(tmp_path / "best", 0.0, 3)
    assert read_best(tmp_path / "best", metric=PASS) == Best(PASS, 0.0, 3)


def test_pruning_checkpoints_keeps_the_best_model(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        (tmp_path / f"step_{step:06d}").mkdir()
    assert kept(tmp_path / "best", 0.5, 1)
    prune(tmp_path, keep=1)
    assert [p.name for p in checkpoints(tmp_path)] == ["step_000003"]
    assert (tmp_path / "best" / "model").read_text() == "of 1"


@pytest.mark.parametrize("when", ["before the model is whole", "before the model has its record"])
def test_a_run_killed_while_writing_leaves_the_older_best(when: str, tmp_path: Path) -> None:
    best = tmp_path / "best"
    assert kept(best, 0.5, 1)

    def killed(folder: Path) -> None:
        if when == "before the model has its record":
            model("half")(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        keep_best(best, {PASS: 0.75}, metric=PASS, step=2, save=killed)
    assert read_best(best, metric=PASS) == Best(PASS, 0.5, 1)
    assert (best / "model").read_text() == "of 1"
    # It goes on from the checkpoint before, and comes to the same step with the same number.
    remove_partial(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    assert kept(best, 0.75, 2)
    assert (best / "model").read_text() == "of 2"
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_the_best_loss_is_the_lowest(tmp_path: Path) -> None:
    def keep(value: float, step: int) -> bool:
        return keep_best(
            tmp_path / "best", {"eval/toy/loss": value}, metric="eval/toy/loss", step=step, save=model("m")
        )[1]

    assert [keep(0.5, 1), keep(0.7, 2), keep(float("nan"), 3), keep(0.4, 4), keep(0.4, 5)] == [
        True,
        False,
        False,
        True,
        False,
    ]


def test_a_resumed_run_compares_with_the_existing_best(tmp_path: Path) -> None:
    assert kept(tmp_path / "best", 0.75, 30)
    assert not kept(tmp_path / "best", 0.75, 20)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("eval/toy/tokens_mean", "does not say which of two models is better; name a pass@k, a reward"),
        ("eval/other/pass@1", "is not measured by the evaluation, which has: eval/toy/pass@1, eval/toy/reward"),
    ],
)
def test_a_metric_that_cannot_choose_is_refused_in_one_line(metric: str, message: str, tmp_path: Path) -> None:
    metrics = {PASS: 0.5, "eval/toy/reward": 0.5, "eval/toy/tokens_mean": 3.0}
    with pytest.raises(ConfigError, match=f"ckpt.best_metric_key {metric}.*{message}") as caught:
        keep_best(tmp_path / "best", metrics, metric=metric, step=1, save=model("x"))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_best_by_another_metric_is_not_compared_with(tmp_path: Path) -> None:
    assert kept(tmp_path / "best", 0.5, 1)
    with pytest.raises(ConfigError, match=f"was chosen by {PASS}, not by ckpt.best_metric_key eval/toy/reward"):
        keep_best(tmp_path / "best", {"eval/toy/reward": 9.0}, metric="eval/toy/reward", step=2, save=model("x"))


@pytest.mark.parametrize("text", ["{torn", json.dumps({"metric": PASS}), json.dumps([1])])
def test_an_unreadable_record_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "best.json").write_text(text)
    with pytest.raises(ConfigError, match=r"best.json cannot be read: .*; delete .* to choose again") as caught:
        read_best(tmp_path, metric=PASS)
    assert "\n" not in str(caught.value)
