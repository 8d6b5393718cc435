"""A conversation learned as one sample equals its responses learned one by one: log-probs and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from vlmrl.config.data import Columns
from vlmrl.data.columns import RowRequirements
from vlmrl.data.packing import make_pack, place
from vlmrl.data.prompts import PromptStream
from vlmrl.data.rows import Rows
from vlmrl.data.targets import SupervisedPrompt, Targets
from vlmrl.models.attention import PACKED
from vlmrl.models.inputs import model_inputs
from vlmrl.models.scorer import Scorer
from vlmrl.models.tiny import Family
from vlmrl.plugins import Processor
from vlmrl.types import Layout, Sample

Make = Callable[..., Any]
TURNS = (("<image>look", "a dot"), ("<image>and<image>?", "two lines"), ("bye", "good bye"))


def samples_of(rows: list[dict[str, Any]], read: Processor, kind: Any) -> list[Sample]:
    stream = PromptStream(
        [Rows("rows", rows, ("messages", "images"))],
        probs=None,
        processor=read,
        columns=Columns(),
        seed=0,
        requirements=RowRequirements(answer=True, targets=Targets(kind)),
    )
    prompts = stream.all_prompts(len(rows))
    return [sample for prompt in prompts if isinstance(prompt, SupervisedPrompt) for sample in prompt.samples]


def row(turns: tuple[tuple[str, str], ...], *, has_images: bool) -> dict[str, Any]:
    messages = []
    for question, response in turns:
        text = question if has_images else question.replace("<image>", "")
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": response}]
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 255, (56, 28 * n, 3), dtype=np.uint8)) for n in (1, 2, 3)]
    used = sum(question.count("<image>") for question, _ in turns)
    return {"messages": messages, "images": images[:used] if has_images else []}


def learned(net: Any, read: Processor, samples: list[Sample], layout: Layout) -> Tensor:
    """Log-probs of the tokens that are learned, in order, after a backward pass over weighted ones."""
    pack = make_pack(samples, range(len(samples)), layout)
    logprobs = Scorer(net)(model_inputs(net, read, pack)).logprobs
    chosen = logprobs[place(pack, [sample.sampled for sample in samples], False)]
    (chosen * torch.linspace(0.5, 1.5, len(chosen))).sum().backward()
    return chosen.detach()


@pytest.mark.parametrize(
    ("family", "layout"), [("qwen2_5_vl", "packed"), ("qwen3_vl", "shared"), ("qwen3_5", "shared"), ("qwen3", "padded")]
)
def test_one_sample_of_all_turns_equals_a_sample_for_each(
    net: Make, reader: Make, family: Family, layout: Layout
) -> None:
    read = reader(family)
    has_images = read.resize_factor is not None
    attention = {"": PACKED, "text_config": PACKED, "vision_config": "sdpa"} if has_images else PACKED
    (together,) = samples_of([row(TURNS, has_images=has_images)], read, "all")
    apart = samples_of([row(TURNS[: n + 1], has_images=has_images) for n in range(len(TURNS))], read, "last")
    one, other = net(family, attention=attention), net(family, attention=attention)
    first = learned(one, read, [together], layout)
    second = learned(other, read, apart, layout)
    assert len(first) == sum(len(response) + 1 for _, response in TURNS)
    torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-5)
    for (name, mine), (_, theirs) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        if theirs.grad is not None:
            scale = float(theirs.grad.abs().max().clamp(min=1.0))
            # Rounding in the decays of linear attention adds up within a chunk of 64 tokens.
            bound = 5e-5 if "linear_attn" in name else 1e-5
            torch.testing.assert_close(mine.grad, theirs.grad, atol=bound * scale, rtol=1e-4, msg=name)
