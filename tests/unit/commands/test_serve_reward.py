"""A served reward model gives the same scores as one in the run."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rewards.responses import conversations, group
from rewards.reward_server import serving

from vlmrl.commands.serve_reward import ModelScorer, serve_rm
from vlmrl.config.load import load
from vlmrl.config.reward import Reward
from vlmrl.config.serve import Serve
from vlmrl.config.serving import ServeConfig
from vlmrl.data.media import InlineMedia
from vlmrl.data.packing import make_pack
from vlmrl.errors import ConfigError
from vlmrl.models import tiny
from vlmrl.models.value_head import Scale, save_value_model, value_net
from vlmrl.plugins import Processor, processor
from vlmrl.rewards.protocol import RewardRequest
from vlmrl.rewards.rewarder import Rewarder
from vlmrl.rewards.server import make_app
from vlmrl.types import Group, Sample, Score

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
    save_value_model(net, read(base), out / "scorer", scale=Scale(0.5, 2.0))
    return out / "scorer"


@pytest.fixture(scope="module")
def scorer(folder: Path) -> ModelScorer:
    return ModelScorer(config(folder), str(folder))


def config(folder: Path, *words: str) -> ServeConfig:
    given = ["--reward.model_name_or_path", str(folder), "--ds.param_dtype", "fp32", "--data.max_pixels", "100000"]
    return load(ServeConfig, [*given, *words])


def picture(seed: int, width: int, height: int) -> InlineMedia:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return InlineMedia(f"picture{seed}", (width, height), pixels)


def direct_score(scorer: ModelScorer, folder: Path, prompt: str, response: str, *media: InlineMedia) -> float:
    """The score of prompt, response and end token, in a forward pass of their own."""
    reader = read(folder)
    tokens, _ = reader.encode(prompt, [one.size for one in media])
    ids = reader.tokenizer(response, add_special_tokens=False, split_special_tokens=True).input_ids
    whole = np.array([*tokens, *ids, reader.eos_token_ids[0]])
    sample = Sample(whole, np.arange(len(whole)) >= len(tokens), media)
    ((_, score),), _ = scorer._model.score([make_pack([sample], [0], "padded")])
    return score


def test_it_reads_prompt_images_response_and_end(scorer: ModelScorer, folder: Path) -> None:
    sight = f"{read(folder).image_text()}how many?"  # type: ignore[attr-defined]
    wide, tall = picture(0, 84, 56), picture(1, 56, 112)
    asked = [
        RewardRequest("a", sight, "two", media=(wide,)),
        RewardRequest("b", "2+2=", "4"),
        RewardRequest("c", sight, "two", media=(tall,)),
        RewardRequest("d", sight, "<|image_pad|>", media=(wide,)),
        RewardRequest("e", "2+2=", ""),
    ]
    results = asyncio.run(scorer.score(asked))
    assert [result.problem for result in results] == [None] * 5
    expected = [direct_score(scorer, folder, q.prompt, q.response, *q.media) for q in asked]  # type: ignore[arg-type]
    assert [result.value for result in results] == pytest.approx(expected, abs=1e-5)
    assert len({round(value, 4) for value in expected}) == 5


def test_an_unreadable_request_fails_alone(scorer: ModelScorer, folder: Path) -> None:
    sight = f"{read(folder).image_text()}how many?"  # type: ignore[attr-defined]
    asked = [RewardRequest("a", sight, "2"), RewardRequest("b", "x", "y"), RewardRequest("c", "x", "y " * 3000)]
    blind, fine, long = asyncio.run(scorer.score(asked))
    assert "1 placeholders for 0 images" in str(blind.problem)
    assert fine.problem is None
    assert "more than data.max_len" in str(long.problem)
    assert asyncio.run(scorer.score([])) == []


def test_scores_are_in_units_of_the_models_scale(scorer: ModelScorer, folder: Path) -> None:
    normal = ModelScorer(config(folder, "--reward.normalize_enable"), str(folder))
    asked = [RewardRequest("a", "x", "y"), RewardRequest("b", "2+2=", "4")]
    plain = [result.value for result in asyncio.run(scorer.score(asked))]
    scaled = [result.value for result in asyncio.run(normal.score(asked))]
    assert scaled == pytest.approx([(value - 0.5) / 2.0 for value in plain], abs=1e-6)


def test_a_run_gets_its_scores_over_http(scorer: ModelScorer, folder: Path) -> None:
    reader = read(folder)
    sight = picture(0, 84, 56)
    prompt = f"{reader.image_text()}how many?"  # type: ignore[attr-defined]
    one = group("two", "three", media=(sight,), prompt=prompt)

    async def scores_over_http() -> list[Score]:
        async with (
            serving(make_app(scorer, Serve(), token=None)) as url,
            Rewarder(Reward(remote_url=url, remote_images="data"), token="") as rewarder,
        ):
            return (await rewarder.score([one]))[0]

    scores = asyncio.run(scores_over_http())
    expected = [direct_score(scorer, folder, prompt, text, sight) for text in ("two", "three")]
    assert [score.total for score in scores] == pytest.approx(expected, abs=1e-5)


def test_it_reads_the_whole_conversation(scorer: ModelScorer, folder: Path) -> None:
    image = read(folder).image_text()  # type: ignore[attr-defined]
    first, later = picture(0, 84, 56), picture(1, 56, 112)
    one = conversations(first, later)
    text = f"{image}how many?"
    rendered = [f"{text}6<|im_end|>no: {image}again", text]
    rollouts = [
        replace(rollout, episode=replace(rollout.episode, rendered=before + rollout.text))  # type: ignore[type-var]
        for rollout, before in zip(one.rollouts, rendered, strict=True)
    ]
    one = Group(replace(one.prompt, text=text), tuple(rollouts))

    async def scores_over_http() -> list[Score]:
        async with (
            serving(make_app(scorer, Serve(), token=None)) as url,
            Rewarder(Reward(remote_url=url, remote_images="data"), token="") as rewarder,
        ):
            return (await rewarder.score([one]))[0]

    scores = asyncio.run(scores_over_http())
    expected = [
        direct_score(scorer, folder, rendered[0], "7", first, later),
        direct_score(scorer, folder, rendered[1], "eight", first),
    ]
    assert [score.total for score in scores] == pytest.approx(expected, abs=1e-5)


def test_setting_errors_are_raised_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.delenv("VLMRL_RM_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="set the environment variable VLMRL_RM_TOKEN"):
        serve_rm(config(folder / "nowhere", "--serve.host", "0.0.0.0"))


def test_text_that_cannot_be_encoded_fails_alone(scorer: ModelScorer) -> None:
    requests = [RewardRequest("a", "how many?", "two"), RewardRequest("b", "how many?", "\ud800")]
    good, bad = asyncio.run(scorer.score(requests))
    assert good.problem is None
    assert bad.problem == "prompt and response are not text: surrogates not allowed"
