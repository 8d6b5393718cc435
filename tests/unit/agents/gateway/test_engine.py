"""An engine whose user brings an agent: it starts the gateway, and plays episodes through it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from agents.gateway.scripted import ScriptedSampler, row

from vlmrl.agents.engine import AgentEngine
from vlmrl.agents.environments import Environments
from vlmrl.agents.episodes import Player
from vlmrl.agents.gateway.player import AgentPlayer
from vlmrl.agents.settings import AgentEngineSettings, EnvironmentSettings
from vlmrl.config.agent import Agent
from vlmrl.config.data import Columns
from vlmrl.config.vllm import Vllm
from vlmrl.data.media import ImageLimits
from vlmrl.errors import ConfigError
from vlmrl.models.tiny import build
from vlmrl.rollout.engine import RolloutEngine
from vlmrl.rollout.settings import EngineSettings
from vlmrl.types import ChatMessage, Group, Prompt, Sampling

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("quick_processes", "no_leftover_processes")]

EXAMPLES = Path(__file__).parents[4] / "examples" / "agents"
COLUMNS = Columns(min_pixels=784, max_pixels=150_000)
MOVES = ("left", "up", "down", "I go right", "left")


class ScriptedEngine(AgentEngine):
    """Without vLLM."""

    async def generate(self, prompt: Prompt, sampling: Sampling, *, adapter: bool = True) -> Group:
        return await self.sample(prompt, sampling)

    @property
    def sample(self) -> ScriptedSampler:
        return ScriptedSampler(self._processor, lambda text, number: MOVES[len(text) % len(MOVES)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("qwen2_5_vl", tmp_path_factory.mktemp("models") / "vlm", size="micro")


@pytest.fixture
def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(self: RolloutEngine) -> None:
        await asyncio.sleep(0)

    monkeypatch.setattr(RolloutEngine, "start", nothing)
    monkeypatch.setattr(RolloutEngine, "shutdown", nothing)


def engine(model: Path, **agent: Any) -> ScriptedEngine:
    settings = Agent(**{"max_turns": 12, "context_len": 2000} | agent)
    vllm = EngineSettings(
        model=str(model),
        vllm=Vllm(),
        columns=COLUMNS,
        trust_remote_code=False,
        dtype="fp32",
        max_model_len=2000,
        top_p=1.0,
        name="engine-0",
    )
    spec = f"{EXAMPLES}/steer_openai.py:make"
    environments = EnvironmentSettings(spec=spec, agent=settings, columns=COLUMNS, log=None)
    return ScriptedEngine(AgentEngineSettings(engine=vllm, environments=environments, share=lambda image: image))


def readable(messages: Sequence[ChatMessage]) -> list[tuple[str, list[str], float | None]]:
    """Roles, texts and hashes of images, and rewards."""
    parts = [[part if isinstance(part, str) else part.hash for part in message.parts] for message in messages]
    return [(message.role, part, message.reward) for message, part in zip(messages, parts, strict=True)]


@pytest.mark.usefixtures("_without_vllm")
async def test_an_agent_plays_the_game_of_the_environment_token_by_token(model: Path) -> None:
    sampling = Sampling(n=2, temperature=1.0, top_p=1.0, max_new_tokens=30, seed=3)
    one = engine(model)
    await one.start()
    try:
        assert isinstance(one._player, AgentPlayer)
        assert any(note.startswith("gateway: http://127.0.0.1:") for note in one._notes)
        own = await one.respond(row(), sampling)
        games = Environments(
            f"{EXAMPLES}/steer.py:make_small", num_workers=2, step_limit_s=60, limits=ImageLimits.of(COLUMNS)
        )
        async with games:
            native = await Player(
                settings=one._agent,
                environments=games,
                tools=(),
                parser=None,
                processor=one._processor,
                columns=COLUMNS,
                sample=one.generate,
                share=lambda image: image,
            ).play(row(), sampling)
    finally:
        await one.shutdown()
    assert own.prompt.tokens.tolist() == native.prompt.tokens.tolist()
    assert readable(own.prompt.messages) == readable(native.prompt.messages)
    for mine, other in zip(own.rollouts, native.rollouts, strict=True):
        assert mine.episode is not None
        assert other.episode is not None
        assert readable(mine.episode.messages) == readable(other.episode.messages)
        assert mine.episode.rendered == other.episode.rendered
    assert [rollout.text for rollout in own.rollouts] == [rollout.text for rollout in native.rollouts]
    for ours, theirs in zip(own.segments, native.segments, strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert ours.sampled.tolist() == theirs.sampled.tolist()
        assert ours.turns == theirs.turns
        assert [item.hash for item in ours.media] == [item.hash for item in theirs.media]
    assert len(own.rollouts[0].turns) > 2


@pytest.mark.usefixtures("_without_vllm")
async def test_an_agent_renders_its_history_itself(model: Path) -> None:
    one = engine(model, history="template")
    with pytest.raises(ConfigError, match=r"agent\.history template: an agent with async def run"):
        await one.start()
