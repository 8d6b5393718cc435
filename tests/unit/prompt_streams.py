"""Rows, sources and streams of prompts for tests."""

from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from vlmrl.config.data import Columns
from vlmrl.data.prompts import PromptStream
from vlmrl.data.rows import Rows
from vlmrl.plugins import Processor
from vlmrl.types import Prompt

IMAGE = Image.new("RGB", (56, 56), "red")


def rows(content: Sequence[Mapping[str, Any]], name: str = "mine") -> Rows:
    return Rows(name=name, rows=content, columns=tuple(dict.fromkeys(key for row in content for key in row)))


def numbered(count: int, name: str = "mine") -> Rows:
    return rows([{"input": f"{name} {i}", "label": str(i)} for i in range(count)], name)


def stream(
    *sources: Rows, processor: Processor, probs: Sequence[float] | None = None, seed: int = 0, **settings: Any
) -> PromptStream:
    return PromptStream(sources, probs=probs, processor=processor, columns=Columns(**settings), seed=seed)


def labels(prompts: Sequence[Prompt]) -> list[str | None]:
    return [prompt.label for prompt in prompts]
