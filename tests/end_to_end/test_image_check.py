"""The image check with real vLLM on CPU: a correct run passes on every path, an engine that drops images fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_pair import Trainer

from vlmrl import plugins
from vlmrl.config.data import Columns
from vlmrl.config.vllm import Vllm
from vlmrl.data.media import Blank, InlineMedia
from vlmrl.errors import SyncError
from vlmrl.rollout import requests
from vlmrl.rollout.engine import RolloutEngine
from vlmrl.rollout.settings import EngineSettings
from vlmrl.types import Floats, Group, Prompt, Sampling
from vlmrl.verify.images import check
from vlmrl.verify.noise import NoiseCheck, Paths

COLUMNS = Columns(max_pixels=200 * 200)
BOUND = 1e-3


@dataclass
class Engine:
    """An engine and its event loop."""

    engine: RolloutEngine
    tools: plugins.Processor
    runner: asyncio.Runner
    model: str

    def prompt(self, index: int) -> Prompt:
        assert self.tools.resize_factor is not None
        sizes = [
            (self.tools.resize_factor * (4 + index + i), self.tools.resize_factor * 4) for i in range(1 + index % 2)
        ]
        rng = np.random.default_rng(index)
        media = tuple(
            InlineMedia(f"{index}.{i}", (w, h), rng.integers(0, 255, (h, w, 3), dtype=np.uint8))
            for i, (w, h) in enumerate(sizes)
        )
        text = self.tools.render("how many dots?", num_images=len(media), columns=COLUMNS)
        tokens, request = self.tools.encode(text, sizes)
        return Prompt(index, f"test:{index}", text, tokens, request, label=None, media=media)

    def generate(self) -> list[Group]:
        sampling = Sampling(n=2, temperature=1.0, top_p=0.9, max_new_tokens=12, seed=0)

        async def ask() -> list[Group]:
            return list(await asyncio.gather(*(self.engine.generate(self.prompt(i), sampling) for i in range(3))))

        return self.runner.run(ask())

    def score(self, groups: Sequence[Group]) -> list[Floats]:
        async def ask() -> list[list[Floats]]:
            return list(await asyncio.gather(*(self.engine.score(group) for group in groups)))

        return [row for rows in self.runner.run(ask()) for row in rows]


@pytest.fixture(scope="module")
def engine(tiny_model: Callable[..., str]) -> Iterator[Engine]:
    model = tiny_model("qwen2_5_vl", size="micro")
    engine = EngineSettings(
        model=model,
        vllm=Vllm(cpu_kv_cache_gib=0.25),
        columns=COLUMNS,
        trust_remote_code=False,
        dtype="fp32",
        max_model_len=640,
        top_p=0.9,
        name="engine-0",
    ).build()
    tools = plugins.processor_of(model, COLUMNS)
    with asyncio.Runner() as runner:
        runner.run(engine.start())
        yield Engine(engine, tools, runner, model)
        runner.run(engine.shutdown())


def test_an_engine_scores_answers_as_it_did_when_it_made_them(engine: Engine) -> None:
    # Below top_p 1 the log-probs of rollouts are the model's own, like those of a score.
    groups = engine.generate()
    rows = iter(engine.score(groups))
    for group in groups:
        for segment in group.segments:
            np.testing.assert_allclose(next(rows), segment.logprobs, atol=5e-5)
    metrics = check(groups, paths={"engine": engine.score}, bound=BOUND)
    assert metrics["verify/images/engine_effect"] > 0.05
    assert metrics["verify/images/engine_gap"] < 5e-5


def test_an_engine_that_gets_blank_pixels_is_found_out(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = requests.engine_prompt

    def blinded(prompt: Prompt, engine_kwargs: Any) -> dict[str, Any]:
        grey = tuple(Blank(f"grey {media.hash}", media.size) for media in prompt.media)
        return sound(replace(prompt, media=grey), engine_kwargs)

    monkeypatch.setattr(requests, "engine_prompt", blinded)
    with pytest.raises(SyncError, match="path engine ignores the images"):
        check(engine.generate(), paths={"engine": engine.score}, bound=BOUND)


def test_a_tower_that_is_a_step_behind_is_found_by_the_measured_bound(engine: Engine) -> None:
    trainer = Trainer(Path(engine.model))

    def padded(groups: Sequence[Group]) -> list[Floats]:
        return [trainer.plain_logprobs(segment) for group in groups for segment in group.segments]

    paths = Paths(prefill=engine.score, padded=padded, exact=None, layout=None)
    check = NoiseCheck(paths, floor=2e-6, stops=True, in_turn=True, seed=0, say=print)
    groups = engine.generate()
    assert check.check(1, groups)["verify/noise/gap"] < 1e-5
    assert trainer.change("vision", by=0.02)
    with pytest.raises(SyncError, match="engine and trainer disagree"):
        check.check(2, groups)
