"""Per-token figures of a few responses of a step, for its transcript: text, log-probs, advantage, value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from vlmrl.types import Floats, Group, Ints, Rollout

MAX_TOKENS = 2000
"""Tokens of a step that are traced: about 80 bytes each in the transcript."""
Column = Sequence[Floats] | Callable[[Sequence[int]], Mapping[int, Floats]]
"""One array of [T] per segment of each response of a step, or a function that returns those of some segments. It may
leave out segments that it does not know."""
Trace = Mapping[str, list[Any]]
"""`tokens`, the text of each sampled token, and for each column a number or null per token."""


class Tracer:
    """Traces the responses of one group of each step: that whose rewards differ most.

    Args:
        decode: text of token ids, without special tokens, which therefore have an empty text.
    """

    def __init__(self, decode: Callable[[Ints], str]) -> None:
        self._decode = decode
        # What a token adds may depend on the one before it: SentencePiece drops the space at the start of a text.
        self._added = lru_cache(maxsize=100_000)(self._text_after)

    def traces(
        self, groups: Sequence[Group], rewards: Sequence[Floats], columns: Mapping[str, Column | None]
    ) -> dict[tuple[int, int], Trace]:
        """Return the traces by number of the group and of the response in it.

        The responses with the largest and the smallest rewards come first, until `MAX_TOKENS` are traced.

        Args:
            rewards: N arrays of [G]; NaN for a response without a reward.
            columns: name -> values over all groups; None: unknown. A function is called once.
        """
        if not groups:
            return {}
        spreads = [np.ptp(known) if len(known := row[~np.isnan(row)]) else -1.0 for row in rewards]
        chosen = int(np.argmax(spreads))
        firsts = np.cumsum([0, *(len(rollout.segments) for group in groups for rollout in group.rollouts)])
        before = sum(len(group.rollouts) for group in groups[:chosen])
        rows_of: dict[int, range] = {}
        room = MAX_TOKENS
        for number in _extremes_first(rewards[chosen]):
            rollout = groups[chosen].rollouts[number]
            if 0 < rollout.num_sampled <= room:
                room -= rollout.num_sampled
                rows_of[number] = range(firsts[before + number], firsts[before + number + 1])
        wanted = [row for rows in rows_of.values() for row in rows]
        known = {
            name: column(wanted) if callable(column) else {row: column[row] for row in wanted}
            for name, column in columns.items()
            if column is not None
        }
        return {
            (chosen, number): self._trace(groups[chosen].rollouts[number], rows, known)
            for number, rows in rows_of.items()
        }

    def _trace(self, rollout: Rollout, rows: range, columns: Mapping[str, Mapping[int, Floats]]) -> Trace:
        segments = rollout.segments
        trace: dict[str, list[Any]] = {
            "tokens": [text for segment in segments for text in self.texts(segment.tokens[segment.sampled])],
            "logprob": _numbers([segment.logprobs[segment.sampled] for segment in segments]),
        }
        for name, column in columns.items():
            if all(row in column for row in rows):
                trace[name] = _numbers(
                    [column[row][segment.sampled] for row, segment in zip(rows, segments, strict=True)]
                )
        return trace

    def texts(self, tokens: Ints) -> list[str]:
        """Return the text that each token adds. A character of several tokens is with the last of them."""
        ids = [int(token) for token in tokens]
        texts = [self._added(before, token) for before, token in pairwise([None, *ids])]
        start = 0
        for at, text in enumerate(texts):
            if "\ufffd" not in text:
                start = at + 1
                continue
            whole = self._decode(np.array(ids[start : at + 1]))
            # Invalid bytes stay what they are after four tokens: no character has more bytes.
            if "\ufffd" not in whole or at - start >= 3:
                texts[start : at + 1] = [""] * (at - start) + [whole]
                start = at + 1
        return texts

    def _text_after(self, before: int | None, token: int) -> str:
        if before is None:
            return self._decode(np.array([token]))
        context, both = self._decode(np.array([before])), self._decode(np.array([before, token]))
        is_whole = "\ufffd" not in context and both.startswith(context)
        return both.removeprefix(context) if is_whole else self._decode(np.array([token]))


def _extremes_first(rewards: Floats) -> Iterator[int]:
    """Numbers of the responses: the best, the worst, the second best, and so on; those without a reward come last."""
    order = [int(number) for number in np.argsort(-rewards, kind="stable")]
    scored = [number for number in order if not np.isnan(rewards[number])]
    while scored:
        yield scored.pop(0)
        if scored:
            yield scored.pop()
    yield from (number for number in order if np.isnan(rewards[number]))


def _numbers(rows: Sequence[Floats]) -> list[float | None]:
    """Six digits, so that the difference of two log-probs is known to 1e-4. NaN and infinity, which JSON does not have,
    are None."""
    values = np.concatenate(rows) if rows else np.zeros(0)
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values]
