"""A served reward model gives the same scores as one in the run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from rewards.answers import group
from rewards.reward_server import serving

from vlmrl.commands.serve_reward import ModelJudge, serve_rm
from vlmrl.config.load import load
from vlmrl.config.reward import Reward
from vlmrl.config.run import ServeConfig
from vlmrl.config.serve import Serve
from vlmrl.data.media import InlineMedia
from vlmrl.data.packing import make_pack
from vlmrl.errors import ConfigError
from vlmrl.models import tiny
from vlmrl.models.value_head import Scale, save_value_model, value_net
from vlmrl.plugins import Processor, processor
from vlmrl.rewards.question import Question
from vlmrl.rewards.rewarder import Rewarder
from vlmrl.rewards.server import make_app
from vlmrl.types import Sample

torch.set_num_threads(1)


def read(path: Path) -> Processor:
    return processor(str(path), min_pixels=3136, max_pixels=100_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vision-language reward model with random weights."""
    out = tmp_path_factory.mktemp("served")
    base = tiny.build("qwen2_5_vl", out / "base", size="micro")
    net = value_net(str(base), dtype=torch.float32, attn_implementation="sdpa", head_seed=0)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    save_value_model(net, read(base), out / "judge", scale=Scale(0.5, 2.0))
    return out / "judge"


@pytest.fixture(scope="module")
def judge(folder: Path) -> ModelJudge:
    return ModelJudge(config(folder), str(folder))


def config(folder: Path, *words: str) -> ServeConfig:
    given = ["--reward.model_name_or_path", str(folder), "--ds.param_dtype", "fp32", "--data.max_pixels", "100000"]
    return load(ServeConfig, [*given, *words])


def picture(seed: int, width: int, height: int) -> InlineMedia:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return InlineMedia(f"picture{seed}", (width, height), pixels)


def at_home(judge: ModelJudge, folder: Path, prompt: str, response: str, *media: InlineMedia) -> float:
    """The score of prompt, answer and end token, in a pass of their own."""
    reader = read(folder)
    tokens, _ = reader.encode(prompt, [one.size for one in media])
    answer = reader.tokenizer(response, add_special_tokens=False, split_special_tokens=True).input_ids
    whole = np.array([*tokens, *answer, reader.eos_token_ids[0]])
    sample = Sample(whole, np.arange(len(whole)) >= len(tokens), media)
    ((_, score),), _ = judge._model.score([make_pack([sample], [0], "padded")])
    return score


def test_it_reads_prompt_images_answer_and_end(judge: ModelJudge, folder: Path) -> None:
    sight = f"{read(folder).image_text()}how many?"  # type: ignore[attr-defined]
    wide, tall = picture(0, 84, 56), picture(1, 56, 112)
    asked = [
        Question("a", sight, "two", media=(wide,)),
        Question("b", "2+2=", "4"),
        Question("c", sight, "two", media=(tall,)),
        Question("d", sight, "<|image_pad|>", media=(wide,)),
        Question("e", "2+2=", ""),
    ]
    found = judge.judge(asked)
    assert [verdict.problem for verdict in found] == [None] * 5
    expected = [at_home(judge, folder, q.prompt, q.response, *q.media) for q in asked]  # type: ignore[arg-type]
    assert [verdict.value for verdict in found] == pytest.approx(expected, abs=1e-5)
    assert len({round(value, 4) for value in expected}) == 5


def test_an_unreadable_request_fails_alone(judge: ModelJudge, folder: Path) -> None:
    sight = f"{read(folder).image_text()}how many?"  # type: ignore[attr-defined]
    blind, fine, long = judge.judge(
        [Question("a", sight, "2"), Question("b", "x", "y"), Question("c", "x", "y " * 3000)]
    )
    assert "1 placeholders for 0 images" in str(blind.problem)
    assert fine.problem is None
    assert "more than data.max_len" in str(long.problem)
    assert judge.judge([]) == []


def test_scores_are_in_units_of_the_models_scale(judge: ModelJudge, folder: Path) -> None:
    normal = ModelJudge(config(folder, "--reward.normalize_enable"), str(folder))
    asked = [Question("a", "x", "y"), Question("b", "2+2=", "4")]
    plain = [verdict.value for verdict in judge.judge(asked)]
    assert [v.value for v in normal.judge(asked)] == pytest.approx([(value - 0.5) / 2.0 for value in plain], abs=1e-6)


def test_a_run_gets_its_scores_over_http(judge: ModelJudge, folder: Path) -> None:
    reader = read(folder)
    sight = picture(0, 84, 56)
    prompt = f"{reader.image_text()}how many?"  # type: ignore[attr-defined]
    one = group("two", "three", media=(sight,), prompt=prompt)
    with (
        serving(make_app(judge, Serve(), token=None)) as url,
        Rewarder(Reward(remote_url=url, remote_images="data"), token="") as rewarder,
    ):
        scores = rewarder.score([one])[0]
    expected = [at_home(judge, folder, prompt, answer, sight) for answer in ("two", "three")]
    assert [score.total for score in scores] == pytest.approx(expected, abs=1e-5)


def test_setting_errors_are_raised_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.delenv("VLMRL_RM_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="set the environment variable VLMRL_RM_TOKEN"):
        serve_rm(config(folder / "nowhere", "--serve.host", "0.0.0.0"))


def test_text_that_cannot_be_encoded_fails_alone(judge: ModelJudge) -> None:
    good, bad = judge.judge([Question("a", "how many?", "two"), Question("b", "how many?", "\ud800")])
    assert good.problem is None
    assert bad.problem == "prompt and answer are no text: surrogates not allowed"
