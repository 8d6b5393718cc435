"""An engine that plays episodes on real vLLM, and the trainer's passes of the same model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_pair import COLUMNS, TEMPERATURE

from vlmrl import plugins
from vlmrl.agents.engine import AgentEngine
from vlmrl.agents.episodes import Player
from vlmrl.agents.gateway.player import AgentPlayer
from vlmrl.agents.settings import AgentEngineSettings, EnvironmentSettings
from vlmrl.config.agent import Agent
from vlmrl.config.vllm import Vllm
from vlmrl.data.packing import make_pack
from vlmrl.data.responses import shortened, to_samples
from vlmrl.learning.forward import LogprobForward
from vlmrl.models.attention import implementation
from vlmrl.models.load import load_model
from vlmrl.models.scorer import Scorer
from vlmrl.rollout.settings import EngineSettings
from vlmrl.types import Floats, Group, Layout, Prompt, Rollout, Sampling

EXACT = 1e-4
LAYOUTS: tuple[Layout, ...] = ("padded", "packed", "shared")
SAMPLING = Sampling(n=3, temperature=TEMPERATURE, top_p=1.0, max_new_tokens=8, seed=3)


class RecordingEngine(AgentEngine):
    """Keeps what vLLM sampled."""

    def __init__(self, settings: AgentEngineSettings) -> None:
        super().__init__(settings)
        self.sampled: list[tuple[int, int, Rollout]] = []
        self.delay_s = 0.0

    async def generate(self, prompt: Prompt, sampling: Sampling, *, adapter: bool = True) -> Group:
        await asyncio.sleep(self.delay_s)
        group = await super().generate(prompt, sampling, adapter=adapter)
        self.sampled += [(prompt.index, sampling.seed, rollout) for rollout in group.rollouts]
        return group


class Stack:
    """An engine that plays episodes, and the trainer's passes of the same model."""

    def __init__(self, model: Path, spec: str, *, max_images: int | None, **agent: Any) -> None:
        settings = Agent(**{"context_len": 600, "num_workers": 6, "max_images": max_images or 16} | agent)
        engine = EngineSettings(
            model=str(model),
            vllm=Vllm(cpu_kv_cache_gib=0.25),
            columns=COLUMNS,
            trust_remote_code=False,
            dtype="fp32",
            max_model_len=settings.context_len,
            max_images=max_images,
            top_p=1.0,
            name="engine-0",
            temperature=TEMPERATURE,
        )
        environments = EnvironmentSettings(spec=spec, agent=settings, columns=COLUMNS, log=None)
        self.engine = RecordingEngine(
            AgentEngineSettings(engine=engine, environments=environments, share=lambda image: image)
        )
        self.read = plugins.processor_of(str(model), COLUMNS)
        cpu = torch.device("cpu")
        net = load_model(str(model), dtype=torch.float32, attn_implementation=implementation("auto", cpu))
        self._forward = LogprobForward(
            Scorer(net), self.read, temperature=TEMPERATURE, bans=True, device=cpu, cache_bytes=0
        )

    async def __aenter__(self) -> Stack:
        await self.engine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.shutdown()

    @property
    def player(self) -> Player:
        assert isinstance(self.engine._player, Player)
        return self.engine._player

    @property
    def agent_player(self) -> AgentPlayer:
        assert isinstance(self.engine._player, AgentPlayer)
        return self.engine._player

    async def play(self, prompts: Sequence[Prompt], player: Player | None = None) -> list[Group]:
        """Play episodes, and check that the trainer would train each token once, as vLLM sampled it."""
        self.engine.sampled.clear()
        player = player or self.player
        groups = await asyncio.gather(*(player.play(prompt, SAMPLING) for prompt in prompts))
        for group in groups:
            for number, rollout in enumerate(group.rollouts):
                assert rollout.episode is not None
                if rollout.episode.stop == "failed":
                    assert rollout.num_sampled == 0
                    continue
                attempt = len(rollout.episode.retried)
                expected = [self._turn(group, number, attempt, turn) for turn in range(len(rollout.turns))]
                for name in ("tokens", "logprobs", "versions"):
                    ours = [getattr(s, name)[s.sampled] for s in rollout.segments]
                    theirs = [getattr(r.segments[0], name)[r.segments[0].sampled] for r in expected]
                    assert np.concatenate(ours).tolist() == np.concatenate(theirs).tolist()
        return groups

    def _turn(self, group: Group, number: int, attempt: int, turn: int) -> Rollout:
        seed = SAMPLING.of_turn(episode=number, attempt=attempt, turn=turn, max_new_tokens=1).seed
        (found,) = (r for index, s, r in self.engine.sampled if (index, s) == (group.prompt.index, seed))
        return found

    def logprobs(self, groups: Sequence[Group], layout: Layout) -> list[Floats]:
        samples = to_samples(groups)
        pack = make_pack(samples, range(len(samples)), layout)
        return [row for _, row in sorted(self._forward.logprobs([pack]), key=lambda of_id: of_id[0])]

    async def check_agreement(self, groups: Sequence[Group]) -> None:
        """Check the log-probs of the trainer in all layouts, and the engine's of whole conversations."""
        segments = [segment for group in groups for segment in group.segments]
        assert min(segment.logprobs.min() for segment in segments) < -1
        for layout in LAYOUTS:
            for row, segment in zip(self.logprobs(groups, layout), segments, strict=True):
                np.testing.assert_allclose(row * segment.sampled, segment.logprobs, atol=EXACT, err_msg=layout)
        for group in groups:
            # vLLM needs room for one more token.
            short = replace(group, rollouts=tuple(shortened(rollout, 100) for rollout in group.rollouts))
            for row, segment in zip(await self.engine.score(short), short.segments, strict=True):
                np.testing.assert_allclose(row, segment.logprobs, atol=EXACT)


def rows(read: plugins.Processor, questions: Sequence[str]) -> list[Prompt]:
    prompts = []
    for index, question in enumerate(questions):
        text = read.render(question, num_images=0, columns=COLUMNS)
        tokens, request = read.encode(text, [])
        prompts.append(Prompt(index, f"test:{index}", text, tokens, request, None, question=question))
    return prompts
