"""A scripted policy behind the gateway's server."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from openai import AsyncOpenAI
from PIL import Image

from vlmrl.agents.gateway.chat import Tools
from vlmrl.agents.gateway.episode import GatewayEpisode
from vlmrl.agents.gateway.server import Keys, Server, make_app
from vlmrl.agents.gateway.serving import Serving
from vlmrl.agents.tool_calls import ToolCallParser
from vlmrl.config.data import Columns
from vlmrl.config.gateway import Gateway
from vlmrl.plugins import Processor
from vlmrl.types import Group, Prompt, Rollout, Sampling

CALL = '<tool_call>\n{"name": "zoom", "arguments": {"x": %d}}\n</tool_call>'
ZOOM = {
    "type": "function",
    "function": {
        "name": "zoom",
        "description": "Enlarge a cell.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    },
}
SAMPLING = Sampling(n=1, temperature=1.0, top_p=1.0, max_new_tokens=300, seed=11)


def hermes(text: str) -> list[tuple[str, str, str]]:
    """Calls in Hermes' format."""
    calls = [json.loads(body) for body in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)]
    return [(call["name"], json.dumps(call["arguments"]), "random") for call in calls]


@dataclass
class ScriptedSampler:
    """Responds by a function of the prompt's text, and keeps what it sampled."""

    processor: Processor
    script: Callable[[str, int], str]
    """(text of the prompt, number of the response to it) -> response. `...` at its end: it is cut there."""
    delay_s: float = 0.0
    error: Exception | None = None
    sampled: list[list[int]] = field(default_factory=list)
    seen: list[tuple[Prompt, Sampling]] = field(default_factory=list)

    async def __call__(self, prompt: Prompt, sampling: Sampling) -> Group:
        self.seen.append((prompt, sampling))
        await asyncio.sleep(self.delay_s)
        if self.error is not None:
            raise self.error
        text = str(self.processor.tokenizer.decode(prompt.tokens.tolist()))
        return Group(prompt, tuple(self._rollout(prompt, sampling, text, i) for i in range(sampling.n)))

    def _rollout(self, prompt: Prompt, sampling: Sampling, text: str, number: int) -> Rollout:
        script = self.script(text, number)
        response = self.processor.tokenizer(script.removesuffix("..."), add_special_tokens=False).input_ids
        if not script.endswith("..."):
            response.append(self.processor.eos_token_ids[0])
        is_cut = script.endswith("...") or len(response) > sampling.max_new_tokens
        response = response[: sampling.max_new_tokens]
        self.sampled.append(response)
        tokens = np.concatenate([prompt.tokens, np.array(response, dtype=np.int64)])
        start = len(prompt.tokens)
        logprobs = np.zeros(len(tokens), np.float32)
        logprobs[start:] = [-(len(self.sampled) + k / 1000) for k in range(len(response))]
        sampled = np.arange(len(tokens)) >= start
        decoded = self.processor.decode(np.array(response))
        finish = "length" if is_cut else "stop"
        return Rollout.of_response(tokens, sampled, logprobs, decoded, finish, 7, prompt.media)


def serving(processor: Processor, sample: ScriptedSampler, gateway: Gateway | None = None, **limits: Any) -> Serving:
    """What episodes share, with wide limits."""

    def parser_of(_: Tools) -> ToolCallParser:
        return ToolCallParser(processor, hermes, "hermes")

    return Serving(
        gateway=gateway or Gateway(),
        processor=processor,
        columns=Columns(),
        sample=sample,
        share=lambda image: image,
        parser_of=parser_of,
        **{"context_len": 4000, "max_images": 8, "max_turns": 100} | limits,
    )


def row(**changes: Any) -> Prompt:
    empty = np.zeros(0, dtype=np.int64)
    texts = {"source": "toy:3", "text": "", "label": "right"}
    return Prompt(**{"index": 3, "tokens": empty, "request": empty, **texts, **changes})


@dataclass
class Served:
    """A running gateway with one episode."""

    episode: GatewayEpisode
    sample: ScriptedSampler
    keys: Keys
    key: str
    base_url: str
    clients: list[AsyncOpenAI] = field(default_factory=list)

    def client(self, **settings: Any) -> AsyncOpenAI:
        settings = {"max_retries": 0, "timeout": 20.0} | settings
        self.clients.append(AsyncOpenAI(base_url=self.base_url, api_key=self.key, **settings))
        return self.clients[-1]

    def check(self) -> None:
        """Sampled tokens are trained once, or dropped."""
        trained = [
            segment.tokens[turn.start : turn.end].tolist()
            for segment in self.episode.tree.segments()
            for turn in segment.turns
        ]
        dropped = [node.tokens.tolist() for node in self.episode.tree.dropped]
        assert sorted(trained + dropped) == sorted(self.sample.sampled)


@asynccontextmanager
async def served(
    processor: Processor,
    script: Callable[[str, int], str] = lambda text, number: "yes",
    *,
    gateway: Gateway | None = None,
    delay_s: float = 0.0,
    sampling: Sampling = SAMPLING,
    **limits: Any,
) -> AsyncIterator[Served]:
    """A gateway on a free port."""
    sample = ScriptedSampler(processor, script, delay_s)
    settings = gateway or Gateway()
    shared = serving(processor, sample, settings, **limits)
    keys = Keys()
    episode = GatewayEpisode(shared, row(), sampling)
    server = Server(make_app(keys.find, settings, processor, lambda: keys.episodes), settings)
    await server.start()
    one = Served(episode, sample, keys, keys.add(episode), server.base_url)
    try:
        yield one
    finally:
        for client in one.clients:
            await client.close()
        await episode.close()
        await server.stop()


def data_url(colour: tuple[int, int, int], size: tuple[int, int] = (56, 56)) -> str:
    """A picture as clients send it."""
    content = io.BytesIO()
    Image.new("RGB", size, colour).save(content, "PNG")
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()


def picture(colour: tuple[int, int, int]) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(colour)}}
