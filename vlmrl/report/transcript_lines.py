"""The lines of a run's transcripts as typed records, whatever version of the project wrote them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec

TRAINING = ""
"""Name of the set of training prompts, which no evaluation set can have."""
_STEP = re.compile(r"step_(\d+)\.jsonl")
_EVALUATION = re.compile(r"eval_(.+)_step_(\d+)\.jsonl")


class Message(msgspec.Struct):
    """A message of a conversation with an environment."""

    role: str = ""
    text: str = ""
    images: list[str] = []
    reward: float | None = None


class Response(msgspec.Struct):
    """A response with its scores; see `observe.transcripts`."""

    text: str = ""
    score: float | None = None
    parts: dict[str, float | None] = {}
    failure: str | None = None
    problem: str | None = None
    reward: float | None = None
    advantage: float | None = None
    teacher_gap: float | None = None
    tokens: int = 0
    finish_reason: str | None = None
    version: int | None = None
    stop: str | None = None
    messages: list[Message] = []
    trace: dict[str, Any] | None = None

    @property
    def worth(self) -> float | None:
        """Its reward after shaping, else its score."""
        worth = self.score if self.reward is None else self.reward
        return worth if worth is not None and math.isfinite(worth) else None


class Group(msgspec.Struct):
    """A prompt and its responses."""

    step: int = 0
    index: int = 0
    source: str = ""
    prompt: str = ""
    label: str | None = None
    images: list[str] = []
    metadata: dict[str, Any] = {}
    left_out: bool = False
    responses: list[Response] = []

    @property
    def worth(self) -> float:
        """Mean reward of its responses; 0 without any."""
        rewards = self._rewards
        return sum(rewards) / len(rewards) if rewards else 0.0

    @property
    def spread(self) -> float:
        """Difference between the largest and the smallest reward of its responses."""
        rewards = self._rewards
        return max(rewards) - min(rewards) if rewards else 0.0

    @property
    def _rewards(self) -> list[float]:
        return [r.worth for r in self.responses if r.worth is not None]


class TranscriptFile(NamedTuple):
    """The responses of a set at one step."""

    set: str
    step: int
    path: Path


_DECODER = msgspec.json.Decoder(Group, strict=False)


def transcript_files(folder: Path) -> list[TranscriptFile]:
    """Return the transcripts in a run's `rollouts/`, by set and step."""
    files = []
    for path in folder.glob("*.jsonl") if folder.is_dir() else ():
        if match := _STEP.fullmatch(path.name):
            files.append(TranscriptFile(TRAINING, int(match[1]), path))
        elif match := _EVALUATION.fullmatch(path.name):
            files.append(TranscriptFile(unquote(match[1]), int(match[2]), path))
    return sorted(files)


def read_groups(path: Path) -> Iterator[Group | None]:
    """Read the groups of a transcript file, one at a time: a step may have hundreds of MiB.

    None stands for a line that is no group: of a write that was cut off, or of another program. A file that is gone or
    cannot be read has no groups.
    """
    try:
        with path.open("rb") as lines:
            for line in lines:
                yield _group(line)
    except OSError:  # a run that resumes replaces its transcripts
        return


def _group(line: bytes) -> Group | None:
    try:
        return _DECODER.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    try:  # a text with a lone surrogate, which only the reader of the standard library takes
        return msgspec.convert(json.loads(line), Group, strict=False)
    except (ValueError, RecursionError):
        return None
