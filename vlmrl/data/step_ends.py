"""Where the steps of a response end: at a separator in its text."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from vlmrl.errors import ConfigError
from vlmrl.plugins import Processor
from vlmrl.types import Bools, Ints, Sample


class StepBoundaries:
    """Positions where the steps of a response end."""

    def __init__(self, processor: Processor, separator: str, *, flag: str = "reward.process_separator") -> None:
        """A step ends with `separator`, the value of the setting `flag`.

        Raises ConfigError when the separator is not the text of whole tokens.
        """
        self._tokenizer = processor.tokenizer
        self._special = frozenset(processor.tokenizer.all_special_ids)
        self._decoded: dict[int, str] = {}
        self._separator = separator
        ids = processor.tokenizer(separator, add_special_tokens=False).input_ids
        if separator not in "".join(self._pieces(ids)):
            raise ConfigError(f"{flag} {separator!r}: the model's tokens split one of its characters: use another")

    def ends(self, sample: Sample) -> Bools:
        """[T]: True at the tokens that end a step: where a separator ends, and the last token of each run of sampled
        tokens, unless only whitespace and special tokens follow the last separator.

        Example: `a=1`, `.\\n\\n`, `b`, `=2`, end token: True at the second and the fifth.
        """
        is_end = np.zeros(len(sample.tokens), dtype=np.bool_)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], sample.sampled, [False]]).astype(np.int8)))
        for first, last in edges.reshape(-1, 2):
            is_end[first + self._ends_of_run(sample.tokens[first:last])] = True
        return is_end

    def _ends_of_run(self, tokens: Ints) -> Ints:
        pieces = self._pieces(tokens)
        token_ends = np.cumsum([len(piece) for piece in pieces])
        text = "".join(pieces)
        separator_ends = [match.end() for match in re.finditer(re.escape(self._separator), text)]
        ends = list(np.searchsorted(token_ends, separator_ends))
        after = ends[-1] + 1 if ends else 0
        rest = [
            piece for piece, token in zip(pieces[after:], tokens[after:], strict=True) if token not in self._special
        ]
        if not ends or "".join(rest).strip():
            ends.append(len(tokens) - 1)
        return np.array(ends, dtype=np.int64)

    def _pieces(self, tokens: Sequence[int] | Ints) -> list[str]:
        """Decode each token by itself, so that positions in the text map to tokens."""
        for token in {int(token) for token in tokens} - self._decoded.keys():
            self._decoded[token] = str(self._tokenizer.decode([token], skip_special_tokens=False))
        return [self._decoded[int(token)] for token in tokens]
