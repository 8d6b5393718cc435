"""Rows for environments that make their own episodes: a number each, from which nothing follows. They get no row.

vlmrl rl --train.agent_func_path my_env.py:make --data.prompt_dataset 'episodes?size=2000' ...

The environment's first message replaces the row's question; its seed follows from the run's.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from vlmrl.data.rows import Generated, Rows


@dataclass(frozen=True, slots=True)
class _Episode:
    number: int

    @property
    def key(self) -> str:
        return str(self.number)

    def row(self) -> dict[str, Any]:
        return {"input": f"Episode {self.number}."}


def rows(*, split: str, seed: int, size: int = 10_000) -> Rows:
    """Generate `size` episodes."""

    def invent(rng: random.Random, row: int) -> _Episode:
        del row
        return _Episode(rng.getrandbits(40))

    generated = Generated(invent, size=size, split=split, seed=seed)
    return Rows("episodes", generated, ("input",), has_own_columns=True, has_questions=False, is_generated=True)
