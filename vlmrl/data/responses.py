"""Convert prompts with responses, from the data or from the engines, to training samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlmrl.data.packing import by_response
from vlmrl.errors import DataError
from vlmrl.plugins import Processor
from vlmrl.types import Group, Prompt, Rollout, Sample, Segment, Turn
from vlmrl.video_size import VIDEO

IMAGE_PLACEHOLDER = "<image>"
"""Stands for an image in a text."""


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


def check_response(answer: str, *, has_images: bool) -> None:
    """Raise DataError where a response of a row with images has a placeholder: the model cannot learn to draw one."""
    for mark in (IMAGE_PLACEHOLDER, VIDEO):
        if has_images and mark in answer:
            raise DataError(f"the response has the placeholder {mark}, and only questions can have images")


def truncate(segment: Segment, limit: int) -> Segment:
    """Cut the last turn to `limit` sampled tokens, and to at least one fewer than there are, unless there is only one.

    An engine that scores the result has to generate one more token within the same context length.
    """
    *turns, last = segment.turns
    end = last.start + max(1, min(limit, last.end - last.start - 1))
    return replace(
        segment,
        tokens=segment.tokens[:end],
        sampled=segment.sampled[:end],
        logprobs=segment.logprobs[:end],
        versions=segment.versions[:end],
        experts=None if segment.experts is None else segment.experts[:end],
        turns=(*turns, Turn(last.start, end, last.reward)),
    )


def shortened(rollout: Rollout, limit: int) -> Rollout:
    """Cut the last segment of a response that has sampled tokens, and drop those behind it; see `truncate`."""
    last = max(place for place, segment in enumerate(rollout.segments) if segment.turns)
    return replace(rollout, segments=(*rollout.segments[:last], truncate(rollout.segments[last], limit)))


def to_samples(groups: Sequence[Group]) -> list[Sample]:
    """Convert every segment of every response to a sample, group by group."""
    samples: list[Sample] = []
    num_responses = 0
    for number, group in enumerate(groups):
        for rollout in group.rollouts:
            samples += [
                Sample(
                    tokens=segment.tokens,
                    sampled=segment.sampled,
                    media=segment.media,
                    experts=segment.experts,
                    group=number,
                    source=group.prompt.source,
                    response=num_responses,
                    response_tokens=rollout.num_sampled,
                    shares_prompt=shares_prompt,
                    num_prompt_images=len(group.prompt.media) if shares_prompt else None,
                )
                for place, segment in enumerate(rollout.segments)
                for shares_prompt in [place == 0 and _begins_with(segment, group.prompt)]
            ]
            num_responses += 1
    return samples


def _begins_with(segment: Segment, prompt: Prompt) -> bool:
    """Whether a segment begins with a prompt; agents of users' own need not begin all episodes of a group alike."""
    media = segment.media[: len(prompt.media)]
    has_images = [item.hash for item in media] == [item.hash for item in prompt.media]
    return has_images and np.array_equal(segment.tokens[: len(prompt.tokens)], prompt.tokens)


class EndToEnd:
    """Per-token rows of samples as rows of their responses, whose segments lie end to end; and back.

    Example: segments of 3 and 2 tokens make one row of 5.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._members = by_response(samples)
        self._lengths = [len(sample.tokens) for sample in samples]

    def join(self, rows: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """One row per response, from one per sample."""
        joined = []
        for members in self._members:
            of_response = [rows[i] for i in members]
            joined.append(of_response[0] if len(members) == 1 else np.concatenate(of_response))
        return joined

    def split(self, rows: Iterable[NDArray[Any]]) -> list[NDArray[Any]]:
        """One row per sample, from one per response, which may be padded behind its tokens."""
        split: dict[int, NDArray[Any]] = {}
        for members, row in zip(self._members, rows, strict=True):
            start = 0
            for i in members:
                split[i] = row[start : start + self._lengths[i]]
                start += self._lengths[i]
        return [split[i] for i in range(len(self._lengths))]
