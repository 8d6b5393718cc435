"""The CPU recipes on the real stack, shortened, with a reward that a random model can learn in seconds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from recipes import read_metrics, recipe, steps_of

from vlmrl import startup
from vlmrl.commands.evaluate import evaluate
from vlmrl.commands.rl import train_rl
from vlmrl.commands.sft import train_sft
from vlmrl.config.load import load
from vlmrl.config.stages import SftConfig
from vlmrl.config.verbs import EvalConfig, RlConfig
from vlmrl.types import Metrics

PLAIN_ENGINE = Path(__file__).with_name("plain_engine.py")

NAMES = """reward/mean reward/std group/constant_fraction response/tokens_mean response/truncated_fraction policy/loss
policy/clip_fraction policy/entropy policy/grad_norm sync/version sync/logprob_diff_max sync/kl_rollout_train
vision/tower_calls media/bytes_moved pack/tokens pack/padding_fraction time/rollout_s time/reward_s time/logprob_s
time/update_s time/sync_s time/step_s throughput/tokens_per_s data/rows_dropped"""

pytestmark = pytest.mark.usefixtures("ray_session")


@pytest.mark.parametrize(
    ("family", "example"),
    [
        ("qwen3_vl", "mixed_qwen3_vl_tiny.yaml"),
        pytest.param("qwen3", "arithmetic_tiny.yaml", marks=pytest.mark.prove),
        pytest.param("qwen3_vl_moe", "experts_tiny.yaml", marks=pytest.mark.prove),
        *[pytest.param(f, "counting_internvl_tiny.yaml", marks=pytest.mark.prove) for f in ("smolvlm", "glm4v")],
    ],
)
def test_the_reward_rises_on_two_ranks_and_two_engines(
    family: str, example: str, tmp_path: Path, tiny_model: Callable[..., str], digits_reward: str
) -> None:
    out = tmp_path / "run"
    flags = {
        "actor.num_gpus_per_node": 2,
        "actor.adam.lr": 3e-3,
        "ds.zero_stage": 3,
        "vllm.num_engines": 2,
        "reward.functions": "{}",
        "reward.remote_url": digits_reward,
        "rollout.batch_size": 8,
        "train.batch_size": 64,
        "train.max_steps": 8,
        "eval.max_samples": 8,
        "algo.advantage.is_correction_enable": "true",
        "algo.advantage.is_correction_type": "seq-mask-tis",
    }
    train_rl(load(RlConfig, recipe(example, tiny_model(family), out, **flags)))
    steps = steps_of(out)
    rewards = [line["reward/mean"] for line in steps]
    assert len(rewards) == 8
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.1, rewards
    for line in steps:
        assert set(NAMES.split()) <= line.keys()
        assert line["sync/logprob_diff_max"] < 1e-3
        assert line["group/constant_fraction"] < 1.0
        # Engine and trainer agree, so the correction is computed but changes nothing.
        assert line["policy/correction_weight"] == pytest.approx(1.0, abs=1e-3)
        assert line["policy/correction_dropped"] == 0
    assert [line["sync/version"] for line in steps] == list(range(1, 9))
    has_images = family != "qwen3"
    assert any(line["media/bytes_moved"] > 0 for line in steps) == has_images
    assert any(line["vision/tower_calls"] > 0 for line in steps) == has_images
    assert (out / "curves.png").stat().st_size > 10_000
    page = (out / "report.html").read_text()
    assert '"state":"finished"' in page
    assert "rollouts" in page
    assert bool(re.search(r"data:image/webp;base64,\w", page)) == has_images
    transcript = [json.loads(line) for line in (out / "rollouts/step_000001.jsonl").read_text().splitlines()]
    assert len(transcript) == 8
    traces = [r["trace"] for line in transcript for r in line["responses"] if "trace" in r]
    assert traces
    assert all(len(trace["tokens"]) == len(trace["logprob"]) == len(trace["advantage"]) for trace in traces)
    assert all(trace["trainer"] == pytest.approx(trace["logprob"], abs=1e-3) for trace in traces)
    assert bool(list((out / "rollouts/media").glob("*.png"))) == has_images
    assert (out / "model" / "config.json").exists()


@pytest.fixture(scope="module")
def warm_model(tiny_model: Callable[..., str], tmp_path_factory: pytest.TempPathFactory, ray_session: None) -> str:
    """A model from some steps of supervised training, whose loss has fallen."""
    return taught("quickstart_sft.yaml", tiny_model("qwen2_5_vl"), tmp_path_factory.mktemp("sft"), by=1.0)


def taught(example: str, model: str, out: Path, *, by: float) -> str:
    """Return the model after supervised training in short; check that the loss falls `by` that much."""
    train_sft(load(SftConfig, recipe(example, model, out, **{"train.max_steps": 12, "train.batch_size": 16})))
    losses = [line["policy/loss"] for line in steps_of(out)]
    assert losses[-1] < losses[0] - by, losses
    return str(out / "model")


@pytest.mark.prove
def test_supervised_training_on_three_kinds_of_questions(tmp_path: Path, tiny_model: Callable[..., str]) -> None:
    taught("sft_visual_math_tiny.yaml", tiny_model("qwen2_5_vl"), tmp_path / "sft", by=0.5)


@pytest.mark.parametrize("example", ["quickstart", pytest.param("quickstart_qlora", marks=pytest.mark.prove)])
def test_the_quickstart_in_short(example: str, warm_model: str, tmp_path: Path) -> None:
    flags = {"train.max_steps": 2, "train.batch_size": 16, "rollout.batch_size": 4, "eval.max_samples": 16}
    out = tmp_path / example
    train_rl(load(RlConfig, recipe(f"counting_tiny/{example}.yaml", warm_model, out, **flags)))
    assert [line["step"] for line in read_metrics(out) if "eval/visual_math/pass@1" in line] == [0, 2]
    assert all(line["sync/logprob_diff_max"] < 1e-3 for line in steps_of(out))
    card = ModelCard(next(out.glob("*/README.md")).read_text())
    assert "`sync/logprob_diff_max`" in card.text
    assert "![Curves of the run](curves.png)" in card.text
    if example == "quickstart":
        check_loads_in_plain_programs(out / "model", tmp_path)


def check_loads_in_plain_programs(model: Path, folder: Path) -> None:
    """The saved model needs no vlmrl: Transformers and vLLM load it and generate the same tokens."""
    environment = {name: value for name, value in os.environ.items() if name not in startup.environment()}
    done = subprocess.run(
        [sys.executable, str(PLAIN_ENGINE), str(model)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    tokens = next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert tokens["vllm"] == tokens["transformers"]


def test_sft_then_eval_then_rl_with_a_reference_and_engines_apart(
    warm_model: str, tmp_path: Path, digits_reward: str
) -> None:
    evaluation = {
        "actor": {"model_name_or_path": warm_model},
        "eval": {"dataset": "visual_math?pixels=112&size=16", "n_samples_per_prompt": 2},
        "rollout": {"max_new_tokens": 6},
        "vllm": {"cpu_kv_cache_gib": 0.25},
        "ds": {"param_dtype": "fp32"},
        "ckpt": {"output_dir": str(tmp_path / "eval")},
    }
    evaluate(EvalConfig.model_validate(evaluation))
    (metrics,) = read_metrics(tmp_path / "eval")
    assert 0.0 <= metrics["eval/visual_math/pass@1"] <= metrics["eval/visual_math/pass@2"] <= 1.0

    out = tmp_path / "rl"
    flags = {
        "actor.adam.lr": 1e-3,
        "actor.lr_scheduler": "constant",
        # Features of a frozen tower are cached: the second pass of the old log-probs uses those of the first.
        "actor.freeze_visual_encoder": "true",
        "actor.freeze_projector": "true",
        "train.colocate_all": "false",
        "train.colocate_actor_ref": "true",
        "algo.kl.init_coef": 0.01,
        "algo.kl.use_loss": "true",
        "algo.kl.estimator": "k3",
        "reward.remote_url": digits_reward,
        "reward.remote_weight": 0.1,
        "data.eval_fraction": 0.1,
        "rollout.temperature": 0.7,
        "rollout.batch_size": 4,
        "train.batch_size": 16,
        "train.max_steps": 2,
        "eval.max_samples": 8,
    }
    train_rl(load(RlConfig, recipe("visual_math_tiny.yaml", warm_model, out, **flags)))
    steps = steps_of(out)
    assert steps[0]["kl/reference"] < 1e-6 < steps[1]["kl/reference"]
    assert {"reward/parts/exact", "reward/parts/digits"} <= steps[0].keys()
    # In addition to eval.dataset, a tenth of the training rows.
    assert {"eval/visual_math/pass@1", "eval/visual_math-2/pass@1"} <= read_metrics(out)[0].keys()
    # The temperature divides the logits on both sides.
    assert all(line["sync/logprob_diff_max"] < 1e-3 for line in steps)
    check_first_step(*steps)


def check_first_step(first: Metrics, second: Metrics) -> None:
    """Check that a run compares all paths to log-probs once before its first update, with and without the images."""
    # The engine scores existing tokens as it samples: at this temperature, without the banned tokens.
    alike = ("engine", "old", "old_again", "padded", "update")
    assert all(first[f"verify/images/{name}_effect"] > 0.01 for name in (*alike, "reference")), first
    assert all(first[f"verify/images/{name}_gap"] < 1e-4 for name in alike), first
    assert first["time/verify_images_s"] > 0
    # Layouts are equal in fp32; the gaps between engine, layouts, and the engine's prefill and decode are rounding.
    assert max(first["verify/layouts/values_gap"], first["verify/layouts/gradients_gap"]) < 5e-6, first
    gaps = {
        "first": max(first[f"verify/noise/{name}"] for name in ("gap", "layout_gap", "decode_gap")),
        "second": second["verify/noise/gap"],
    }
    assert max(gaps.values()) < 5 * first["verify/noise/level"], gaps
    assert "verify/noise/level" not in second, "measured again every tenth step"
    assert not [name for name in second if name.startswith(("verify/images/", "verify/layouts/"))]
