"""What the self-test makes of an engine that does not follow its policy. Engine and policy are small fakes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from vlmrl.commands.self_test import serving
from vlmrl.commands.self_test.outcome import Broken, Skipped
from vlmrl.config.run import RlConfig
from vlmrl.types import Floats, Group, Prompt, Rollout, Sample

TOKENS = np.array([5, 6])


class Both:
    """A policy whose one weight is a number, and an engine that holds what it was sent. Stands for their actors too."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.weight = self.held = self.answers_by = 1.0
        self.adapter: dict[str, Any] | None = None

    def call(self, ask: Any) -> None:
        ask(self)

    def scale(self, factor: float) -> None:
        self.weight = factor

    def restore(self) -> None:
        self.weight = 1.0

    def stir(self, seed: int) -> None:
        """Its adapter changes nothing."""

    def send(self, part: str, *, version: int, readback: None) -> int:
        if part == "base":
            self.held = self.held if self.fault == "keeps its weights" else self.weight
            self.answers_by = self.answers_by if self.fault == "answers from a stale copy" else self.held
        return 2**20

    def sync(self, version: int) -> None:
        self.adapter = {"version": version - (self.fault == "keeps its adapter")}

    def status(self) -> list[dict[str, Any]]:
        return [{"fingerprint": f"of {self.held}", "adapter": self.adapter}]

    def generate(self, prompts: Sequence[Prompt], sampling: Any) -> list[Group]:
        tokens = np.append(TOKENS, int(10 * self.answers_by))
        rollout = Rollout(tokens, tokens > 6, np.where(tokens > 6, -self.answers_by, 0.0), "", "stop", 0)
        return [Group(Prompt(0, "fake", "", TOKENS, TOKENS, label=None), (rollout,))]

    def score(self, groups: Sequence[Group]) -> list[Floats]:
        return [rollout.logprobs - (self.fault == "scores otherwise") for group in groups for rollout in group.rollouts]

    def logprobs(self, samples: Sequence[Sample], *, adapter: bool = True) -> list[Floats]:
        off = 0.01 if self.fault == "computes otherwise" else 0.0
        return [np.where(sample.sampled, -sample.tokens / 10 + off, 0.0) for sample in samples]


@pytest.fixture(autouse=True)
def _no_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving.Pair, "prompts", lambda self: [])


def pair(both: Any) -> serving.Pair:
    settings = serving.settings("model", "out", backend="shm", has_gpu=False)
    config, tools, probe = RlConfig.model_validate(settings), None, None
    return serving.Pair(config, tools, both, both, both, both, None, probe)  # type: ignore[arg-type]


def test_a_sound_engine_is_told_by_its_figures() -> None:
    assert serving.publishes_by_memory(pair(Both())).startswith("1.0 MiB in 0.00 s, digests and responses changed")
    assert serving.generates(pair(Both())).startswith("1 tokens in 0.0 s, trainer ")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("keeps its weights", "engine and trainer are|holds the same digest"),
        ("answers from a stale copy", "responds the same before and after weights x 1.5"),
        ("computes otherwise", "engine and trainer are 0.01 apart, the bound is 0.001"),
    ],
)
def test_a_publish_that_does_not_arrive_is_named_and_leaves_the_model_as_it_was(fault: str, said: str) -> None:
    both = Both(fault)
    with pytest.raises(Broken, match=said):
        serving.publishes_by_memory(pair(both))
    assert both.weight == 1.0


def test_scores_that_are_not_those_of_the_responses_are_named() -> None:
    with pytest.raises(Broken, match="scores its own responses 1 apart"):
        serving.generates(pair(Both("scores otherwise")))


def test_an_adapter_that_did_not_arrive_is_named() -> None:
    with pytest.raises(Broken, match="and was sent version 2"):
        serving.adapts(pair(Both("keeps its adapter")))


def test_without_cuda_there_is_no_way_between_gpus() -> None:
    with pytest.raises(Skipped, match="no CUDA device"):
        serving.publishes_by_device(pair(Both()))
