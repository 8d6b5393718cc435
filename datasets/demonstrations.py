"""Demonstrations of an environment's own player, for `vlmrl sft` before `vlmrl rl` with the same environment.

    vlmrl sft --data.prompt_dataset 'demonstrations?environment=examples/agents/steer.py:make&size=4000' ...

The environment's method `best()` returns the right response to its last observation. A row is an episode up to one of
its turns, drawn at random: the messages before it are the question, and its response is the target.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vlmrl.data.rows import Generated
from vlmrl.errors import ConfigError
from vlmrl.system.user_function import declared, load_function

_MAX_TURNS = 100
_OPTION = "demonstrations?environment"


@dataclass(frozen=True, slots=True)
class _Demonstration:
    make: Callable[[], Any]
    seed: int

    @property
    def key(self) -> str:
        return str(self.seed)

    def row(self) -> dict[str, Any]:
        environment = self.make()
        offered = declared(environment.reset, ("row", "seed"), flag=_OPTION)
        content = environment.reset(**{name: {"row": None, "seed": self.seed}[name] for name in offered})
        messages: list[dict[str, Any]] = []
        images: list[Any] = []
        ends: list[tuple[int, int]] = []
        for _ in range(_MAX_TURNS):
            messages.append({"role": "user", "content": _parts(content, images)})
            response = environment.best()
            messages.append({"role": "assistant", "content": response})
            ends.append((len(messages), len(images)))
            reply = environment.step(response)
            if reply.done:
                break
            content = reply.content
        num_messages, num_images = random.Random(self.seed).choice(ends)
        return {"input": messages[:num_messages], "images": images[:num_images]}


def rows(*, split: str, seed: int, environment: str, size: int = 10_000) -> Sequence[dict[str, Any]]:
    """Generate `size` demonstrations of `environment`, a file and function as in `train.agent_func_path`.

    Raises:
        ConfigError: the environment cannot be loaded, or has no `reset` or `best`.
    """
    make = load_function(environment, _OPTION)
    for name in ("reset", "best"):
        if not callable(getattr(make(), name, None)):
            raise ConfigError(f"{_OPTION}={environment}: the environment has no method {name}")

    def invent(rng: random.Random, row: int) -> _Demonstration:
        del row
        return _Demonstration(make, rng.getrandbits(40))

    return Generated(invent, size=size, split=split, seed=seed)


def _parts(content: Any, images: list[Any]) -> list[dict[str, str]]:
    """Convert text, an image, or a list of both to the content of a message; images go into `images`."""
    parts = []
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
        else:
            images.append(part)
            parts.append({"type": "image"})
    return parts
