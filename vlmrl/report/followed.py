"""Find prompts that a run trained on several times, to show how the responses to them changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from vlmrl.report.transcript_lines import TranscriptFile

MAX_PROMPTS = 4
MAX_STEPS = 12
"""Steps at which a prompt is shown."""
_MAX_BYTES = 2**28
"""Transcripts of more are not searched: reading them would take longer than a reader waits."""


class _Scored(msgspec.Struct):
    score: float | None = None
    reward: float | None = None


class _Line(msgspec.Struct):
    """What of a group is needed here; all else is skipped while parsing."""

    source: str = ""
    left_out: bool = False
    responses: list[_Scored] = []

    @property
    def rewards(self) -> list[float]:
        """The rewards that are known."""
        rewards = [r.score if r.reward is None else r.reward for r in self.responses]
        return [reward for reward in rewards if reward is not None and math.isfinite(reward)]


_DECODER = msgspec.json.Decoder(_Line, strict=False)


def followed_prompts(files: Sequence[TranscriptFile]) -> dict[str, list[TranscriptFile]]:
    """Return prompts by source, each with the steps at which it is shown: those whose rewards changed the most.

    `files` are the transcripts of training steps, in order.
    """
    if sum(_size(file) for file in files) > _MAX_BYTES:
        return {}
    seen: dict[str, list[tuple[TranscriptFile, float]]] = {}
    for file in files:
        for source, worth in worths(file):
            seen.setdefault(source, []).append((file, worth))
    repeated = {source: places for source, places in seen.items() if len(places) > 1}
    most = sorted(repeated, key=lambda source: -_change([worth for _, worth in repeated[source]]))[:MAX_PROMPTS]
    return {source: _spread_out([file for file, _ in repeated[source]]) for source in most}


def worths(file: TranscriptFile) -> list[tuple[str, float]]:
    """(source, mean reward) of the groups of a file that have rewards, but for those that were left out."""
    try:
        with file.path.open("rb") as lines:
            groups = [group for line in lines if (group := _group(line)) is not None]
    except OSError:  # a run that resumes replaces its transcripts
        return []
    return [(group.source, sum(group.rewards) / len(group.rewards)) for group in groups if group.rewards]


def _group(line: bytes) -> _Line | None:
    try:
        group = _DECODER.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # counted where the file is shown
        return None
    return None if group.left_out else group


def _change(worths: Sequence[float]) -> float:
    return sum(abs(after - before) for before, after in pairwise(worths)) + len(worths) * 1e-6


def _spread_out(files: Sequence[TranscriptFile]) -> list[TranscriptFile]:
    distinct = list(dict.fromkeys(files))
    if len(distinct) <= MAX_STEPS:
        return distinct
    return [distinct[round(i * (len(distinct) - 1) / (MAX_STEPS - 1))] for i in range(MAX_STEPS)]


def _size(file: TranscriptFile) -> int:
    try:
        return file.path.stat().st_size
    except OSError:  # as above
        return 0
