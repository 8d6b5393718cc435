"""The columns of a row, before its images are opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Question:
    """The columns of a row, before its images are opened."""

    text: str | Sequence[Mapping[str, Any]]
    label: str | None
    images: Sequence[Any]
    metadata: Mapping[str, Any]
    answer: str | None
    label_key: str | None
    is_question: bool
