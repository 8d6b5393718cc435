"""Choice of the engine: for responses the one with the least work, for their log-probs the one that generated them."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vlmrl.cluster import engines as engines_module
from vlmrl.cluster.engines import RemoteEngines
from vlmrl.cluster.remote_call import record_call
from vlmrl.errors import ClusterError
from vlmrl.types import Group, Prompt, Sampling

SAMPLING = Sampling(n=1, temperature=1.0, top_p=1.0, max_new_tokens=1, seed=0)


class Engines:
    """Three engines that record their calls."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int, int]] = []

    def __len__(self) -> int:
        return 3

    def call(self, function: Any) -> list[Any]:
        return [None] * len(self)

    def submit_to(self, engine: int, function: Any) -> Any:
        method, (item, *_), _ = record_call(function)
        index = item.prompt.index if method == "score" else item.index
        self.log.append((method, engine, index))
        return (method, index) if method == "respond" else []

    def wait(self, results: Any, timeout_s: float | None = None) -> Any:
        return results


def test_a_wait_for_responses_names_the_prompt_that_waits_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [([("respond", 0)], []), ([], [])]
    monkeypatch.setattr(engines_module, "ray", SimpleNamespace(wait=lambda refs, **kwargs: answers.pop(0)))
    engines = RemoteEngines(Engines(), timeout_s=1.0, sleeps=False)  # type: ignore[arg-type]
    prompts = [Prompt(i, f"toy:{i}", "?", tokens=np.arange(2), request=np.arange(2), label=None) for i in range(3)]
    with pytest.raises(ClusterError, match=r"within 1 s \(2 prompts in flight, the oldest: toy:1\): raise --vllm.gen"):
        engines.generate(prompts, SAMPLING)


def test_an_engine_scores_the_responses_that_it_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines_module, "ray", SimpleNamespace(wait=lambda refs, **kwargs: (refs[:1], [])))
    group = Engines()
    engines = RemoteEngines(group, timeout_s=1.0, sleeps=False)  # type: ignore[arg-type]
    prompts = [Prompt(i, f"row {i}", "?", tokens=np.arange(2), request=np.arange(2), label=None) for i in range(3)]
    engines.generate(prompts, SAMPLING)
    engines.score([Group(prompt, ()) for prompt in prompts[::-1]])
    generated = {index: engine for method, engine, index in group.log if method == "respond"}
    assert sorted(generated.values()) == [0, 1, 2]
    assert {index: engine for method, engine, index in group.log if method == "score"} == generated


class Background(Engines):
    """Engines whose responses end when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.futures: dict[int, Future[None]] = {}

    def submit_to(self, engine: int, function: Any) -> Any:
        _, index = super().submit_to(engine, function)
        self.futures[index] = Future()
        return SimpleNamespace(future=lambda: self.futures[index], index=index)

    def wait(self, results: Any, timeout_s: float | None = None) -> Any:
        return None if isinstance(results, list) else f"group {results.index}"


def test_submitted_prompts_go_to_the_engine_with_the_fewest_in_flight() -> None:
    group = Background()
    engines = RemoteEngines(group, timeout_s=1.0, sleeps=False)  # type: ignore[arg-type]
    ended: list[Any] = []

    def submit(index: int) -> None:
        prompt = Prompt(index, f"row {index}", "?", tokens=np.arange(2), request=np.arange(2), label=None)
        engines.submit(prompt, SAMPLING, ended.append)

    for index in range(4):
        submit(index)
    assert [engine for _, engine, _ in group.log] == [0, 1, 2, 0]
    group.futures[1].set_result(None)
    submit(4)
    assert group.log[-1][1] == 1, "it has one in flight as long as its result is not read, and so has engine 2"
    assert [result() for result in ended] == ["group 1"]
    submit(5)
    submit(6)
    assert [engine for _, engine, _ in group.log[-2:]] == [1, 2]
