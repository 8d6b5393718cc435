"""Hold out training rows for evaluation, without a prompt that is also trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from vlmrl.data.digests import RowHasher
from vlmrl.data.rows import Rows, RowView
from vlmrl.errors import ConfigError
from vlmrl.types import Bools, Ints

_STREAM = 2**31 + 2
"""Stream of random numbers for the choice; `RowOrder` uses other streams of the same seed."""


def hold_out(sources: Sequence[RowHasher], fraction: float, *, seed: int) -> tuple[list[Rows], list[Rows]]:
    """Split each source into training rows and held-out rows; the split follows from the seed, and row order is kept.

    Rows with the same prompt, such as several pairs of responses to a question, stay together, also over sources: those
    of an earlier source decide. So the held-out part may be smaller than `fraction`; it is larger only if each prompt
    has more rows than that, or an earlier source holds out more of its prompts. All rows are read for this; of
    generated ones, whose small families repeat questions by design, only the keys. Both parts of a source have at least
    one row, except that nothing is held out of a source whose prompts earlier ones all train on. Messages still name
    rows by their original numbers.

    Raises:
        ConfigError: a source has only one row, or only one prompt, or earlier ones hold out all of its prompts.
    """
    kept, held = [], []
    is_held: dict[str, bool] = {}
    for number, hasher in enumerate(sources):
        source, size = hasher.rows, len(hasher.rows)
        count = min(max(1, round(size * fraction)), size - 1)
        order = np.random.default_rng([seed % 2**63, _STREAM, number]).permutation(size)
        groups = _by_prompt(hasher, order)
        if len(groups) < 2:
            only = "it has only one" if size < 2 else f"all of its {size} rows have the same prompt"
            raise ConfigError(f"data.eval_fraction {fraction:g} cannot hold out a row of dataset {source.name}: {only}")
        chosen = _choose(groups, count, is_held)
        if chosen.all():
            raise ConfigError(
                f"data.eval_fraction {fraction:g} leaves no row of dataset {source.name} to train on: all of its "
                "prompts are held out of the datasets before it"
            )
        is_held |= {prompt: bool(chosen[rows[0]]) for prompt, rows in groups.items() if isinstance(prompt, str)}
        held.append(_select(source, np.flatnonzero(chosen)))
        kept.append(_select(source, np.flatnonzero(~chosen)))
    return kept, held


def _by_prompt(hasher: RowHasher, order: Ints) -> dict[str | int, list[int]]:
    """Return the rows of each prompt, the prompts in `order` of their first rows; an unreadable row is alone, under its
    number."""
    groups: dict[str | int, list[int]] = {}
    for row in map(int, order):
        prompt = hasher.prompt(row)
        groups.setdefault(row if prompt is None else prompt, []).append(row)
    return groups


def _choose(groups: Mapping[str | int, list[int]], count: int, is_held: Mapping[str, bool]) -> Bools:
    """Return which rows are held out: the prompts that earlier sources hold out, then whole prompts that they do not
    have, in order, as far as `count` rows have room for them; at least one."""
    chosen = np.zeros(sum(map(len, groups.values())), dtype=np.bool_)
    free: list[list[int]] = []
    for prompt, rows in groups.items():
        if isinstance(prompt, str) and prompt in is_held:
            chosen[rows] = is_held[prompt]
        else:
            free.append(rows)
    room = count - int(chosen.sum())
    for rows in free:
        if len(rows) <= room:
            chosen[rows] = True
            room -= len(rows)
    if free and not chosen.any():
        chosen[min(free, key=len)] = True
    return chosen


def _select(source: Rows, indices: Ints) -> Rows:
    numbers = indices if source.numbers is None else source.numbers[indices]
    return replace(source, rows=RowView(source.rows, indices=indices), numbers=numbers)
