"""What a reward may know of one answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vlmrl.types import Group, Media


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """One answer to be scored."""

    source: str
    """The dataset and row of its prompt, for messages."""
    prompt: str
    """The rendered prompt."""
    response: str
    label: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the row that are plain JSON values."""
    media: tuple[Media, ...] = ()
    """The images of the prompt."""
    is_chat: bool = False
    """The row holds the question as a list of messages."""
    label_key: str | None = None
    """The column that the label is from, where that is known."""


def questions(group: Group) -> list[Question]:
    """One for each answer of the group; they share what the prompt holds."""
    prompt = group.prompt
    return [
        Question(
            source=prompt.source,
            prompt=prompt.text,
            response=rollout.text,
            label=prompt.label,
            metadata=prompt.metadata,
            media=prompt.media,
            is_chat=prompt.is_chat,
            label_key=prompt.label_key,
        )
        for rollout in group.rollouts
    ]
