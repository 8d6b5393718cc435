"""A few of the responses of a step or an evaluation, as trackers show them beside the curves."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from vlmrl.system.masking import Mask

_MAX_CHARS = 2000
_MAX_IMAGES = 4
COLUMNS = ("prompt", "label", "response", "score", "advantage", "tokens", "images")


class Sample(NamedTuple):
    """A response with its prompt, without secrets. The text is untrusted: sinks must not show it as markup."""

    prompt: str
    label: str
    response: str
    score: float | None
    """None for a response that could not be scored."""
    advantage: float | None
    """None in an evaluation, and for a group that dynamic filtering left out."""
    tokens: int
    images: tuple[Path, ...]
    """The prompt's images, PNG."""


def samples_of_step(rollouts: Path, step: int, *, num_prompts: int) -> list[Sample]:
    """Return samples of a training step; none if its responses were not written."""
    return _read(rollouts / f"step_{step:06d}.jsonl", num_prompts)


def samples_of_evaluations(rollouts: Path, step: int, *, num_prompts: int) -> dict[str, list[Sample]]:
    """Return samples of each set that was evaluated after this step."""
    end = f"_step_{step:06d}.jsonl"
    files = sorted(rollouts.glob(f"eval_*{end}"))
    named = {unquote(file.name.removeprefix("eval_").removesuffix(end)): file for file in files}
    return {name: _read(file, num_prompts) for name, file in named.items()}


def _read(file: Path, num_prompts: int) -> list[Sample]:
    """The best and the worst response to the first prompts of a transcript."""
    if not file.exists():
        return []
    with file.open(encoding="utf-8") as lines:
        groups = [json.loads(line) for line in islice(lines, num_prompts)]
    mask = Mask(os.environ)
    return [sample for group in groups for sample in _extremes(group, file.parent / "media", mask)]


def _extremes(group: Mapping[str, Any], media: Path, mask: Mask) -> Iterator[Sample]:
    # Those without a score come last.
    responses = sorted(group["responses"], key=lambda response: -_number(response.get("score"), -float("inf")))
    images = tuple(path for name in group["images"][:_MAX_IMAGES] if (path := media / f"{name}.png").is_file())
    for response in responses if len(responses) < 3 else (responses[0], responses[-1]):
        yield Sample(
            prompt=_cut(group["prompt"], mask),
            label=_cut(group["label"], mask),
            response=_cut(response["text"], mask),
            score=response.get("score"),
            advantage=response.get("advantage"),
            tokens=response["tokens"],
            images=images,
        )


def _number(value: float | None, default: float) -> float:
    return default if value is None else value


def _cut(text: object, mask: Mask) -> str:
    whole: str = "" if text is None else mask.strings(str(text))
    return whole if len(whole) <= _MAX_CHARS else f"{whole[:_MAX_CHARS]} ... ({len(whole)} characters)"
