"""Samples of supervised training: the tokens of a row that enter the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

import numpy as np

from vlmrl.config.data import Columns
from vlmrl.data.conversations import answer_text
from vlmrl.data.image_tokens import tokens_of_media
from vlmrl.data.responses import check_response, sft_sample
from vlmrl.data.unusable import UnusableError
from vlmrl.errors import DataError
from vlmrl.plugins import Processor
from vlmrl.types import Prompt, Sample


class Targets(NamedTuple):
    """What supervised training learns of a row."""

    kind: Literal["last", "all", "text"] = "last"
    """The last response, all responses of the conversation, or the whole text of a row without a question."""
    truncates: bool = False
    """A row above `data.max_len` is cut at its end, instead of dropped."""


@dataclass(frozen=True, slots=True)
class SupervisedPrompt(Prompt):
    """A prompt with what is learned of its row."""

    samples: tuple[Sample, ...] = ()
    """At least one. There are several where the chat template rewrites earlier responses: each begins with the history
    as the template renders it, and a response is sampled in exactly one."""
    is_cut: bool = False
    """Tokens beyond `data.max_len` were cut."""


def supervise(prompt: Prompt, targets: Targets, *, processor: Processor, columns: Columns) -> SupervisedPrompt:
    """Add the samples of a prompt with its answer; of the text alone with kind `text`.

    Raises:
        DataError: the chat template rejects the conversation, or a response has no text.
        UnusableError: it is longer than `columns.max_len`, or has nothing to learn.
    """
    if targets.kind == "text":
        samples = [_text_sample(prompt, processor)]
    else:
        assert prompt.answer is not None, "supervised training needs answers"
        check_response(prompt.answer, has_images=bool(prompt.media))
        last = sft_sample(prompt, prompt.answer, processor)
        earlier = _earlier_turns(prompt, processor, columns) if targets.kind == "all" else []
        samples = _numbered(join_turns([*earlier, last]), number=prompt.index)
    whole = [sample for sample in samples if len(sample.tokens) <= columns.max_len]
    is_cut = len(whole) < len(samples)
    if is_cut:
        longest = max(len(sample.tokens) for sample in samples)
        kept = (truncate(sample, columns.max_len, processor) for sample in samples)
        samples = [sample for sample in kept if sample is not None] if targets.truncates else []
        if not samples:
            response = "" if targets.kind == "text" else " with the response"
            raise UnusableError("too long", f"{longest} tokens{response}, data.max_len is {columns.max_len}")
    of_prompt = {field.name: getattr(prompt, field.name) for field in fields(Prompt)}
    return SupervisedPrompt(**of_prompt, samples=tuple(samples), is_cut=is_cut)


def join_turns(turns: Sequence[Sample]) -> list[Sample]:
    """Join each turn of a conversation to the one before, if its prompt begins with all tokens of that one.

    Example: [5, 6, 7, 2], whose last two tokens are sampled, and [5, 6, 7, 2, 8, 9, 2], whose last two are, become
    [5, 6, 7, 2, 8, 9, 2] with [F, F, T, T, F, T, T].
    """
    joined: list[Sample] = []
    for turn in turns:
        if joined and np.array_equal(turn.tokens[: len(joined[-1].tokens)], joined[-1].tokens):
            sampled = turn.sampled.copy()
            sampled[: len(joined[-1].tokens)] = joined[-1].sampled
            images = joined[-1].num_prompt_images
            joined[-1] = replace(turn, sampled=sampled, num_prompt_images=images)
        else:
            joined.append(turn)
    return joined


def truncate(sample: Sample, limit: int, processor: Processor) -> Sample | None:
    """Cut a sample behind its last sampled token within `limit` tokens; None if there is none.

    No image is cut, since its tokens are not sampled: images behind the cut are left out.
    """
    if len(sample.tokens) <= limit:
        return sample
    within = np.flatnonzero(sample.sampled[:limit])
    if not len(within):
        return None
    tokens = sample.tokens[: int(within[-1]) + 1]
    num_image_tokens = int((processor.token_types(tokens) != 0).sum())
    ends = np.cumsum([processor.num_tokens(item.size) for item in sample.media])
    num_images = int((ends <= num_image_tokens).sum())
    return replace(sample, tokens=tokens, sampled=sample.sampled[: len(tokens)], media=sample.media[:num_images])


def _earlier_turns(prompt: Prompt, processor: Processor, columns: Columns) -> list[Sample]:
    """Return a sample for each response before the last one, in the history as the chat template renders it there."""
    if isinstance(prompt.question, str):
        return []
    messages = processor.messages(prompt.question, num_images=len(prompt.media), columns=columns)
    turns = []
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        answer = answer_text([message])
        if answer is None or not answer.strip():
            raise DataError(f"message {place + 1}, of the assistant, is empty")
        history = messages[:place]
        media = prompt.media[: sum(part["type"] != "text" for earlier in history for part in earlier["content"])]
        text = processor.render(history, num_images=len(media), columns=columns)
        tokens, _ = processor.encode(text, [item.size for item in media])
        turns.append(sft_sample(replace(prompt, tokens=tokens, media=media), answer, processor))
    return [replace(turn, num_prompt_images=len(turn.media)) for turn in turns]


def _numbered(samples: list[Sample], *, number: int) -> list[Sample]:
    """Number several samples as the segments of one response; a single one is a response by itself."""
    if len(samples) == 1:
        return samples
    total = sum(int(sample.sampled.sum()) for sample in samples)
    numbered = [replace(sample, response=number, response_tokens=total) for sample in samples]
    first, *rewritten = numbered
    return [first, *(replace(sample, shares_prompt=False, num_prompt_images=None) for sample in rewritten)]


def _text_sample(prompt: Prompt, processor: Processor) -> Sample:
    """Return the text with an end token; all tokens enter the loss but the first and those of images and videos."""
    tokens = np.append(prompt.tokens, processor.eos_token_ids[0])
    of_media = tokens_of_media(tokens, prompt.media, processor, source=prompt.source)
    sampled = ~of_media & ~np.isin(tokens, processor.banned_tokens)
    sampled[0] = False  # nothing is before it
    return Sample(tokens=tokens, sampled=sampled, media=prompt.media, group=prompt.index, source=prompt.source)
