"""Conversations on real vLLM: the trainer computes the log-probs of each token as the engine sampled it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from engine_pair import COLUMNS, TEMPERATURE

from vlmrl import plugins
from vlmrl.agents.engine import AgentEngine
from vlmrl.agents.episodes import Player
from vlmrl.agents.settings import AgentEngineSettings, EnvironmentSettings
from vlmrl.agents.tool_calls import ToolCallParser
from vlmrl.config.agent import Agent
from vlmrl.config.vllm import Vllm
from vlmrl.data.packing import make_pack
from vlmrl.data.responses import shortened, to_samples
from vlmrl.learning.forward import LogprobForward
from vlmrl.models import tiny
from vlmrl.models.attention import implementation
from vlmrl.models.load import load_model
from vlmrl.models.scorer import Scorer
from vlmrl.rollout.settings import EngineSettings
from vlmrl.types import Floats, Group, Layout, Prompt, Rollout, Sampling

EXACT = 1e-4
LAYOUTS: tuple[Layout, ...] = ("padded", "packed", "shared")
STEER = Path(__file__).parents[2] / "examples" / "agents" / "steer.py"
SAMPLING = Sampling(n=3, temperature=TEMPERATURE, top_p=1.0, max_new_tokens=8, seed=3)

ENVIRONMENTS = '''
import os, time

import numpy as np

from vlmrl.agents import Reply, tool


class Faulty:
    """Its third step does what the question of the row says."""

    def reset(self, row, seed):
        self.count, self.what = 0, row["question"]
        return f"Number {seed}?"

    def step(self, response):
        self.count += 1
        if self.count == 3:
            if self.what == "sleep":
                time.sleep(1000)
            if self.what == "exit":
                os._exit(1)
            if self.what == "bomb":
                return Reply(np.zeros((30_000, 30_000, 3), np.uint8))
            if self.what == "nan":
                return Reply("more", reward=float("nan"))
            if self.what == "raise":
                raise RuntimeError("no such move")
        return Reply(f"{len(response)} letters. More.", reward=0.25, done=self.count == 4)

    @tool
    def double(self, x: int) -> str:
        """Twice x."""
        return str(2 * x)


def make():
    return Faulty()
'''


WANDER = f"""
import sys

sys.path.insert(0, {str(STEER.parent)!r})
from steer import MOVES, Steer


class Wander(Steer):
    def step(self, response):
        return super().step([*MOVES][len(response) % 4])
"""
"""Steer for a random model: any response is a move."""


class RecordingEngine(AgentEngine):
    """Keeps what vLLM sampled."""

    def __init__(self, settings: AgentEngineSettings) -> None:
        super().__init__(settings)
        self.sampled: list[tuple[int, int, Rollout]] = []

    async def generate(self, prompt: Prompt, sampling: Sampling, *, adapter: bool = True) -> Group:
        group = await super().generate(prompt, sampling, adapter=adapter)
        self.sampled.append((prompt.index, sampling.seed, group.rollouts[0]))
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
        assert self.engine._player is not None
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


def lower_case_history(folder: Path) -> None:
    """Make the chat template rewrite earlier responses, as those of thinking models do."""
    for file in folder.glob("*"):
        if file.suffix in (".json", ".jinja") and "message.content is string" in file.read_text():
            old = "{{- message.content }}"
            new = "{{- message.content | lower if message.role == 'assistant' else message.content }}"
            text = file.read_text()
            assert old in text
            file.write_text(text.replace(old, new))


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("user") / "environments.py"
    path.write_text(ENVIRONMENTS)
    return f"{path}:make"


def test_pictures_in_every_turn(tmp_path: Path) -> None:
    model = tiny.build("qwen2_5_vl", tmp_path / "model", size="micro")
    file = tmp_path / "wander.py"
    file.write_text(WANDER)

    async def run() -> None:
        async with Stack(model, f"{file}:Wander", max_images=6) as stack:
            groups = await stack.play(rows(stack.read, ["", "", ""]))
            await stack.check_agreement(groups)
            media = [len(segment.media) for group in groups for segment in group.segments]
            assert max(media) > 3
            assert all(len(group.prompt.media) == 1 for group in groups)
            hashes = {item.hash for group in groups for segment in group.segments for item in segment.media}
            assert len(hashes) > len(groups), "each turn has a picture of its own"

    asyncio.run(run())


def test_tools_rewritten_histories_and_planted_faults(tmp_path: Path, environments: str) -> None:
    model = tiny.build("qwen3", tmp_path / "model", size="micro")
    lower_case_history(model)
    agent: dict[str, Any] = {
        "max_turns": 5,
        "step_limit_s": 5.0,
        "max_retries": 1,
        "num_workers": 8,
        "context_len": 1500,
    }

    async def run() -> None:
        async with Stack(model, environments, max_images=None, **agent) as stack:
            await check_histories(stack)
            await check_faults(stack)

    asyncio.run(run())


async def check_histories(stack: Stack) -> None:
    """Every second response or so is taken for a tool call: a random model writes none."""

    def parser(text: str) -> list[tuple[str, str, str]]:
        calls = [("double", json.dumps({"x": len(text)}), ""), ("halve", "{}", "")]
        return calls[: len(text) % 3]

    tools = ToolCallParser(stack.read, parser, "hermes")
    histories: tuple[Literal["keep", "template"], ...] = ("keep", "template")
    for history in histories:
        player = replace(
            stack.player, settings=stack.player.settings.model_copy(update={"history": history}), parser=tools
        )
        groups = await stack.play(rows(stack.read, ["one", "two"]), player)
        await stack.check_agreement(groups)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        calls = [rollout.episode.tool_calls for rollout in rollouts if rollout.episode is not None]
        assert sum(calls) > 3
        assert "Twice x." in groups[0].prompt.text
        assert (max(len(rollout.segments) for rollout in rollouts) > 1) == (history == "template")
        assert max(len(rollout.turns) for rollout in rollouts) > 3


async def check_faults(stack: Stack) -> None:
    faults = ["sleep", "exit", "bomb", "nan", "raise"]
    prompts = rows(stack.read, ["fine", *faults, "fine"])
    alone = await stack.play([prompts[0], prompts[-1]])
    groups = await stack.play(prompts)
    for group, expected in zip((groups[0], groups[-1]), alone, strict=True):
        for one, other in zip(group.segments, expected.segments, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist(), "other episodes are as without the faulty ones"
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    for fault, group in zip(faults, groups[1:-1], strict=True):
        for rollout in group.rollouts:
            episode = rollout.episode
            assert episode is not None
            if fault in ("sleep", "exit"):
                assert (episode.stop, episode.failure, len(episode.retried)) == ("failed", "infrastructure", 1), episode
                assert episode.timeouts == 2 * (fault == "sleep")
            else:
                assert (episode.stop, episode.failure, len(episode.retried)) == ("raised", "response", 0), episode
                assert [turn.reward for turn in rollout.turns] == [0.25, 0.25, 0.0]
            assert episode.problem
    kept = [replace(group, rollouts=tuple(r for r in group.rollouts if r.turns)) for group in groups]
    await stack.check_agreement([group for group in kept if group.rollouts])
