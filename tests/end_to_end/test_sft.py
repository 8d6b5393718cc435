"""Supervised training on conversations with images in several turns: layouts, ranks, resume, early stop."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from recipes import read_metrics, steps_of

from vlmrl.commands.sft import train_sft
from vlmrl.config.load import load
from vlmrl.config.stages import SftConfig

pytestmark = pytest.mark.usefixtures("ray_session")

THOUGHT = "<think>\nhm\n</think>\n\n"


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Conversations of one to three turns, some with images in any of them."""
    folder = tmp_path_factory.mktemp("rows")
    rng = np.random.default_rng(0)
    lines = []
    for row in range(24):
        messages, names = [], []
        for turn in range(1 + row % 3):
            images = int(rng.integers(0, 3)) if row % 4 else 0
            for _ in range(images):
                names.append(f"{row}_{len(names)}.png")
                side = 28 * int(rng.integers(1, 4))
                Image.fromarray(rng.integers(0, 255, (side, 56, 3), dtype=np.uint8)).save(folder / names[-1])
            messages += [
                {"role": "user", "content": f"{'<image>' * images} what of {row}?"},
                {"role": "assistant", "content": f"it is {row + turn}" * (1 + row % 2)},
            ]
        lines.append(json.dumps({"messages": messages, "images": names}))
    file = folder / "rows.jsonl"
    file.write_text("\n".join(lines))
    return str(file)


def train(model: str, data: str, out: Path, **flags: Any) -> list[dict[str, Any]]:
    """Run `vlmrl sft` and return the metrics of its steps."""
    common = {
        "actor.model_name_or_path": model,
        "actor.adam.lr": 1e-3,
        "actor.lr_scheduler": "constant",
        "data.prompt_dataset": data,
        "data.multiturn": "true",
        "ds.param_dtype": "fp32",
        "train.batch_size": 4,
        "ckpt.output_dir": out,
    }
    train_sft(load(SftConfig, [word for flag, value in (common | flags).items() for word in (f"--{flag}", str(value))]))
    return steps_of(out)


def test_packed_on_two_ranks_and_resumed_is_padded_on_one(
    tmp_path: Path, tiny_model: Callable[..., str], conversations: str
) -> None:
    model = tiny_model("qwen2_5_vl", size="micro")
    padded = train(model, conversations, tmp_path / "a", **{"train.max_steps": 4, "train.layout": "padded"})
    two = {"actor.num_gpus_per_node": 2, "ds.zero_stage": 3, "ckpt.save_steps": 2}
    train(model, conversations, tmp_path / "b", **two, **{"train.max_steps": 2})
    packed = train(model, conversations, tmp_path / "b", **two, **{"train.max_steps": 4, "ckpt.load_enable": "true"})
    assert [line["step"] for line in packed] == [1, 2, 3, 4]
    for one, other in zip(padded, packed, strict=True):
        assert other["policy/loss"] == pytest.approx(one["policy/loss"], rel=1e-4)
        assert other["policy/grad_norm"] == pytest.approx(one["policy/grad_norm"], rel=1e-3)
        assert other["media/bytes_moved"] == one["media/bytes_moved"]
        assert other["time/data_wait_s"] >= 0
    assert any(line["pack/padding_fraction"] > 0 for line in padded)
    assert all(line["pack/padding_fraction"] == 0 for line in packed)


def test_a_thinking_model_that_is_sampled_and_a_run_that_ends_early_with_its_best_model(
    tmp_path: Path, tiny_model: Callable[..., str]
) -> None:
    rows = [
        {"messages": [
            {"role": role, "content": text.format(row)}
            for role, text in (("user", "{}?"), ("assistant", THOUGHT + "{}"), ("user", "no"), ("assistant", "sorry"))
        ]}
        for row in range(20)
    ]  # fmt: skip
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "run"
    flags = {
        "actor.adam.lr": 0.3,  # so large that no evaluation is better than the first
        "actor.lr_warmup_ratio": 0,
        "data.eval_fraction": 0.2,
        "eval.steps": 1,
        "eval.early_stop_patience": 2,
        "eval.generate_enable": "true",
        "train.colocate_all": "true",
        "eval.n_samples_per_prompt": 2,
        "rollout.max_new_tokens": 4,
        "reward.functions": "exact",
        "ckpt.best_metric_key": "eval/rows/loss",
        "train.max_epochs": 3,
        "train.max_steps": 9,
    }
    steps = train(tiny_model("qwen3", size="micro"), str(file), out, **flags)
    losses = [line["eval/rows/loss"] for line in read_metrics(out) if "eval/rows/loss" in line]
    best = json.loads((out / "best" / "best.json").read_text())
    assert best["value"] == min(losses)
    assert len(steps) == best["step"] + 2 < 9
    assert (out / "best" / "config.json").exists() or any((out / "best").rglob("config.json"))
    assert (out / "model" / "config.json").exists()
    evaluations = [line for line in read_metrics(out) if "eval/rows/pass@2" in line]
    assert len(evaluations) == len(losses)
    assert evaluations[0]["eval/rows/tokens_mean"] <= 4
    transcripts = sorted(path.name for path in (out / "rollouts").glob("*.jsonl"))
    assert len(transcripts) == len(evaluations), transcripts
