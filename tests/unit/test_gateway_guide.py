"""The snippets of vlmrl/agents/gateway/README.md run, and its tables agree with the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import httpx
import pytest
from agents.gateway.scripted import SAMPLING, ScriptedSampler, row, serving
from agents.user_environments import environments
from chat_templates import text_processor

from vlmrl.agents.gateway.player import AgentPlayer
from vlmrl.agents.gateway.server import Keys, Server, make_app
from vlmrl.agents.gateway.sessions import Sessions
from vlmrl.agents.gateway.tree import Reason
from vlmrl.config.agent import Agent
from vlmrl.config.gateway import Gateway
from vlmrl.types import Rollout, Sampling

pytestmark = pytest.mark.anyio
GUIDE = (Path(__file__).parents[2] / "vlmrl" / "agents" / "gateway" / "README.md").read_text()
FILES = dict(re.findall(r"^```python file=(\S+)\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


async def play(file: str, tmp_path: Path, *responses: str) -> Rollout:
    """Play one episode of a file of the guide."""
    path = tmp_path / file
    path.write_text(FILES[file])
    one = text_processor("chatml")
    remaining = list(responses)
    sample = ScriptedSampler(one, lambda text, number: remaining.pop(0))
    keys = Keys()
    server = Server(make_app(keys.find, Gateway(), one), Gateway())
    await server.start()
    try:
        async with environments(path, "make") as made:
            player = AgentPlayer(
                settings=Agent(), environments=made, serving=serving(one, sample), keys=keys, base_url=server.base_url
            )
            prompt = row(question="What is 8 times 8?", label="64")
            group = await player.play(prompt, Sampling(1, 1.0, 1.0, 100, 11))
    finally:
        await server.stop()
    assert remaining == []
    return group.rollouts[0]


async def test_an_agent_gets_a_second_chance(tmp_path: Path) -> None:
    won = await play("my_agent.py", tmp_path, "It is 56.", "It is 64")
    assert [turn.reward for turn in won.turns] == [0.0, 1.0]
    assert len(won.segments) == 1
    lost = await play("my_agent.py", tmp_path, "It is 56.", "It is 57.")
    assert [turn.reward for turn in lost.turns] == [0.0, 0.0]


async def test_an_agent_in_a_thread(tmp_path: Path) -> None:
    rollout = await play("my_threaded_agent.py", tmp_path, "It is 64.")
    assert [turn.reward for turn in rollout.turns] == [1.0]
    assert rollout.episode is not None
    assert rollout.episode.parts == {"characters": 9.0}


async def test_a_request_by_curl() -> None:
    ((url, body),) = re.findall(r"^curl http://127\.0\.0\.1:8000(\S+) -d '(.*)'$", GUIDE, re.MULTILINE)
    one = text_processor("chatml")
    sessions = Sessions(serving(one, ScriptedSampler(one, lambda text, number: "yes")), SAMPLING, token=None)
    app = make_app(sessions.find, Gateway(), one)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        reply = await client.post(url, content=body, headers={"Content-Type": "application/x-www-form-urlencoded"})
    assert reply.status_code == 200
    assert reply.json()["choices"][0]["message"]["content"] == "yes"


def test_the_tables_agree_with_the_code() -> None:
    assert re.findall(r"^\| `(\w+)` \|", GUIDE.partition("| reason |")[2], re.MULTILINE)[:6] == list(get_args(Reason))
    rows = re.findall(r"^\| `gateway\.(\w+)` \| `([^`]+)` \|", GUIDE, re.MULTILINE)
    assert dict(rows) == {name: str(field.default) for name, field in Gateway.model_fields.items()}
