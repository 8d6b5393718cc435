"""Draw an episode of a transcript as one picture: its images in a row, with responses and rewards beneath."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vlmrl.errors import DataError

_MAX_PER_ROW = 6
_CHARS_PER_LINE = 22
_MAX_LINES = 4


class _Turn(NamedTuple):
    """A response and what the policy had seen since the one before it."""

    image: str | None
    """Hash of the last image; None without one."""
    response: str
    reward: float


def longest_episode(transcript: Path) -> tuple[dict[str, Any], int]:
    """Return the record and the number of the response with the most turns, of those with a score above zero if any.

    Raises:
        DataError: the transcript has no episodes.
    """
    records = [json.loads(line) for line in transcript.read_text(encoding="utf-8").splitlines()]
    episodes = [
        (record, number)
        for record in records
        for number, response in enumerate(record["responses"])
        if "messages" in response
    ]
    if not episodes:
        raise DataError(f"{transcript} has no episode of an environment")
    rewarded = [(record, number) for record, number in episodes if (record["responses"][number]["score"] or 0) > 0]
    return max(rewarded or episodes, key=lambda e: len(e[0]["responses"][e[1]]["messages"]))


def draw_episode(record: Mapping[str, Any], number: int, *, media: Path, out: Path) -> None:
    """Write the picture `out` (PNG) of response `number` of a prompt's record.

    Args:
        record: a line of a transcript (`vlmrl.observe.transcripts`).
        media: folder of the transcript's images.
    """
    # Figure without pyplot: no window system, no global state, thread-safe.
    from matplotlib.figure import Figure
    from matplotlib.image import imread

    turns = _turns(record, number)
    columns = min(len(turns), _MAX_PER_ROW)
    rows = -(-len(turns) // columns)
    figure = Figure(figsize=(2.1 * columns, 2.7 * rows), dpi=110, layout="constrained")
    all_axes = figure.subplots(rows, columns, squeeze=False).flat
    for place, axes in enumerate(all_axes):
        if place >= len(turns):
            axes.axis("off")
            continue
        turn = turns[place]
        if turn.image is not None:
            axes.imshow(imread(media / f"{turn.image}.png"), interpolation="nearest")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_title(f"turn {place + 1}", fontsize=9)
        axes.set_xlabel(f"{_wrapped(turn.response)}\nreward {turn.reward:g}", fontsize=9, parse_math=False)
    partial = out.with_suffix(".tmp")
    figure.savefig(partial, format="png")
    partial.replace(out)


def _turns(record: Mapping[str, Any], number: int) -> Sequence[_Turn]:
    seen = record["images"]
    turns = []
    for message in record["responses"][number]["messages"]:
        if message["role"] == "assistant":
            turns.append(_Turn(seen[-1] if seen else None, message["text"], message["reward"] or 0.0))
            seen = []
        else:
            seen = [*seen, *message["images"]]
    return turns


def _wrapped(text: str) -> str:
    """Break a response into a few lines. Characters that the font lacks become squares."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties()))
    shown = "".join(c if font.get_char_index(ord(c)) else "\N{WHITE SQUARE}" for c in " ".join(text.split()))
    return textwrap.fill(shown, _CHARS_PER_LINE, max_lines=_MAX_LINES, placeholder="...")
