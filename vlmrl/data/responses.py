"""A prompt with an answer, as a sample to train on: one that the data hold, or those that the engines gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vlmrl.plugins import Processor
from vlmrl.types import Group, Prompt, Rollout, Sample


def sft_sample(prompt: Prompt, answer: str, processor: Processor) -> Sample:
    """Prompt, answer and end token; `sampled` is True on the answer and its end.

    Example: prompt [5, 6], answer [7], end 2 -> tokens [5, 6, 7, 2], sampled [F, F, T, T]. Whatever in the answer looks
    like a special token is taught as the text it is.
    """
    ids = processor.tokenizer(answer, add_special_tokens=False, split_special_tokens=True).input_ids
    taught = np.array([*ids, processor.eos_token_ids[0]], dtype=np.int64)
    tokens = np.concatenate([prompt.tokens, taught])
    return Sample(
        tokens=tokens,
        sampled=np.arange(len(tokens)) >= len(prompt.tokens),
        media=prompt.media,
        group=prompt.index,
        source=prompt.source,
    )


def shortened(rollout: Rollout, most: int) -> Rollout:
    """Its beginning, of up to `most` sampled tokens. Never all of it, unless it is one token: an engine that reads it
    needs room for one token more."""
    places = np.flatnonzero(rollout.sampled)
    end = int(places[: max(1, min(most, len(places) - 1))][-1]) + 1
    return replace(rollout, tokens=rollout.tokens[:end], sampled=rollout.sampled[:end], logprobs=rollout.logprobs[:end])


def to_samples(groups: Sequence[Group]) -> list[Sample]:
    """Every answer as a sample, group by group."""
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
