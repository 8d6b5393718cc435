"""Convert prompts with responses, from the data or from the engines, to training samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vlmrl.plugins import Processor
from vlmrl.types import Group, Prompt, Rollout, Sample


def sft_sample(prompt: Prompt, answer: str, processor: Processor) -> Sample:
    """Concatenate prompt, target answer and end token; `sampled` is True on the answer and the end token.

    Example: prompt [5, 6], answer [7], end token 2 -> tokens [5, 6, 7, 2], sampled [F, F, T, T]. Answer text that
    looks like a special token is encoded as plain text.
    """
    ids = processor.tokenizer(answer, add_special_tokens=False, split_special_tokens=True).input_ids
    target = np.array([*ids, processor.eos_token_ids[0]], dtype=np.int64)
    tokens = np.concatenate([prompt.tokens, target])
    return Sample(
        tokens=tokens,
        sampled=np.arange(len(tokens)) >= len(prompt.tokens),
        media=prompt.media,
        group=prompt.index,
        source=prompt.source,
    )


def truncate(rollout: Rollout, limit: int) -> Rollout:
    """Keep up to `limit` sampled tokens, and at least one fewer than there are, unless there is only one.

    An engine that scores the result has to generate one more token within the same context length.
    """
    positions = np.flatnonzero(rollout.sampled)
    end = int(positions[: max(1, min(limit, len(positions) - 1))][-1]) + 1
    return replace(rollout, tokens=rollout.tokens[:end], sampled=rollout.sampled[:end], logprobs=rollout.logprobs[:end])


def to_samples(groups: Sequence[Group]) -> list[Sample]:
    """Convert every response to a sample, group by group."""
    return [
        Sample(
            tokens=rollout.tokens,
            sampled=rollout.sampled,
            media=group.prompt.media,
            group=number,
            source=group.prompt.source,
        )
        for number, group in enumerate(groups)
        for rollout in group.rollouts
    ]
