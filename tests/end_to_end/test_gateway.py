"""Agents of users' own on real vLLM: sampled tokens are conserved, and the trainer's log-probs are the engine's."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agent_stack import SAMPLING, Stack, rows
from engine_pair import COLUMNS
from openai import OpenAI
from recipes import recipe, steps_of

from vlmrl.agents.environments import Environments
from vlmrl.agents.episodes import Player
from vlmrl.agents.gateway.chat import Tools
from vlmrl.agents.tool_calls import ToolCallParser
from vlmrl.commands.rl import train_rl
from vlmrl.config.load import load
from vlmrl.config.verbs import RlConfig
from vlmrl.data.media import ImageLimits
from vlmrl.models import tiny
from vlmrl.types import Group, Prompt, Sampling

EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"

AGENTS = """
import asyncio, base64, io

from openai import AsyncOpenAI
from PIL import Image

ZOOM = {"type": "function", "function": {"name": "zoom", "description": "Enlarge.", "parameters":
        {"type": "object", "properties": {"x": {"type": "integer"}}}}}


def picture(*colour):
    png = io.BytesIO()
    Image.new("RGB", (56, 56), colour).save(png, "PNG")
    url = "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def user(*content):
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return {"role": "user", "content": parts}


async def ask(client, messages, **settings):
    completion = await client.chat.completions.create(model="policy", messages=messages, **settings)
    return [choice.message.model_dump(exclude_none=True) for choice in completion.choices]


async def streams(client, task):
    messages = [user("Tell me.")]
    for number in range(3):
        text = ""
        stream = await client.chat.completions.create(model="policy", messages=messages, stream=True)
        async for chunk in stream:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        messages += [{"role": "assistant", "content": text}, user(f"More {number}.", picture(number, 0, 9))]


async def retries(client, task):
    hasty = client.with_options(timeout=0.15, max_retries=20)
    messages = [user("Tell me.")]
    for _ in range(2):
        messages += await ask(hasty, messages)
        messages.append(user("More."))
    try:
        await ask(client.with_options(timeout=0.1), [user("Nobody waits for this.")])
    except Exception:
        await asyncio.sleep(2)


async def calls(client, task):
    messages = [user("Look: ", picture(1, 2, 3))]
    for number in range(2):
        (reply,) = await ask(client, messages, tools=[ZOOM])
        messages.append(reply)
        for call in reply["tool_calls"]:
            content = [picture(number, len(call["id"]), 7), {"type": "text", "text": "Here."}]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})


async def edits(client, task):
    start = [user("Begin.")]
    (first,) = await ask(client, start)
    both = await asyncio.gather(*(ask(client, [*start, first, user(name)], n=2) for name in ("Left.", "Right.")))
    branch = [*start, first, user("Left."), both[0][1], user("And then?")]
    await ask(client, branch)
    branch[1] = {"role": "assistant", "content": "I never said so."}
    await ask(client, branch)


async def run(task):
    kinds = {"streams": streams, "retries": retries, "calls": calls, "edits": edits}
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        await kinds[task.row["question"]](client, task)
    return 1
