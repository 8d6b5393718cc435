"""`vlmrl generate` on the real stack: rows of responses, which other verbs read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import read_metrics, recipe, steps_of

from vlmrl.commands.evaluate import evaluate
from vlmrl.commands.generate import generate
from vlmrl.commands.sft import train_sft
from vlmrl.config.load import load
from vlmrl.config.stages import SftConfig
from vlmrl.config.verbs import EvalConfig, GenerateConfig
from vlmrl.errors import DataError
from vlmrl.models.value_head import save_value_model, value_net
from vlmrl.plugins import processor

pytestmark = pytest.mark.usefixtures("ray_session")

QUESTIONS = "visual_math?families=count+clock&pixels=112&size=10"


def words(flags: dict[str, Any]) -> list[str]:
    return [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def flags_of(model: str, out: Path, reward: str) -> dict[str, Any]:
    return {
        "actor.model_name_or_path": model,
        "data.prompt_dataset": QUESTIONS,
        "reward.functions": "{}",
        "reward.remote_url": reward,
        "rollout.n_samples_per_prompt": 4,
        "rollout.batch_size": 4,
        "rollout.max_new_tokens": 8,
        "vllm.cpu_kv_cache_gib": 0.25,
        "ds.param_dtype": "fp32",
        "ckpt.output_dir": out,
    }


@pytest.fixture(scope="module")
def scorer(tiny_model: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A reward model with random weights."""
    base, folder = tiny_model("qwen2_5_vl"), tmp_path_factory.mktemp("scorer")
    net = value_net(base, dtype=torch.float32, attn_implementation="sdpa", head_seed=0)
    save_value_model(net, processor(base, min_pixels=3136, max_pixels=100_000), folder)
    return str(folder)


def test_responses_with_their_images(
    tiny_model: Callable[..., str], tmp_path: Path, digits_reward: str, scorer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "generated"
    flags = flags_of(tiny_model("qwen2_5_vl"), out, digits_reward) | {"reward.model_name_or_path": scorer}
    generate(load(GenerateConfig, words(flags)))
    rows = read_rows(out / "generated.jsonl")
    assert rows
    digits = [sum(c.isdigit() for c in row["answer"]) / len(row["answer"]) for row in rows]
    by_model = {round(row["score"] - share, 6) for row, share in zip(rows, digits, strict=True)}
    assert len(by_model) > 20, "the reward model's part differs between responses and images"
    assert all((out / image).is_file() for row in rows for image in row["images"])
    *_, last = read_metrics(out)
    assert (last["generate/rows"], last["generate/responses"], last["generate/written"]) == (10, 40, len(rows))
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["generate/written"] == len(rows)
    page = (out / "report.html").read_text()
    assert '"state":"finished"' in page
    assert page.count('"set":"generated"') == 10
    # A model that has learnt nothing does not end its responses.
    assert sum(row["truncated"] for row in rows) > 30
    with pytest.raises(DataError, match=r"makes no row of 40 responses, of which 40 have a score, .* were cut at"):
        generate(load(GenerateConfig, words(flags | {"generate.keep": "best", "generate.min_score": 1e9})))


@pytest.mark.prove
def test_self_improvement_after_a_kill(tiny_model: Callable[..., str], tmp_path: Path, digits_reward: str) -> None:
    """Responses of two engines are sampled once, survive a kill, and are the targets of supervised training."""
    model, out = tiny_model("qwen2_5_vl"), tmp_path / "generated"
    flags = flags_of(model, out, digits_reward) | {"vllm.num_engines": 2}
    generate(load(GenerateConfig, words(flags)))
    journal = (out / "responses.journal").read_bytes()
    lines = journal.splitlines(keepends=True)
    assert len(lines) == 1 + 10 + 3  # header, prompts, ends of batches of 4, 4 and 2
    (out / "responses.journal").write_bytes(b"".join(lines[:-2]) + lines[-2][:40])
    rows = tmp_path / "best" / "rows.jsonl"
    generate(load(GenerateConfig, words(flags | {"generate.output": rows})))
    assert (out / "responses.journal").read_bytes() == journal, "the same responses are sampled again, and no others"
    assert {row["source"] for row in read_rows(rows)} == {f"visual_math:{i}" for i in range(10)}
    training = {
        "actor.model_name_or_path": model,
        "data.prompt_dataset": rows,
        "train.batch_size": 8,
        "train.max_steps": 1,
        "ds.param_dtype": "fp32",
        "ckpt.output_dir": tmp_path / "sft",
    }
    train_sft(load(SftConfig, words(training)))
    (step,) = steps_of(tmp_path / "sft")
    assert step["data/rows_dropped"] == 0
    assert step["vision/tower_calls"] > 0
    evaluation = {
        "actor.model_name_or_path": tmp_path / "sft" / "model",
        "eval.dataset": QUESTIONS,
        "rollout.max_new_tokens": 8,
        "vllm.cpu_kv_cache_gib": 0.25,
        "ds.param_dtype": "fp32",
        "ckpt.output_dir": tmp_path / "eval",
    }
    evaluate(load(EvalConfig, words(evaluation)))
    assert "eval/visual_math/pass@1" in read_metrics(tmp_path / "eval")[-1]


@pytest.mark.prove
def test_the_models_own_best_responses_teach_it(tiny_model: Callable[..., str], tmp_path: Path) -> None:
    """The three commands of the guide, as recipes, after a warm-up that leaves much to learn."""
    train_sft(load(SftConfig, recipe("quickstart_sft.yaml", tiny_model("qwen2_5_vl"), tmp_path / "warm")))
    warm = str(tmp_path / "warm" / "model")
    fewer = {"data.max_samples": 1024}
    generate(load(GenerateConfig, recipe("generate_tiny.yaml", warm, tmp_path / "generated", **fewer)))
    rows = {"data.prompt_dataset": tmp_path / "generated" / "generated.jsonl", "train.max_steps": 40}
    train_sft(load(SftConfig, recipe("quickstart_sft/self_improvement.yaml", warm, tmp_path / "improved", **rows)))
    before, after = (accuracy(str(tmp_path / name / "model"), tmp_path) for name in ("warm", "improved"))
    # Four standard errors of the difference of two accuracies over 512 responses, at most.
    assert after - before > 4 * (2 * 0.25 / 512) ** 0.5, (before, after)


def accuracy(model: str, folder: Path) -> float:
    """Exact sampled responses to new questions."""
    out = folder / f"eval_{Path(model).parent.name}"
    flags = {
        "actor.model_name_or_path": model,
        "eval.dataset": "visual_math?families=count&difficulty=1&pixels=112&size=512",
        "eval.temperature": 1.0,
        "reward.functions": "exact",
        "data.max_len": 256,
        "rollout.max_new_tokens": 8,
        "vllm.cpu_kv_cache_gib": 0.25,
        "ds.param_dtype": "fp32",
        "ckpt.output_dir": out,
    }
    evaluate(load(EvalConfig, words(flags)))
    share: float = read_metrics(out)[-1]["eval/visual_math/pass@1"]
    return share
