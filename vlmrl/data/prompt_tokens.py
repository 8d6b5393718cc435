"""The tokens of one question, within the longest prompt of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vlmrl.config.data import Columns
from vlmrl.data.unusable import UnusableError, unusable_on_error
from vlmrl.plugins import Processor
from vlmrl.types import Ints, Media

Question = str | Sequence[Mapping[str, Any]]


class PromptTokens(NamedTuple):
    """A rendered question."""

    text: str
    """For users and reward functions."""
    tokens: Ints
    """[T] as the model reads it."""
    request: Ints
    """[T'] with one placeholder per image."""


def tokenize_question(
    question: Question,
    media: Sequence[Media],
    *,
    processor: Processor,
    columns: Columns,
    tools: Sequence[Mapping[str, Any]] = (),
    is_limited: bool = True,
) -> PromptTokens:
    """Render and tokenize a question, which shows `tools`.

    Args:
        is_limited: it is at most `columns.max_len` tokens long.

    Raises:
        UnusableError: it cannot be rendered, has no tokens, or is too long.
    """
    with unusable_on_error("question and images do not fit" if media else "question unusable"):
        rendered = processor.render(question, num_images=len(media), columns=columns, tools=tools)
        rendered.encode()  # raises on a lone surrogate
        tokens, request = processor.encode(rendered, [item.size for item in media])
    if not len(tokens):
        raise UnusableError("question unusable", "it has no tokens")
    if is_limited and len(tokens) > columns.max_len:
        reason = f"{len(tokens)} tokens, data.max_len is {columns.max_len}"
        if tools:
            # Users do not see the tools in their data.
            plain = tokenize_question(question, media, processor=processor, columns=columns, is_limited=False)
            reason += (
                f"; {len(tokens) - len(plain.tokens)} of them describe the environment's tools: raise data.max_len, "
                "which holds also where reset replaces the prompt"
            )
        raise UnusableError("too long", reason)
    return PromptTokens(processor.readable(rendered), tokens, request)
