from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from made_runs import make_run

from vlmrl.report.checks import checks
from vlmrl.report.run import Run, read_run
from vlmrl.verify.logprobs import largest_gap

BF16 = "# Written by vlmrl: vlmrl rl --config config.yaml\nds: {param_dtype: bf16}\n"
FP32 = "# Written by vlmrl: vlmrl rl --config config.yaml\nds: {param_dtype: fp32}\n"
FOUR_BIT = f"{BF16[:-2]}, load_in_4bit: true}}\nvllm: {{qlora_base: original}}\n"


def run_of(tmp_path: Path, settings: str, metrics: dict[str, Any]) -> Run:
    return read_run(make_run(tmp_path / "run", steps=2, settings=settings, metrics=metrics), name="run")


@pytest.mark.parametrize(
    ("settings", "mean", "state"),
    [
        (FP32, 9e-4, "ok"),
        (FP32, 2e-3, "bad"),
        (BF16, 2e-3, "ok"),
        (BF16, 0.2, "bad"),
        (f"{FP32}vllm: {{max_logprob_diff: 0.5}}\n", 0.2, "ok"),
        (f"{BF16}vllm: {{max_logprob_diff: 0.01}}\n", 0.02, "bad"),
        (f"{BF16}vllm: {{max_logprob_diff: odd}}\n", 0.2, "bad"),
        (FOUR_BIT, 0.9, "unknown"),
        (BF16, None, "bad"),
    ],
)
def test_engine_and_trainer_agree_if_the_figures_say_so(
    settings: str, mean: float | None, state: str, tmp_path: Path
) -> None:
    metrics = {"sync/logprob_diff_max": 7.5, "sync/logprob_diff_mean": mean}
    (check,) = checks(run_of(tmp_path, settings, metrics))
    assert check.state == state
    assert ("the same" in check.text) == (state == "ok")


def test_the_limit_is_that_of_the_run(tmp_path: Path) -> None:
    from vlmrl.config.load import load
    from vlmrl.config.verbs import RlConfig

    words = ["--actor.model_name_or_path", "tiny", "--data.prompt_dataset", "toy", "--reward.functions", '{"exact": 1}']
    for settings, more in ((BF16, []), (FP32, ["--ds.param_dtype", "fp32"])):
        config = load(RlConfig, [*words, *more])
        run = read_run(make_run(tmp_path / settings[-6:-2], settings=settings), name="run")
        assert run.logprob_diff_limit == largest_gap(config) < math.inf


@pytest.mark.parametrize(("effect", "state"), [(0.5, "ok"), (0.0, "bad"), (1e-8, "bad")])
def test_models_see_the_images_if_these_have_an_effect(effect: float, state: str, tmp_path: Path) -> None:
    metrics = {"verify/images/actor_effect": 0.5, "verify/images/critic_effect": effect}
    (check,) = checks(run_of(tmp_path, BF16, metrics))
    assert check.state == state
    assert ("critic" in check.text) == (state == "bad")


@pytest.mark.parametrize(
    ("gap", "effect", "state"), [(0.01, 0.3, "ok"), (0.2, 0.3, "bad"), (0.01, 0.0, "unknown"), (0.2, 0.0, "bad")]
)
def test_engines_use_the_adapter_if_they_agree_and_it_has_an_effect(
    gap: float, effect: float, state: str, tmp_path: Path
) -> None:
    metrics = {"verify/adapters/gap": gap, "verify/adapters/effect": effect}
    (check,) = checks(run_of(tmp_path, BF16, metrics))
    assert check.state == state


def test_a_sync_of_which_nothing_was_read_back_proves_nothing(tmp_path: Path) -> None:
    metrics = {"sync/readback_layers": 0, "sync/readback_unread": 7}
    (check,) = checks(run_of(tmp_path, BF16, metrics))
    assert (check.state, check.figure) == ("unknown", "0 layers read back, 7 could not be")
