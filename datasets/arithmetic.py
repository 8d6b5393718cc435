"""Arithmetic questions as text, generated on demand: the counterpart of `visual_math` without images.

vlmrl rl --data.prompt_dataset 'arithmetic?difficulty=1+2&size=5000' ...
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vlmrl.data.rows import Generated
from vlmrl.errors import ConfigError

_OPERATIONS = {"+": operator.add, "-": operator.sub, "×": operator.mul}


@dataclass(frozen=True, slots=True)
class Sum:
    """A question. See `vlmrl.data.rows.GeneratedQuestion`."""

    text: str
    value: int
    difficulty: int
    boxed: bool

    @property
    def key(self) -> str:
        return self.text

    def row(self) -> dict[str, Any]:
        label = str(self.value)
        return {
            "input": f"What is {self.text}?",
            "label": label,
            "answer": f"\\boxed{{{label}}}" if self.boxed else label,
            "family": "arithmetic",
            "difficulty": self.difficulty,
        }


def rows(
    *, split: str, seed: int, size: int = 10_000, difficulty: tuple[int, ...] = (1,), boxed: bool = False
) -> Sequence[dict[str, Any]]:
    """Generate `size` questions.

    Difficulty 1: sums and differences of numbers up to 20; 2: up to 100, and products up to 12 times 12; 3: two
    operations. `boxed` puts the target answer of supervised training (not the label) into `\\boxed{}`.

    Raises:
        ConfigError: a difficulty does not exist.
    """
    invent = inventor("arithmetic", difficulty=difficulty, boxed=boxed)
    return Generated(invent, size=size, split=split, seed=seed)


def inventor(dataset: str, *, difficulty: tuple[int, ...], boxed: bool) -> Callable[[random.Random, int], Sum]:
    """Return the function that invents the question of a row. `dataset` is for messages.

    Raises:
        ConfigError: a difficulty does not exist.
    """
    unknown = [level for level in difficulty if level not in (1, 2, 3)]
    if unknown or not difficulty:
        raise ConfigError(f"{dataset}?difficulty={'+'.join(map(str, difficulty))}: choose among 1, 2 and 3")

    def invent(rng: random.Random, row: int) -> Sum:
        level = difficulty[row % len(difficulty)]
        text, value = _INVENT[level](rng)
        return Sum(text, value, level, boxed)

    return invent


def _small(rng: random.Random) -> tuple[str, int]:
    return _calculate(rng.randint(0, 20), rng.choice("+-"), rng.randint(0, 20))


def _large(rng: random.Random) -> tuple[str, int]:
    symbol = rng.choice("+-×")
    top = 12 if symbol == "×" else 100
    return _calculate(rng.randint(2, top), symbol, rng.randint(2, top))


def _nested(rng: random.Random) -> tuple[str, int]:
    inner, value = _calculate(rng.randint(2, 50), rng.choice("+-"), rng.randint(2, 50))
    symbol, other = rng.choice("+-×"), rng.randint(2, 12)
    return f"({inner}) {symbol} {other}", _OPERATIONS[symbol](value, other)


def _calculate(left: int, symbol: str, right: int) -> tuple[str, int]:
    if symbol == "-" and right > left:  # negative results are left to difficulty 3
        left, right = right, left
    return f"{left} {symbol} {right}", _OPERATIONS[symbol](left, right)


_INVENT = {1: _small, 2: _large, 3: _nested}
