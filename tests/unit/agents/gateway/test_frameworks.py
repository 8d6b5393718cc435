"""Agents of frameworks are trained unchanged. Skipped where the frameworks are not installed."""

import re
from pathlib import Path

import pytest
from agents.gateway.scripted import ScriptedSampler, row, serving
from agents.user_environments import environments
from chat_templates import text_processor

from vlmrl.agents.gateway.player import AgentPlayer
from vlmrl.agents.gateway.server import Keys, Server, make_app
from vlmrl.config.agent import Agent
from vlmrl.config.gateway import Gateway
from vlmrl.types import Rollout, Sampling

pytestmark = pytest.mark.anyio

GUIDE = (Path(__file__).parents[4] / "vlmrl" / "agents" / "gateway" / "README.md").read_text()
(SMOLAGENTS,) = re.findall(r"^```python file=my_smolagents.py\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)

LANGGRAPH = '''
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


async def run(task):
    model = ChatOpenAI(model=task.model, base_url=task.base_url, api_key=task.api_key)
    agent = create_react_agent(model, [multiply])
    state = await agent.ainvoke({"messages": [("user", task.row["question"])]})
    return float(task.row["label"] in state["messages"][-1].content)
'''

MULTIPLY = '<tool_call>\n{"name": "multiply", "arguments": {"a": 8, "b": 8}}\n</tool_call>'
FINAL = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "64"}}\n</tool_call>'


async def play(source: str, tmp_path: Path, *responses: str) -> Rollout:
    path = tmp_path / "agent.py"
    path.write_text(source)
    one = text_processor("qwen3")
    remaining = list(responses)
    sample = ScriptedSampler(one, lambda text, number: remaining.pop(0))
    keys = Keys()
    server = Server(make_app(keys.find, Gateway(), one), Gateway())
    await server.start()
    settings = Agent(context_len=20_000, max_retries=0)
    try:
        async with environments(path, "make") as made:
            player = AgentPlayer(
                settings=settings,
                environments=made,
                serving=serving(one, sample, context_len=20_000),
                keys=keys,
                base_url=server.base_url,
            )
            prompt = row(question="What is 8 times 8?", label="64")
            group = await player.play(prompt, Sampling(1, 1.0, 1.0, 200, 11))
    finally:
        await server.stop()
    (rollout,) = group.rollouts
    assert rollout.episode is not None
    assert rollout.episode.stop == "done", rollout.episode.problem
    trained = sorted(s.tokens[turn.start : turn.end].tolist() for s in rollout.segments for turn in s.turns)
    assert trained == sorted(sample.sampled)
    assert sum(turn.reward for turn in rollout.turns) == 1.0
    return rollout


async def test_smolagents(tmp_path: Path) -> None:
    """It writes its calls into the history as text of its own: each response has a segment."""
    pytest.importorskip("smolagents")
    rollout = await play(SMOLAGENTS, tmp_path, MULTIPLY, FINAL)
    assert rollout.episode is not None
    assert rollout.episode.tool_calls == 2
    assert rollout.episode.counts["opened/edited"] == 1
    assert rollout.episode.counts["overridden/tool_choice"] == 2
    assert len(rollout.segments) == 2


async def test_langgraph(tmp_path: Path) -> None:
    """It sends its history as it was: one segment."""
    pytest.importorskip("langgraph")
    pytest.importorskip("langchain_openai")
    rollout = await play(LANGGRAPH, tmp_path, MULTIPLY, "It is 64.")
    assert rollout.episode is not None
    assert rollout.episode.tool_calls == 1
    assert [len(segment.turns) for segment in rollout.segments] == [2]