"""


def test_streams_retries_parallel_calls_edits_and_images_in_results(tmp_path: Path) -> None:
    model = tiny.build("qwen2_5_vl", tmp_path / "model", size="micro")
    file = tmp_path / "agents.py"
    file.write_text(AGENTS)

    async def play() -> None:
        async with Stack(model, f"{file}:run", max_images=8, context_len=1500, max_turns=20, num_workers=2) as stack:
            groups = await play_agents(stack, rows(stack.read, ["streams", "retries", "calls", "edits"]))
            await stack.check_agreement(groups)
            check_kinds(groups)
            await check_the_same_game(stack)

    asyncio.run(play())


async def play_agents(stack: Stack, prompts: Sequence[Prompt]) -> list[Group]:
    """Play episodes in which each response with tools has two calls: a random model writes none."""

    def parser_of(_: Tools) -> ToolCallParser:
        def parser(text: str) -> list[tuple[str, str, str]]:
            return [("zoom", '{"x": 1}', ""), ("zoom", '{"x": 2}', "")]

        return ToolCallParser(stack.read, parser, "hermes")

    player = stack.agent_player
    player = replace(player, serving=replace(player.serving, parser_of=parser_of))
    stack.engine.delay_s = 0.3
    groups = await asyncio.gather(*(player.play(prompt, SAMPLING) for prompt in prompts))
    stack.engine.delay_s = 0.0
    counts = [rollout.episode.counts for group in groups for rollout in group.rollouts if rollout.episode is not None]
    num_dropped = sum(count.get("dropped_tokens", 0) for count in counts)
    sampled = [rollout.segments[0] for _, _, rollout in stack.engine.sampled]
    expected = sorted(
        (t, float(p)) for s in sampled for t, p in zip(s.tokens[s.sampled].tolist(), s.logprobs[s.sampled], strict=True)
    )
    trained = sorted(
        (t, float(p))
        for group in groups
        for s in group.segments
        for t, p in zip(s.tokens[s.sampled].tolist(), s.logprobs[s.sampled], strict=True)
    )
    assert num_dropped > 0
    assert len(trained) + num_dropped == len(expected)
    remaining = list(expected)
    for pair in trained:
        remaining.remove(pair)
    assert len(remaining) == num_dropped
    return groups


def check_kinds(groups: Sequence[Group]) -> None:
    streams, retries, calls, edits = groups
    for group in groups:
        assert [rollout.episode.stop for rollout in group.rollouts if rollout.episode is not None] == ["done"] * 3
    assert [[len(segment.turns) for segment in rollout.segments] for rollout in streams.rollouts] == [[3]] * 3
    assert all(len(segment.media) == 2 for segment in streams.segments)
    for rollout in retries.rollouts:
        assert [len(segment.turns) for segment in rollout.segments] == [2]
        assert rollout.episode is not None
        assert rollout.episode.counts["replayed"] >= 2
        assert rollout.episode.counts["dropped/undelivered"] == 1
    assert all(len(segment.media) == 3 for segment in calls.segments)
    assert [[len(segment.turns) for segment in rollout.segments] for rollout in calls.rollouts] == [[2]] * 3
    for rollout in edits.rollouts:
        assert rollout.episode is not None
        # The first is in one segment; each of its four branches has its own; the edited history is another.
        assert sum(len(segment.turns) for segment in rollout.segments) == 7
        assert len(rollout.segments) in (5, 6)
        assert rollout.episode.counts["opened/edited"] == 1


async def check_the_same_game(stack: Stack) -> None:
    """The environment and the agent with a client of its own play the same episodes, token by token."""
    greedy = Sampling(n=1, temperature=0.0, top_p=1.0, max_new_tokens=6, seed=3)
    (prompt,) = rows(stack.read, ["Steer."])
    limits = ImageLimits.of(COLUMNS)
    async with (
        Environments(f"{EXAMPLES}/steer.py:make_small", num_workers=1, step_limit_s=60, limits=limits) as games,
        Environments(f"{EXAMPLES}/steer_openai.py:make", num_workers=1, step_limit_s=60, limits=limits) as agents,
    ):
        agent_player = replace(stack.agent_player, environments=agents)
        player = Player(
            settings=agent_player.settings,
            environments=games,
            tools=(),
            parser=None,
            processor=stack.read,
            columns=COLUMNS,
            sample=stack.engine.generate,
            share=lambda image: image,
        )
        native, own = await player.play(prompt, greedy), await agent_player.play(prompt, greedy)
    assert native.prompt.tokens.tolist() == own.prompt.tokens.tolist()
    for one, other in zip(native.segments, own.segments, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.sampled.tolist() == other.sampled.tolist()
        assert one.turns == other.turns
        assert [item.hash for item in one.media] == [item.hash for item in other.media]
    assert len(native.rollouts[0].turns) > 1


def test_a_model_is_served_until_a_signal(tmp_path: Path) -> None:
    model = tiny.build("qwen2_5_vl", tmp_path / "model", size="micro")
    flags = {
        "actor.model_name_or_path": model,
        "agent.context_len": 600,
        "rollout.max_new_tokens": 8,
        "vllm.cpu_kv_cache_gib": 0.25,
        "ds.param_dtype": "fp32",
    }
    words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    command = [str(Path(sys.executable).with_name("vlmrl")), "serve", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            lines = []
            while not (lines and lines[-1].startswith("vlmrl serve: ")):
                lines.append(next(process.stdout))
            assert lines[0] == f"loading {model}\n"
            assert "rollout.max_new_tokens 8; other settings of requests are not used\n" in lines[-2]
            line = lines[-1]
            with OpenAI(base_url=line.partition(": ")[2].strip(), api_key="mine", timeout=60) as client:
                messages: list[Any] = [{"role": "user", "content": "Which way?"}]
                for _ in range(2):
                    completion = client.chat.completions.create(model="policy", messages=messages, logprobs=True)
                    messages += [completion.choices[0].message, {"role": "user", "content": "And then?"}]
                assert completion.usage is not None
                assert 0 < completion.usage.completion_tokens <= 8
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


FRAMEWORK = """
import asyncio

