"""`vlmrl rm` on the real stack: a run goes on where it stopped, and `vlmrl serve-rm` and `vlmrl rl` read its model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from recipes import read_metrics, recipe, steps_of

from vlmrl.commands.rl import train_rl
from vlmrl.commands.rm import train_rm
from vlmrl.commands.serve_reward import ModelScorer
from vlmrl.commands.sft import train_sft
from vlmrl.config.load import load
from vlmrl.config.pairs import PairData
from vlmrl.config.serving import ServeConfig
from vlmrl.config.stages import RmConfig, SftConfig
from vlmrl.config.verbs import RlConfig
from vlmrl.data.columns import RowRequirements
from vlmrl.data.packing import make_pack
from vlmrl.data.pairs import collate_pairs
from vlmrl.data.source import Source
from vlmrl.rewards.protocol import RewardRequest

pytestmark = pytest.mark.usefixtures("ray_session")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions with images, right and wrong responses."""
    folder, rows = tmp_path_factory.mktemp("pairs"), []
    for number in range(24):
        pixels = np.full((56, 56, 3), 255, dtype=np.uint8)
        pixels[: 6 * (number % 9 + 1)] = 0
        Image.fromarray(pixels).save(folder / f"{number}.png")
        row = {"input": "How dark is it?", "images": [f"{number}.png"], "chosen": str(number % 9 + 1), "rejected": "no"}
        rows.append(row | {"margin": number % 3 / 10})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "pairs.jsonl"


def words(model: str, out: Path, data: Path, **flags: Any) -> list[str]:
    common = {
        "actor.model_name_or_path": model,
        "actor.adam.lr": 1e-3,
        "actor.lr_scheduler": "constant",
        "data.prompt_dataset": data,
        "data.max_len": 128,
        "data.eval_fraction": 0.25,
        "train.batch_size": 4,
        "train.max_steps": 4,
        "ds.param_dtype": "fp32",
        "ckpt.output_dir": out,
    }
    return [word for flag, value in (common | flags).items() for word in (f"--{flag}", str(value))]


def plain(line: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics that do not depend on the machine, or on images that were encoded before."""
    return {name: value for name, value in line.items() if not name.startswith(("time/", "throughput/", "vision/"))}


def check_server(model: str, data: Path) -> None:
    """The reward server reads the same tokens as training did."""
    serve = ["--reward.model_name_or_path", model, "--ds.param_dtype", "fp32", "--reward.normalize_enable"]
    scorer = ModelScorer(load(ServeConfig, serve), model)
    source = Source(
        model=model,
        trust_remote_code=False,
        data=PairData(prompt_dataset=str(data), max_len=128),
        evaluation=None,
        seed=0,
        requirements=RowRequirements(pair=True),
    )
    prompts, _ = source.draw(4)
    samples = collate_pairs(prompts).samples[0::2]
    scores, _ = scorer._model.score([make_pack(samples, range(4), "packed")])
    requests = [
        RewardRequest(prompt.source, prompt.text, prompt.answer or "", media=prompt.media) for prompt in prompts
    ]
    served = [result.value for result in scorer._results(requests)]
    assert served == pytest.approx([score for _, score in scores], abs=1e-5)


def test_a_run_with_adapters_goes_on_where_it_stopped_and_its_model_is_served(
    tmp_path: Path, pairs: Path, tiny_model: Callable[..., str]
) -> None:
    base, out = tiny_model("qwen2_5_vl"), tmp_path / "rm"
    flags = {
        "actor.num_gpus_per_node": 2,
        "data.margin_key": "margin",
        "ds.lora.rank": 4,
        "eval.steps": 2,
        "ckpt.save_steps": 2,
        "ckpt.best_metric_key": "eval/pairs/accuracy",
    }
    train_rm(load(RmConfig, words(base, out, pairs, **flags)))
    first = {line["step"]: plain(line) for line in read_metrics(out)}
    assert {"eval/pairs/accuracy", "eval/pairs/loss", "eval/pairs/calibration_error"} <= first[0].keys()
    assert {"rm/loss", "rm/accuracy", "rm/difference", "rm/grad_norm", "pack/shared_fraction"} <= first[1].keys()
    assert first[4]["rm/loss"] < first[1]["rm/loss"]
    assert first[1]["pack/shared_fraction"] > 0.2
    config = json.loads((out / "model/config.json").read_text())
    assert config["std"] > 0
    assert (out / "best/best.json").exists()

    shutil.rmtree(out / "checkpoints/step_000004")
    shutil.move(out / "model", tmp_path / "model")
    train_rm(load(RmConfig, [*words(base, out, pairs, **flags), "--ckpt.load_enable"]))
    again = {line["step"]: plain(line) for line in read_metrics(out)}
    assert again == first
    assert json.loads((out / "model/config.json").read_text()) == config

    check_server(str(out / "model"), pairs)


def test_a_process_reward_model_learns_from_the_labels_of_steps(tmp_path: Path, tiny_model: Callable[..., str]) -> None:
    rows = [
        {"prompt": f"add {n}", "completions": [f"{n} and", "is 1"], "labels": [bool(n % 2), False]} for n in range(12)
    ]
    data, out = tmp_path / "steps.jsonl", tmp_path / "rm"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"rm.kind": "process", "data.output_key": "completions", "data.label_key": "labels"}
    train_rm(load(RmConfig, words(tiny_model("qwen3"), out, data, **columns, **{"train.max_steps": 2})))
    lines = read_metrics(out)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert {"eval/steps/accuracy", "eval/steps/loss", "eval/steps/calibration_error"} <= lines[0].keys()
    assert lines[1]["rm/loss"] == pytest.approx(np.log(2), abs=0.1)
    assert (out / "model/config.json").exists()


@pytest.mark.prove
def test_a_reward_model_that_sees_prefers_the_right_count_in_95_percent_of_held_out_pairs(
    tmp_path: Path, tiny_model: Callable[..., str]
) -> None:
    """Wrong responses are subtly wrong: mostly one circle more or less."""
    train_sft(load(SftConfig, recipe("quickstart_sft.yaml", tiny_model("qwen2_5_vl"), tmp_path / "sft")))
    out = tmp_path / "rm"
    train_rm(load(RmConfig, recipe("rm_visual_math_tiny.yaml", str(tmp_path / "sft/model"), out)))
    accuracies = {
        line["step"]: line["eval/visual_preferences/accuracy"]
        for line in read_metrics(out)
        if "eval/visual_preferences/accuracy" in line
    }
    assert accuracies[0] < 0.7
    assert accuracies[max(accuracies)] > 0.95, accuracies


@pytest.mark.prove
def test_ppo_learns_from_the_written_model_and_its_critic_starts_from_it(
    tmp_path: Path, pairs: Path, tiny_model: Callable[..., str]
) -> None:
    base, out = tiny_model("qwen2_5_vl"), tmp_path / "rm"
    train_rm(load(RmConfig, words(base, out, pairs, **{"train.max_steps": 1})))
    rl = {
        "reward.model_name_or_path": out / "model",
        "reward.normalize_enable": "true",
        "rollout.batch_size": 4,
        "rollout.max_new_tokens": 4,
        "critic.freezing_steps": -1,
        "train.batch_size": 16,
        "train.max_steps": 1,
        "eval.max_samples": 4,
        "eval.steps": -1,
    }
    train_rl(load(RlConfig, recipe("counting_tiny/reward_model.yaml", base, tmp_path / "rl", **rl)))
    (line,) = steps_of(tmp_path / "rl")
    assert line["value/grad_norm"] > 0
    assert line["reward/parts/model"] == pytest.approx(line["reward/mean"], abs=1e-6)
