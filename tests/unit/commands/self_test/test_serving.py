"""The serving checks of the self-test on a faulty engine. Engine and policy are small fakes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from vlmrl.commands.self_test import serving
from vlmrl.commands.self_test.outcome import Broken, Skipped
from vlmrl.config.verbs import RlConfig
from vlmrl.types import Floats, Group, Prompt, Rollout, Sample

TOKENS = np.array([5, 6])


class EngineAndPolicy:
    """A policy with a single weight, and an engine with a copy of it. Also stands for their actors."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.weight = self.held = self.served = 1.0
        self.adapter: dict[str, Any] | None = None

    def call(self, ask: Any) -> None:
        ask(self)

    def scale(self, factor: float) -> None:
        self.weight = factor

    def restore(self) -> None:
        self.weight = 1.0

    def randomize_adapter(self, seed: int) -> None:
        """Its adapter changes nothing."""

    def send(self, part: str, *, version: int, readback: None) -> int:
        if part == "base":
            self.held = self.held if self.fault == "keeps its weights" else self.weight
            self.served = self.served if self.fault == "responds from a stale copy" else self.held
        return 2**20

    def sync(self, version: int) -> None:
        self.adapter = {"version": version - (self.fault == "keeps its adapter")}

    def status(self) -> list[dict[str, Any]]:
        return [{"fingerprint": f"of {self.held}", "adapter": self.adapter}]

    def generate(self, prompts: Sequence[Prompt], sampling: Any) -> list[Group]:
        tokens = np.append(TOKENS, int(10 * self.served))
        rollout = Rollout.of_response(tokens, tokens > 6, np.where(tokens > 6, -self.served, 0.0), "", "stop", 0)
        return [Group(Prompt(0, "fake", "", TOKENS, TOKENS, label=None), (rollout,))]

    def score(self, groups: Sequence[Group]) -> list[Floats]:
        return [segment.logprobs - (self.fault == "scores otherwise") for group in groups for segment in group.segments]

    def logprobs(self, samples: Sequence[Sample], *, adapter: bool = True) -> list[Floats]:
        off = 0.01 if self.fault == "computes otherwise" else 0.0
        return [np.where(sample.sampled, -sample.tokens / 10 + off, 0.0) for sample in samples]


@pytest.fixture(autouse=True)
def _no_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving.Pair, "prompts", lambda self: [])


def pair(both: Any) -> serving.Pair:
    settings = serving.settings("model", "out", backend="shm", has_gpu=False)
    config, processor, check = RlConfig.model_validate(settings), None, None
    return serving.Pair(config, processor, both, both, both, both, None, check)  # type: ignore[arg-type]


def test_a_correct_engine_passes_with_figures() -> None:
    assert serving.syncs_by_memory(pair(EngineAndPolicy())).startswith(
        "1.0 MiB in 0.00 s, digests and responses changed"
    )
    assert serving.generates(pair(EngineAndPolicy())).startswith("1 tokens in 0.0 s; the trainer differs by ")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("keeps its weights", "engine and trainer differ|digest of 1.0 did not change"),
        ("responds from a stale copy", "responses did not change after weights x 1.5"),
        ("computes otherwise", "engine and trainer differ by 0.01, the bound is 0.001"),
    ],
)
def test_a_sync_that_fails_is_reported_and_the_weights_are_restored(fault: str, message: str) -> None:
    both = EngineAndPolicy(fault)
    with pytest.raises(Broken, match=message):
        serving.syncs_by_memory(pair(both))
    assert both.weight == 1.0


def test_prefill_that_differs_from_decode_is_reported() -> None:
    with pytest.raises(Broken, match="decode and prefill differ by 1"):
        serving.generates(pair(EngineAndPolicy("scores otherwise")))


def test_an_adapter_that_does_not_arrive_is_reported() -> None:
    with pytest.raises(Broken, match="after a sync of version 2"):
        serving.adapts(pair(EngineAndPolicy("keeps its adapter")))


def test_without_cuda_the_device_path_is_skipped() -> None:
    with pytest.raises(Skipped, match="no CUDA device"):
        serving.syncs_by_device(pair(EngineAndPolicy()))