from smolagents import OpenAIServerModel, ToolCallingAgent, tool
from smolagents.agents import EMPTY_PROMPT_TEMPLATES


@tool
def multiply(a: int, b: int) -> int:
    \'\'\'Multiply two numbers.

    Args:
        a: the first
        b: the second
    \'\'\'
    return a * b


def solve(task):
    model = OpenAIServerModel(task.model, api_base=task.base_url, api_key=task.api_key)
    prompts = EMPTY_PROMPT_TEMPLATES | {"system_prompt": "Answer in digits."}
    agent = ToolCallingAgent([multiply], model, prompt_templates=prompts, max_steps=1, verbosity_level=0)
    return str(agent.run(f"What is {task.seed % 9} times 3?"))


async def run(task):
    answer = await asyncio.to_thread(solve, task)
    return sum(c.isdigit() for c in answer) / max(1, len(answer))
"""


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("steps", [2, pytest.param(8, marks=pytest.mark.prove)])
def test_an_agent_of_a_framework_learns(steps: int, tmp_path: Path, tiny_model: Callable[..., str]) -> None:
    """smolagents, unchanged: a random model cannot call its tools, but learns to end with an answer of digits."""
    pytest.importorskip("smolagents")
    file = tmp_path / "agent.py"
    file.write_text(FRAMEWORK)
    flags: dict[str, Any] = {
        "train.agent_func_path": file,
        "gateway.other_settings": "override",
        "actor.adam.lr": 3e-3,
        "rollout.batch_size": 8,
        "rollout.n_samples_per_prompt": 8,
        "rollout.max_new_tokens": 8,
        "agent.context_len": 2000,
        "train.batch_size": 64,
        "train.max_steps": steps,
        "eval.max_samples": 4,
    }
    out = tmp_path / "run"
    train_rl(load(RlConfig, recipe("gateway_tiny.yaml", tiny_model("qwen2_5_vl"), out, **flags)))
    lines = steps_of(out)
    rewards = [line["reward/mean"] for line in lines]
    assert len(rewards) == steps
    if steps == 8:
        assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.1, rewards
    for line in lines:
        assert line["policy/grad_norm"] > 0.0
        assert line["sync/logprob_diff_max"] < 1e-3
        assert line["agent/turns_mean"] == 2
        assert line["agent/gateway/overridden/tool_choice"] == 64, "the final answer is asked for without tools"
        assert line["agent/gateway/dropped_tokens"] == line["agent/failed"] == 0


ASYNC = {
    "train.async_enable": "true",
    "train.async_queue_size": 2,
    "train.partial_rollout_enable": "true",
    "train.colocate_all": "false",
    "algo.advantage.is_correction_enable": "true",
}


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("is_async", [pytest.param(False, marks=pytest.mark.prove), True])
def test_steps_of_an_agent_with_a_client_of_its_own(
    is_async: bool, tmp_path: Path, tiny_model: Callable[..., str]
) -> None:
    """In an asynchronous run weights are published while episodes play, which for clients is latency only."""
    steps = 4 if is_async else 2
    flags: dict[str, Any] = {
        "train.agent_func_path": EXAMPLES / "steer_openai.py",
        "rollout.batch_size": 4,
        "rollout.n_samples_per_prompt": 4,
        "train.batch_size": 16,
        "train.max_steps": steps,
        "eval.max_samples": 4,
    }
    out = tmp_path / "run"
    flags |= ASYNC if is_async else {}
    train_rl(load(RlConfig, recipe("gateway_tiny.yaml", tiny_model("qwen2_5_vl"), out, **flags)))
    lines = steps_of(out)
    assert len(lines) == steps
    for number, line in enumerate(lines):
        assert line["sync/logprob_diff_max"] < (1e-3 if is_async else 1e-4)
        assert 2 < line["agent/turns_mean"] <= line["agent/turns_max"] <= 12
        assert line["agent/failed"] == line["agent/timeouts"] == line["agent/gateway/dropped_tokens"] == 0
        assert line["agent/gateway/opened/start"] == 16
        ended = {reason: line[f"agent/stop/{reason}"] for reason in ("done", "context", "turns", "raised", "failed")}
        assert ended["done"] + ended["context"] == pytest.approx(1.0), ended
        if is_async:
            assert line["async/staleness_max"] <= min(2, number)
    assert not is_async or max(line["async/staleness_max"] for line in lines) > 0
