"""Which engine is asked: for answers the one with the least to do, for log-probs of answers the one that gave them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vlmrl.cluster import engines as roles
from vlmrl.cluster.engines import RemoteEngines
from vlmrl.cluster.remote_call import recorded
from vlmrl.types import Group, Prompt, Sampling

SAMPLING = Sampling(n=1, temperature=1.0, top_p=1.0, max_new_tokens=1, seed=0)


class Engines:
    """Three, which note what they are asked."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int, int]] = []

    def __len__(self) -> int:
        return 3

    def call(self, ask: Any) -> list[Any]:
        return [None] * len(self)

    def submit_to(self, engine: int, ask: Any) -> Any:
        method, (asked, *_), _ = recorded(ask)
        index = asked.prompt.index if method == "score" else asked.index
        self.log.append((method, engine, index))
        return (method, index) if method == "generate" else []

    def wait(self, answers: Any, timeout_s: float | None = None) -> Any:
        return answers


def test_an_engine_reads_the_answers_that_it_gave_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles, "ray", SimpleNamespace(wait=lambda refs, **how: (refs[:1], [])))
    group = Engines()
    engines = RemoteEngines(group, timeout_s=1.0, sleeps=False)  # type: ignore[arg-type]
    prompts = [Prompt(i, f"row {i}", "?", tokens=np.arange(2), request=np.arange(2), label=None) for i in range(3)]
    engines.generate(prompts, SAMPLING)
    engines.score([Group(prompt, ()) for prompt in prompts[::-1]])
    gave = {index: engine for method, engine, index in group.log if method == "generate"}
    assert sorted(gave.values()) == [0, 1, 2]
    assert {index: engine for method, engine, index in group.log if method == "score"} == gave
