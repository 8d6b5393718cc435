"""Conversations on real vLLM: the trainer computes the log-probs of each token as the engine sampled it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from agent_stack import Stack, rows

from vlmrl.agents.tool_calls import ToolCallParser
from vlmrl.models import tiny

STEER = Path(__file__).parents[2] / "examples" / "agents" / "steer.py"
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
