"""Episodes of agents in real processes, which reach a scripted policy through the gateway."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agents.gateway.scripted import SAMPLING, ScriptedSampler, serving
from agents.user_environments import environments

from vlmrl.agents.gateway.player import AgentPlayer
from vlmrl.agents.gateway.server import Keys, Server, make_app
from vlmrl.config.agent import Agent
from vlmrl.config.gateway import Gateway
from vlmrl.data.responses import to_samples
from vlmrl.errors import ClusterError, ConfigError
from vlmrl.plugins import Processor
from vlmrl.types import Group, Prompt, Sampling

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("quick_processes", "no_leftover_processes")]

AGENTS = """
import asyncio, os, threading, time

import openai
from openai import AsyncOpenAI


async def talk(task, *texts, **settings):
    messages, replies = [], []
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        for text in texts:
            messages.append({"role": "user", "content": text})
            completion = await client.chat.completions.create(model=task.model, messages=messages, **settings)
            messages.append(completion.choices[0].message.model_dump(exclude_none=True))
            replies.append(messages[-1]["content"])
    return replies


async def run(task):
    replies = await talk(task, f"{task.row['question']} {task.seed}", "Sure?")
    return {"total": 0.25, "replies": len(replies), "is_yes": replies == ["yes", "yes"]}


async def posts(task):
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        for text in ("one", "two"):
            reply = await client.chat.completions.create(model="x", messages=[{"role": "user", "content": text}])
            await client.post("/vlmrl/reward", cast_to=object, body={"reward": 0.5, "response_id": reply.id})


async def clock(task):
    await talk(task, f"It is {time.monotonic_ns()}.")
    return 1


async def on_and_on(task):
    await talk(task, *["more"] * 10)


async def stops_at_a_limit(task):
    try:
        await talk(task, *["more"] * 10)
    except openai.BadRequestError as error:
        return 1 if error.code == "turn_limit_exceeded" else 0


async def raises(task):
    await talk(task, "Hello.")
    raise ValueError("no such move")


async def offline(task):
    await talk(task, "Hello.")
    raise ConnectionError("no route")


async def silent(task):
    return 1


async def hangs(task):
    await talk(task, "Hello.")
    await asyncio.sleep(1000)


async def leaves(task):
    await talk(task, "Hello.")
    os._exit(3)


async def nan(task):
    await talk(task, "Hello.")
    return float("nan")


async def rich(task):
    await talk(task, "Hello.")
    return 2e9


async def doubles(task):
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        await talk(task, "Hello.")
        await client.post("/vlmrl/reward", cast_to=object, body={"reward": 9e8})
    return 9e8


async def untitled(task):
    await talk(task, "Hello.")
    return {"reward": 1}


async def keeps(task):
    if not os.path.exists(KEPT):
        await talk(task, "Hello.")
        with open(KEPT, "w") as file:
            print(task.api_key, repr(task), sep="\\n", file=file)
        os._exit(3)
    with open(KEPT) as file:
        old, shown = file.read().splitlines()
    assert old not in shown
    try:
        await talk(type(task)(task.base_url, old, task.row, task.seed), "Hello.")
    except openai.AuthenticationError:
        await talk(task, "Hello.")
        return 1


async def shows_its_row(task):
    await talk(task, str(task.row))


async def proxy(task):
    os.environ["HTTP_PROXY"] = os.environ["http_proxy"] = "http://127.0.0.1:9"
    await talk(task, "Hello.")
    return 1


ALL = threading.Barrier(40)


async def in_threads(task):
    await asyncio.to_thread(ALL.wait, 20)
    await talk(task, "Hello.")
    return 1


async def no_parameter():
    pass


async def two(task, other):
    pass
