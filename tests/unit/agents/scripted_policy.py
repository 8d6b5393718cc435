"""Episodes of a scripted policy with environments in real processes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from agents.user_environments import environments

from vlmrl.agents.environments import Environments
from vlmrl.agents.episodes import Player
from vlmrl.agents.tool_calls import ToolCallParser, as_function
from vlmrl.config.agent import Agent
from vlmrl.config.data import Columns
from vlmrl.plugins import Processor
from vlmrl.rollout.tool_parsers import vllm_tool_parser
from vlmrl.types import Group, Prompt, Rollout, Sampling

GAMES = '''
import asyncio, os, time

from PIL import Image

from vlmrl.agents import Reply, tool


class Game:
    """Does what the response says."""

    def reset(self, row, seed):
        self.seed, self.count = seed, 0
        return f"seed {seed}"

    def step(self, response):
        self.count += 1
        if response == "stop":
            return Reply(done=True, reward=0.5)
        if response == "raise":
            raise RuntimeError("no such move")
        if response == "offline":
            raise ConnectionError("no route")
        if response == "sleep":
            time.sleep(1000)
        if response == "exit":
            os._exit(3)
        if response == "nan":
            return Reply("x", reward=float("nan"))
        if response == "bomb":
            return Reply(Image.new("L", (30_000, 30_000)))
        if response in ("nap", "late stop"):
            time.sleep(0.6)
        if response == "late stop":
            return Reply(done=True, reward=0.5)
        if response == "look":
            return Reply([Image.new("RGB", (56, 56), (self.count, 0, 9)), "left or right?"], reward=0.25)
        if response == "long":
            return Reply("very long " * 100, reward=2)
        if response == "essay":
            return Reply("so many words " * 500, reward=2)
        if response == "epic":
            return Reply("x" * 900_000, reward=2)
        if response == "gallery":
            return Reply([Image.new("RGB", (56, 56))] * 20, reward=2)
        if response == "seed":
            return Reply(str(self.seed), reward=1)
        return Reply(f"you said {response}", reward=1)


class AsyncGame(Game):
    async def step(self, response):
        if response == "wait":
            await asyncio.sleep(1000)
        return Game.step(self, response)


class Tools(Game):
    @tool
    def double(self, x: int):
        """Twice x."""
        return Reply(str(2 * x), reward=0.125)

    @tool
    def picture(self, x: int) -> Image.Image:
        """A picture."""
        return Image.new("RGB", (56, 56), (x, 0, 0))

    @tool
    def fails(self):
        """Raise."""
        raise ValueError("not today")

    @tool
    def leaves(self):
        """Leave."""
        return Reply(done=True, reward=4)


class Hoard(Game):
    @tool
    def log(self, n: int):
        """So many characters."""
        return Reply("x" * n, reward=1)

    @tool
    def album(self, n: int):
        """So many pictures."""
        return Reply([Image.new("RGB", (56, 56))] * n, reward=1)


class Row(Game):
    """The first message is the prompt of the row."""

    def reset(self, row, seed):
        self.seed, self.count = seed, 0


class Nothing(Game):
    def reset(self, row, seed):
        assert row is None
        return []


class Gallery(Game):
    def reset(self, row, seed):
        return [Image.new("RGB", (56, 56))] * 20


class Epic(Game):
    def reset(self, row, seed):
        return "x" * 900_000


class Album(Game):
    def reset(self, row, seed):
        self.seed, self.count = seed, 0
        return [Image.new("RGB", (56, 56), (seed % 251, 1, 1)), "Where?"]


class Fickle(Game):
    def reset(self, row, seed):
        self.count = 0
        return f"at {time.monotonic_ns()}"


class FickleAlbum(Game):
    def reset(self, row, seed):
        self.count = 0
        return [Image.new("RGB", (56, 56), tuple(os.urandom(3))), "Where?"]


class Closed(Game):
    def reset(self, row, seed):
        raise KeyError("level")


class LongStart(Game):
    def reset(self, row, seed):
        return "x" * 2000
'''

CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
SAMPLING = Sampling(n=2, temperature=1.0, top_p=1.0, max_new_tokens=100, seed=11)
Script = Callable[[int, int, int], str]
"""(episode, attempt, turn) -> the response. `...` at its end: it is cut there."""


@dataclass
class ScriptedPolicy:
    """Responds by a script, and keeps what it sampled."""

    processor: Processor
    script: Script
    sampling: Sampling
    seen: dict[tuple[int, int, int], tuple[Prompt, Sampling]] = field(default_factory=dict)
    sampled: dict[tuple[int, int], list[tuple[int, float, int]]] = field(default_factory=dict)
    """(episode, attempt) -> (token, log-prob, version) in the order of sampling."""

    def __post_init__(self) -> None:
        turns = [(e, a, t) for e in range(self.sampling.n) for a in range(4) for t in range(20)]
        seeds = [
            self.sampling.of_turn(episode=e, attempt=a, turn=t, max_new_tokens=1).request_seed(3) for e, a, t in turns
        ]
        assert len(set(seeds)) == len(turns), "each response has a seed of its own"
        self._turns = dict(zip(seeds, turns, strict=True))

    async def __call__(self, prompt: Prompt, sampling: Sampling) -> Group:
        turn = self._turns[sampling.request_seed(prompt.index)]
        assert turn not in self.seen, "a response is sampled once"
        assert sampling.n == 1
        self.seen[turn] = prompt, sampling
        text = self.script(*turn)
        response = self.processor.tokenizer(text.removesuffix("..."), add_special_tokens=False).input_ids
        if not text.endswith("..."):
            response.append(self.processor.eos_token_ids[0])
        is_cut = text.endswith("...") or len(response) > sampling.max_new_tokens
        response = response[: sampling.max_new_tokens]
        noise = np.random.default_rng(turn)
        logprobs = (-noise.random(len(response))).astype(np.float32)
        version = 5 + turn[2]
        self.sampled.setdefault(turn[:2], []).extend(
            (token, float(p), version) for token, p in zip(response, logprobs, strict=True)
        )
        tokens = np.concatenate([prompt.tokens, np.array(response, dtype=np.int64)])
        sampled = np.arange(len(tokens)) >= len(prompt.tokens)
        rollout = Rollout.of_response(
            tokens,
            sampled,
            np.concatenate([np.zeros(len(prompt.tokens), np.float32), logprobs]),
            self.processor.decode(np.array(response)),
            "length" if is_cut else "stop",
            version,
            prompt.media,
        )
        return Group(prompt, (rollout,))


def row(one: Processor, **changes: Any) -> Prompt:
    text = one.render("What is it?", num_images=0, columns=Columns())
    tokens, request = one.encode(text, [])
    return Prompt(
        **{"index": 3, "source": "toy:3", "text": text, "tokens": tokens, "request": request, "label": "right"}
        | {"question": "What is it?", "label_key": "label"}
        | changes
    )


async def play(
    made: Environments,
    policy: ScriptedPolicy,
    *,
    tools: Sequence[Any] = (),
    prompt: Prompt | None = None,
    **settings: Any,
) -> Group:
    one = policy.processor
    functions = [as_function(tool) for tool in tools]
    parser = ToolCallParser(one, vllm_tool_parser("hermes", one.tokenizer, functions), "hermes") if tools else None
    player = Player(
        settings=Agent(**{"context_len": 2000, "max_retries": 1} | settings),
        environments=made,
        tools=tuple(tools),
        parser=parser,
        processor=one,
        columns=Columns(),
        sample=policy,
        share=lambda image: image,
    )
    group = await player.play(prompt or row(one), policy.sampling)
    check(policy, group)
    return group


def check(policy: ScriptedPolicy, group: Group) -> None:
    """Each token that was sampled in the last attempt of an episode is trained once, as it was sampled."""
    for number, rollout in enumerate(group.rollouts):
        episode = rollout.episode
        assert episode is not None
        trained = [
            (int(t), float(p), int(v))
            for s in rollout.segments
            for t, p, v in zip(s.tokens[s.sampled], s.logprobs[s.sampled], s.versions[s.sampled], strict=True)
        ]
        last = max((attempt for e, attempt, _ in policy.seen if e == number), default=0)
        assert trained == ([] if episode.stop == "failed" else policy.sampled.get((number, last), []))
        first = rollout.segments[0]
        assert first.tokens[: len(group.prompt.tokens)].tolist() == group.prompt.tokens.tolist()
        said = [message.reward for message in episode.messages if message.role == "assistant"]
        assert said == [turn.reward for turn in rollout.turns]


async def played(
    games: Path,
    make: str,
    one: Processor,
    script: Script | Sequence[Sequence[str]],
    *,
    step_limit_s: float = 20.0,
    **settings: Any,
) -> tuple[Group, ScriptedPolicy]:
    """Play two episodes of `make`. A script by lists has the responses of each episode, whatever the attempt."""
    lists = () if callable(script) else script
    policy = ScriptedPolicy(one, script if callable(script) else lambda e, a, t: lists[e][t], SAMPLING)
    async with environments(games, make, num_workers=2, step_limit_s=step_limit_s) as made:
        group = await play(made, policy, tools=made._tools, **settings)
    return group, policy


def messages(group: Group, number: int) -> list[tuple[str, str]]:
    episode = group.rollouts[number].episode
    assert episode is not None
    return [(message.role, message.text) for message in episode.messages]


def stops(group: Group) -> list[str]:
    return [rollout.episode.stop for rollout in group.rollouts if rollout.episode is not None]
