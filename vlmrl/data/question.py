"""The columns of a row, before its images are opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class PlacedText(list[Mapping[str, Any]]):
    """A question that is a text, as one message with a part in place of each image and video."""


@dataclass(frozen=True, slots=True)
class Question:
    """The columns of a row, before its images and videos are opened."""

    text: str | Sequence[Mapping[str, Any]]
    label: str | None
    images: Sequence[Any]
    """Images and videos in reading order; a video is a `VideoSource`."""
    metadata: Mapping[str, Any]
    answer: str | None
    label_key: str | None
    is_question: bool
    placed: Sequence[Mapping[str, Any]] | None = None
    """The question as messages with a part in place of each image and video; None if the column of videos has none."""

    @property
    def rendered(self) -> str | Sequence[Mapping[str, Any]]:
        """The question as it is rendered."""
        return self.text if self.placed is None else self.placed