"""


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("user") / "agents.py"
    path.write_text(AGENTS.replace("KEPT", repr(str(path.with_name("key")))))
    return path


def row(**changes: Any) -> Prompt:
    from agents.gateway.scripted import row as of_row

    tokens = np.array([5, 6], dtype=np.int64)
    return of_row(**{"question": "What is it?", "tokens": tokens, "request": tokens} | changes)


@asynccontextmanager
async def player(
    agents: Path, name: str, chat: Processor, *, delay_s: float = 0.0, num_workers: int = 2, **settings: Any
) -> AsyncIterator[tuple[AgentPlayer, ScriptedSampler]]:
    sample = ScriptedSampler(chat, lambda text, number: "yes", delay_s)
    agent = Agent(**{"context_len": 2000, "max_retries": 1} | settings)
    shared = serving(chat, sample, context_len=agent.context_len, max_turns=agent.max_turns)
    keys = Keys()
    server = Server(make_app(keys.find, Gateway(), chat, lambda: keys.episodes), Gateway())
    await server.start()
    try:
        async with environments(agents, name, num_workers=num_workers) as made:
            assert made.is_agent
            assert made.is_async
            yield (
                AgentPlayer(settings=agent, environments=made, serving=shared, keys=keys, base_url=server.base_url),
                sample,
            )
            assert keys.episodes == [], "keys are revoked"
    finally:
        await server.stop()


async def played(agents: Path, name: str, chat: Processor, **settings: Any) -> Group:
    async with player(agents, name, chat, **settings) as (one, sample):
        group = await one.play(row(), Sampling(2, 1.0, 1.0, 100, 11))
        counts = [rollout.episode.counts for rollout in group.rollouts if rollout.episode is not None]
        num_sampled = sum(map(len, sample.sampled))
        assert (
            sum(rollout.num_sampled for rollout in group.rollouts)
            + sum(count.get("dropped_tokens", 0) for count in counts)
            == num_sampled
        )
        return group


def stops(group: Group) -> list[str]:
    return [rollout.episode.stop for rollout in group.rollouts if rollout.episode is not None]


def problem(group: Group) -> str:
    episode = group.rollouts[0].episode
    assert episode is not None
    return episode.problem or ""


async def test_a_group_of_episodes(agents: Path, chat: Processor) -> None:
    group = await played(agents, "make", chat)
    assert stops(group) == ["done", "done"]
    seed = SAMPLING.request_seed(3) % 2**32
    assert chat.readable(group.prompt.text).count(f"What is it? {seed}") == 1
    assert [(m.role, m.text) for m in group.prompt.messages] == [("user", f"What is it? {seed}")]
    assert (group.prompt.index, group.prompt.source, group.prompt.label) == (3, "toy:3", "right")
    for rollout in group.rollouts:
        assert rollout.text == "yes"
        assert [turn.reward for turn in rollout.turns] == [0.0, 0.25]
        assert rollout.versions == (7,)
        episode = rollout.episode
        assert episode is not None
        assert episode.parts == {"replies": 2.0, "is_yes": 1.0}
        assert [(m.role, m.text, m.reward) for m in episode.messages] == [
            ("assistant", "yes", 0.0),
            ("user", "Sure?", None),
            ("assistant", "yes", 0.25),
        ]
        assert episode.counts["opened/start"] == 1
        whole = chat.decode(rollout.segments[0].tokens)
        assert [whole.count(text) for text in ("What is it?", "Sure?", "yes")] == [1, 1, 2]
        assert episode.rendered.startswith(group.prompt.text)
        assert episode.rendered.endswith("yes")
        assert [episode.rendered.count(text) for text in ("What is it?", "Sure?", "yes")] == [1, 1, 2]
    assert all(sample.shares_prompt for sample in to_samples([group]))


async def test_posted_rewards_and_several_conversations(agents: Path, chat: Processor) -> None:
    group = await played(agents, "posts", chat)
    assert [len(rollout.segments) for rollout in group.rollouts] == [2, 2]
    assert [turn.reward for turn in group.rollouts[0].turns] == [0.5, 0.5]
    samples = to_samples([group])
    assert [sample.response for sample in samples] == [0, 0, 1, 1]
    assert [sample.shares_prompt for sample in samples] == [True, False, True, False]


async def test_episodes_that_begin_differently_share_no_prompt(agents: Path, chat: Processor) -> None:
    group = await played(agents, "clock", chat)
    assert stops(group) == ["done", "done"]
    assert group.prompt.tokens.tolist() == [5, 6], "it is the row's own"
    episode = group.rollouts[0].episode
    assert episode is not None
    assert [message.role for message in episode.messages] == ["user", "assistant"]
    assert [sample.shares_prompt for sample in to_samples([group])] == [False, False]


async def test_limits_end_an_episode_as_they_end_one_of_an_environment(agents: Path, chat: Processor) -> None:
    group = await played(agents, "on_and_on", chat, max_turns=3)
    assert stops(group) == ["turns", "turns"]
    assert [rollout.finish_reason for rollout in group.rollouts] == ["length", "length"]
    assert [len(rollout.turns) for rollout in group.rollouts] == [3, 3]
    group = await played(agents, "stops_at_a_limit", chat, max_turns=3)
    assert stops(group) == ["done", "done"]
    assert group.rollouts[0].turns[-1].reward == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", "ValueError: no such move ("),
        ("nan", "which is not a finite number"),
        ("rich", "a reward is at most 1,000,000,000"),
        ("doubles", "are 1.8e+09 together, and a reward is at most 1,000,000,000"),
        ("untitled", "a number named total"),
    ],
)
async def test_an_agent_that_raises_ends_its_episode(agents: Path, chat: Processor, name: str, words: str) -> None:
    group = await played(agents, name, chat)
    assert stops(group) == ["raised", "raised"]
    assert words in problem(group)
    assert group.rollouts[0].num_sampled > 0


@pytest.mark.parametrize(
    ("name", "words", "timeouts"),
    [
        ("offline", "ConnectionError: no route", 0),
        ("silent", "without a response", 0),
        ("hangs", "run took longer than 1 s", 2),
        ("leaves", "ended with exit code 3", 0),
    ],
)
async def test_an_agent_that_is_lost_is_played_again(
    agents: Path, chat: Processor, name: str, words: str, timeouts: int
) -> None:
    group = await played(agents, name, chat, episode_limit_s=1.0 if timeouts else 60.0)
    assert stops(group) == ["failed", "failed"]
    assert words in problem(group)
    for rollout in group.rollouts:
        assert rollout.num_sampled == 0
        assert rollout.episode is not None
        (reason,) = rollout.episode.retried
        assert words in reason
        assert rollout.episode.timeouts == timeouts
        if timeouts:
            assert rollout.episode.env_s > 1.8, "both attempts took time"


async def test_the_time_of_the_engine_does_not_count(agents: Path, chat: Processor) -> None:
    group = await played(agents, "make", chat, delay_s=1.5, episode_limit_s=1.5)
    assert stops(group) == ["done", "done"]
    assert all(rollout.episode is not None and rollout.episode.env_s < 1.5 for rollout in group.rollouts)


async def test_agents_in_threads_run_side_by_side(agents: Path, chat: Processor) -> None:
    async with player(agents, "in_threads", chat, num_workers=1, max_retries=0) as (one, _):
        group = await one.play(row(), Sampling(40, 1.0, 1.0, 100, 11))
    assert stops(group) == ["done"] * 40


async def test_a_row_without_a_question_is_none(agents: Path, chat: Processor) -> None:
    async with player(agents, "shows_its_row", chat) as (one, _):
        group = await one.play(row(has_question=False, metadata={"n": 1}), Sampling(1, 1.0, 1.0, 100, 11))
    assert stops(group) == ["done"]
    assert [message.text for message in group.prompt.messages] == ["None"]


async def test_the_key_of_an_attempt_is_revoked_when_it_ends(agents: Path, chat: Processor) -> None:
    async with player(agents, "keeps", chat, num_workers=1) as (one, _):
        group = await one.play(row(), Sampling(1, 1.0, 1.0, 100, 11))
    assert stops(group) == ["done"]
    assert [turn.reward for turn in group.rollouts[0].turns] == [1.0]
    episode = group.rollouts[0].episode
    assert episode is not None
    (reason,) = episode.retried
    assert "exit code 3" in reason
    assert episode.counts["dropped_tokens"] > 0, "those of the first attempt"


async def test_a_proxy_is_not_asked_for_the_gateway(agents: Path, chat: Processor) -> None:
    assert stops(await played(agents, "proxy", chat)) == ["done", "done"]


async def test_an_error_of_the_engine_ends_the_group(agents: Path, chat: Processor) -> None:
    async with player(agents, "make", chat) as (one, sample):
        sample.error = ClusterError("the engine has died")
        with pytest.raises(ClusterError, match="the engine has died"):
            await one.play(row(), Sampling(2, 1.0, 1.0, 100, 11))


@pytest.mark.parametrize("name", ["no_parameter", "two"])
async def test_an_agent_takes_a_task(agents: Path, name: str) -> None:
    made = environments(agents, name)
    with pytest.raises(ConfigError, match=r"async def run\(task\)"):
        await made.start()
