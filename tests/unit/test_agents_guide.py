"""The snippets of vlmrl/agents/README.md run, and its tables agree with the code."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from vlmrl.agents.environments import Environments
from vlmrl.agents.episodes import Player
from vlmrl.agents.tool_calls import ToolCallParser
from vlmrl.config.agent import Agent
from vlmrl.config.data import Columns
from vlmrl.config.reward import Reward
from vlmrl.data.media import ImageLimits
from vlmrl.models import tiny
from vlmrl.plugins import Processor, processor
from vlmrl.rewards.rewarder import Rewarder
from vlmrl.types import Group, Prompt, Rollout, Sampling, StopReason

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "vlmrl" / "agents" / "README.md").read_text()
FILES = dict(re.findall(r"^```python file=(\S+)\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    model = tiny.build("qwen2_5_vl", tmp_path_factory.mktemp("model") / "micro", size="micro")
    return processor(str(model), min_pixels=3136, max_pixels=12544)


class Script:
    """An engine that gives these responses, one after the other, and keeps what it was asked."""

    def __init__(self, reader: Processor, *responses: str) -> None:
        self._reader, self._responses = reader, list(responses)
        self.prompts: list[Prompt] = []

    async def __call__(self, prompt: Prompt, sampling: Sampling) -> Group:
        self.prompts.append(prompt)
        text = self._responses.pop(0)
        ids = [*self._reader.tokenizer(text, add_special_tokens=False).input_ids, self._reader.eos_token_ids[0]]
        tokens = np.concatenate([prompt.tokens, np.array(ids)])
        sampled = np.arange(len(tokens)) >= len(prompt.tokens)
        logprobs = np.where(sampled, -1.0, 0.0).astype(np.float32)
        rollout = Rollout.of_response(tokens, sampled, logprobs, text, "stop", version=0, media=prompt.media)
        return Group(prompt, (rollout,))


async def play(file: str, tmp_path: Path, reader: Processor, *responses: str, prompt: Prompt) -> tuple[Rollout, Script]:
    """Play one episode of a file of the guide."""
    (tmp_path / file).write_text(FILES[file])
    script = Script(reader, *responses)
    limits = ImageLimits(0, 10**6, 10**6)
    made = Environments(f"{tmp_path / file}:make", num_workers=1, step_limit_s=30.0, limits=limits)
    tools = await made.start()
    player = Player(
        settings=Agent(context_len=4096),
        environments=made,
        tools=tools,
        parser=ToolCallParser(reader, lambda text: CALLS.get(text, []), "hermes") if tools else None,
        processor=reader,
        columns=Columns(),
        sample=script,
        share=lambda image: image,
    )
    try:
        group = await player.play(prompt, Sampling(n=1, temperature=1.0, top_p=1.0, max_new_tokens=512, seed=1))
    finally:
        await made.close()
    return group.rollouts[0], script


CALLS = {"ZOOM": [("zoom", '{"x": 1, "y": 2}', "")], "WRONG": [("zoom", '{"x": "left"}', "")]}


def row(reader: Processor, question: str, label: str | None = None) -> Prompt:
    text = reader.render(question, num_images=0, columns=Columns())
    tokens, request = reader.encode(text, [])
    return Prompt(0, "rows:0", text, tokens, request, label, question=question)


async def test_the_file_of_the_guide_plays_an_episode(tmp_path: Path, reader: Processor) -> None:
    responses = ("ZOOM", "WRONG", *["left"] * 3, *["up"] * 3)
    rollout, script = await play("my_env.py", tmp_path, reader, *responses, prompt=row(reader, "Episode 1."))
    episode = rollout.episode
    assert episode is not None
    assert (episode.tool_calls, episode.tool_errors, episode.failure) == (2, 1, None)
    assert episode.stop in ("done", "turns")
    feedback = [message for message in episode.messages if message.role != "assistant"]
    assert (len(feedback[0].media), len(feedback[1].media)) == (1, 0)
    assert "Input should be a valid integer" in feedback[1].text
    assert feedback[2].text == "<image>Next?"
    (segment,) = rollout.segments
    sampled = reader.decode(segment.tokens[segment.sampled])
    assert sampled.replace("<|im_end|>", "") == "".join(responses[: len(rollout.turns)])
    # One picture at the beginning, and one behind every response but the last and the wrong call.
    assert len(segment.media) == len(script.prompts[-1].media) == len(rollout.turns) - 1
    assert "Which way to the green cell" in script.prompts[0].text


async def test_reward_functions_of_the_guide_read_whole_conversations(tmp_path: Path, reader: Processor) -> None:
    played, script = await play("my_env.py", tmp_path, reader, *["left", "left"] * 4, prompt=row(reader, "Episode 1."))
    (tmp_path / "no_repeats.py").write_text(FILES["no_repeats.py"])
    prompt = replace(script.prompts[0], tokens=np.zeros(1, np.int64))
    single = Rollout.of_response(
        prompt.tokens, np.ones(1, np.bool_), np.zeros(1, np.float32), "left", "stop", version=0, media=prompt.media
    )
    for function, expected in (("no_repeats", [1 / 8, 1.0]), ("new_pictures", [1.0, 0.0])):
        settings = {"functions": {}, "remote_url": f"{tmp_path}/no_repeats.py:{function}"}
        async with Rewarder(Reward.model_validate(settings)) as rewarder:
            (scores,) = await rewarder.score([Group(prompt, (played, single))])
        assert [score.total for score in scores] == expected


async def test_an_environment_may_begin_with_the_prompt_of_the_row(tmp_path: Path, reader: Processor) -> None:
    prompt = row(reader, "What is 2 + 2?", "4")
    rollout, script = await play("second_chance.py", tmp_path, reader, "It is 5", "It is 4", prompt=prompt)
    assert script.prompts[0].text == prompt.text
    assert rollout.episode is not None
    assert [(m.role, m.reward) for m in rollout.episode.messages] == [
        ("assistant", 0.0),
        ("user", None),
        ("assistant", 1.0),
    ]
    assert rollout.episode.stop == "done"
    assert [turn.reward for turn in rollout.turns] == [0.0, 1.0]


def first_cells(title: str) -> list[list[str]]:
    """The cells of the table under a title, row by row."""
    section = GUIDE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    return [[cell.strip() for cell in line.split(" | ")] for line in section.splitlines() if line.startswith("| `")]


def test_the_guide_has_every_setting_with_its_default() -> None:
    table: dict[str, Any] = {}
    for name, default, *_ in first_cells("Settings"):
        table[name.strip("| `")] = default.strip("`")
    assert table == {f"agent.{name}": str(field.default) for name, field in Agent.model_fields.items()}


def test_the_guide_has_every_reason_of_an_end() -> None:
    reasons = [cells[0].strip("| `") for cells in first_cells("The end of an episode")]
    assert sorted(reasons) == sorted(get_args(StopReason))


def test_the_messages_of_failures_are_those_of_the_source() -> None:
    quoted = {part for cells in first_cells("Failures") for part in re.findall(r"`([^`]+)`", cells[0])}
    source = "\n".join(
        node.value
        for file in (ROOT / "vlmrl").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    assert len(quoted) > 12
    assert not [part for part in quoted if part not in source]
