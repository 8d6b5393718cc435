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


def questions(group: Group) -> list[Question]:
    """One for each answer of the group; they share what the prompt holds."""
    prompt = group.prompt
    return [
        Question(prompt.source, prompt.text, rollout.text, prompt.label, prompt.metadata, prompt.media, prompt.is_chat)
        for rollout in group.rollouts
    ]
