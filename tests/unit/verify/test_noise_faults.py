"""Faults planted in small models of engine and trainer, which the measured bound must detect."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from planted_faults import leak_between_responses, shift_positions
from sample_batches import batch, packs
from transformers import PreTrainedModel

from vlmrl.data.responses import to_samples
from vlmrl.errors import SyncError
from vlmrl.learning.forward import LogprobForward
from vlmrl.learning.higher_precision import higher_precision
from vlmrl.models import tiny
from vlmrl.models.attention import implementation
from vlmrl.models.load import load_model
from vlmrl.models.scorer import Scorer
from vlmrl.plugins import Processor, processor
from vlmrl.types import Floats, Group, Layout, Metrics, Prompt, Rollout
from vlmrl.verify.noise import NoiseCheck, Paths

CPU = torch.device("cpu")
FLOORS = {torch.float32: 2e-6, torch.bfloat16: 1e-3}


class Both:
    """A trainer, and an engine that is a copy of it: it decodes in packs and reads prompts one by one."""

    def __init__(self, net: PreTrainedModel, read: Processor, dtype: torch.dtype, *, temperature: float = 0.7) -> None:
        self.net, self.read, self.dtype, self.temperature = net, read, dtype, temperature
        self.trainer = self.forward(net)
        self.copy = copy.deepcopy(net)
        self.engine = self.forward(self.copy)

    def forward(self, net: PreTrainedModel) -> LogprobForward:
        return LogprobForward(
            Scorer(net), self.read, temperature=self.temperature, bans=True, device=CPU, cache_bytes=0
        )

    def path(self, passes: LogprobForward, layout: Layout) -> Callable[[Sequence[Group]], list[Floats]]:
        def logprobs(groups: Sequence[Group]) -> list[Floats]:
            rows = dict(passes.logprobs(packs(to_samples(groups), layout)))
            return [rows[i] for i in range(len(rows))]

        return logprobs

    def exact(self, groups: Sequence[Group]) -> list[Floats]:
        with higher_precision(self.net, torch.float32 if self.dtype == torch.bfloat16 else torch.float64):
            return self.path(self.trainer, "padded")(groups)

    def responses(self) -> list[Group]:
        members: dict[int, list[Rollout]] = {}
        prompts: dict[int, Prompt] = {}
        for sample in batch(self.read, seed=1):
            tokens = sample.tokens[: sample.prompt_length]
            prompts[sample.group] = Prompt(sample.group, sample.source, "", tokens, tokens, None, sample.media)
            blank = sample.sampled.astype("float32")
            rollout = Rollout.of_response(sample.tokens, sample.sampled, blank, "", "stop", 0, sample.media)
            members.setdefault(sample.group, []).append(rollout)
        groups = [Group(prompts[i], tuple(members[i])) for i in prompts]
        rows = iter(self.path(self.engine, "packed")(groups))
        return [
            Group(
                group.prompt,
                tuple(replace(r, segments=(replace(r.segments[0], logprobs=next(rows)),)) for r in group.rollouts),
            )
            for group in groups
        ]

    def check(self) -> Metrics:
        paths = Paths(
            prefill=self.path(self.engine, "padded"),
            padded=self.path(self.trainer, "padded"),
            exact=self.exact,
            layout=self.path(self.trainer, "shared"),
        )
        messages: list[str] = []
        check = NoiseCheck(paths, floor=FLOORS[self.dtype], stops=True, in_turn=True, seed=0, say=messages.append)
        metrics = check.check(1, self.responses())
        assert not messages
        return metrics


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.build("qwen2_5_vl", tmp_path_factory.mktemp("noise") / "model", size="micro"))


@pytest.fixture
def make(folder: str) -> Callable[[torch.dtype], Both]:
    def both(dtype: torch.dtype) -> Both:
        net = load_model(folder, dtype=dtype, attn_implementation=implementation("auto", CPU))
        return Both(net, processor(folder, min_pixels=3136, max_pixels=100_000), dtype)

    return both


@pytest.mark.parametrize("dtype", FLOORS)
def test_correct_sides_differ_by_a_few_times_the_noise(make: Any, dtype: torch.dtype) -> None:
    metrics = make(dtype).check()
    assert max(metrics["verify/noise/gap"], metrics["verify/noise/layout_gap"]) < 3 * metrics["verify/noise/level"]
    assert (metrics["verify/noise/level"] == FLOORS[dtype]) == (dtype == torch.float32)


def test_large_rounding_at_a_low_temperature_is_not_a_fault(make: Any) -> None:
    """Keys with large biases, as in Qwen2.5's first layers, and large logits."""
    net = make(torch.float32).net
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.endswith(".k_proj.bias"):
                parameter.copy_(150 * torch.randn(parameter.shape, generator=draw))
            elif name.endswith(".q_proj.weight"):
                parameter.mul_(5)
            elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
                parameter.mul_(4)
    metrics = Both(net, make(torch.float32).read, torch.float32, temperature=0.1).check()
    assert metrics["verify/noise/gap"] > 20 * FLOORS[torch.float32], "told by the floor it would be a fault"


def test_a_layer_of_the_engine_that_is_scaled_is_found(make: Any) -> None:
    both = make(torch.float32)
    with torch.no_grad():
        both.copy.base_model.language_model.layers[1].mlp.down_proj.weight.mul_(1.01)
    with pytest.raises(SyncError, match="engine and trainer disagree"):
        both.check()


def test_a_tower_of_the_engine_that_is_a_step_behind_is_found(make: Any) -> None:
    both = make(torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in both.copy.base_model.visual.parameters():
            parameter.add_(1e-3 * torch.randn_like(parameter))
    with pytest.raises(SyncError, match="engine and trainer disagree"):
        both.check()


def test_positions_of_shared_responses_that_are_off_by_one_are_found(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shift_positions(monkeypatch)
    with pytest.raises(SyncError, match="the trainer disagrees with itself"):
        make(torch.float32).check()


def test_a_leak_of_a_thousandth_between_two_responses_is_found(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    leak_between_responses(monkeypatch)
    with pytest.raises(SyncError, match="the trainer disagrees with itself"):
        make(torch.float32).check()
