"""The adapter check with real vLLM on CPU: faults that arise after the readback, and a stale cache."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from engine_pair import COLUMNS, TEMPERATURE, rollout_engine
from test_adapter_engine import PLANS, Adapted, send

from vlmrl.config.data import Data
from vlmrl.config.rollout import Rollout as RolloutSettings
from vlmrl.errors import SyncError
from vlmrl.models import tiny
from vlmrl.rollout.engine import RolloutEngine
from vlmrl.types import Floats, Group, Prompt, Rollout, Sample, Sampling, Segment
from vlmrl.verify.adapters import AdapterCheck, prompt_of, sampling_of
from vlmrl.verify.noise import NoiseCheck, Paths


class FaultyEngine(RolloutEngine):
    """An engine whose workers can be made faulty."""

    def arguments(self) -> dict[str, Any]:
        return super().arguments() | {"worker_extension_cls": "late_faults.Faulty"}


@dataclasses.dataclass
class Both:
    """Engine and trainer with the interface of the check."""

    engine: RolloutEngine
    trainer: Adapted
    runner: asyncio.Runner

    def respond_each(
        self, prompt: Prompt, sampling: Sampling, *, adapter: Sequence[bool] = (True,)
    ) -> list[list[Group]]:
        async def ask() -> list[list[Group]]:
            generate = self.engine.generate
            return [[g] for g in await asyncio.gather(*(generate(prompt, sampling, adapter=each) for each in adapter))]

        return self.runner.run(ask())

    def logprobs(self, samples: Sequence[Sample], *, adapter: bool = True) -> list[Floats]:
        self.trainer.switch(on=adapter)
        rows = [self.trainer.logprobs(_segment(sample)) for sample in samples]
        self.trainer.switch(on=True)
        return rows

    def adapter_is_zero(self) -> bool:
        return not any(tensor.any() for name, tensor in self.trainer.adapter() if "lora_B" in name)

    def check(self) -> AdapterCheck:
        settings = RolloutSettings(temperature=TEMPERATURE, max_new_tokens=16)
        data = Data(prompt_dataset="none", max_len=600, max_pixels=COLUMNS.max_pixels)
        return AdapterCheck(
            engines=self,
            learner=self,
            prompt=partial(prompt_of, processor=self.trainer.tools, data=data),
            sampling=sampling_of(settings, seed=0),
            bound=1e-3,
            floor=1e-6,
            is_apart=True,
        )

    def send(self) -> int:
        """Sync the adapter; return its version."""
        version = self.engine.version + 1
        assert self.runner.run(send(self.engine, self.trainer, version)) == self.trainer.fingerprint()
        return version

    def learn(self) -> None:
        """Take a step with a visible effect."""
        with torch.no_grad():
            for name, tensor in self.trainer.adapter():
                if "lora_B" in name:
                    tensor.normal_(std=0.003)

    def plant(self, fault: str) -> None:
        self.runner.run(self.engine._call("vlmrl_plant", fault))

    def responses(self) -> list[Group]:
        settings = RolloutSettings(temperature=TEMPERATURE, max_new_tokens=16)
        data = Data(prompt_dataset="none", max_len=100, max_pixels=COLUMNS.max_pixels)
        prompts = [prompt_of(lead, processor=self.trainer.tools, data=data) for lead in ("", "and ")]
        groups = [self.respond_each(prompt, sampling_of(settings, seed=1)) for prompt in prompts]
        return [group for ((group,),) in groups]

    def score(self, groups: Sequence[Group]) -> list[Floats]:
        """Compute the engine's log-probs of existing tokens."""

        async def ask() -> list[list[Floats]]:
            return list(await asyncio.gather(*(self.engine.score(group) for group in groups)))

        return [row for rows in self.runner.run(ask()) for row in rows]


def _segment(sample: Sample) -> Segment:
    logprobs = sample.sampled.astype("float32")
    (segment,) = Rollout.of_response(sample.tokens, sample.sampled, logprobs, "", "stop", 0).segments
    return segment


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    torch.manual_seed(0)
    model = tiny.build("qwen3", tmp_path_factory.mktemp("model") / "qwen3", size="micro")
    trainer = Adapted(model, **PLANS["qwen3"])
    engine = rollout_engine(model, kind=FaultyEngine, adapter=trainer.plan, temperature=TEMPERATURE)
    both = Both(engine, trainer, asyncio.Runner())
    both.runner.run(both.engine.start())
    yield both
    both.runner.run(both.engine.shutdown())
    both.runner.close()


def test_a_sound_engine_passes_from_the_zeros_on(both: Both) -> None:
    check = both.check()
    metrics = [check.check(both.send())]
    for _ in range(2):
        both.learn()
        metrics.append(check.check(both.send()))
    assert [line["verify/adapters/effect"] > 1e-3 for line in metrics] == [False, True, True]
    assert max(line["verify/adapters/gap"] for line in metrics) < 5e-5
    assert max(line["verify/adapters/base_gap"] for line in metrics) < 5e-5


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("Ignores", "ignores the adapter"),
        ("Keeps", "keeps the adapter of version"),
        ("AppliesTwice", "applies the adapter twice"),
        ("SwapsLayers", "applies another adapter: tensors were lost, or came under other names"),
    ],
)
def test_what_goes_wrong_after_the_proof_is_named_by_the_probe(both: Both, fault: str, cause: str) -> None:
    check = both.check()
    both.plant("Late")
    both.learn()
    check.check(both.send())
    both.plant(fault)
    both.learn()
    with pytest.raises(SyncError, match=f"adapter check: engine 0 {cause}"):
        check.check(both.send())


def test_a_stale_prefix_cache_is_named_by_the_probe(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    async def forget() -> None:
        """Keep the cache."""

    check = both.check()
    both.plant("Late")
    both.learn()
    both.send()
    always = both.engine._lora_request()
    monkeypatch.setattr(both.engine, "_lora_request", lambda: always)
    monkeypatch.setattr(both.engine, "_reset_prefix_cache", forget)
    check.check(both.engine.version)
    both.learn()
    with pytest.raises(SyncError, match="adapter check: engine 0 responds from a stale prefix cache"):
        check.check(both.send())


def test_a_layer_that_is_scaled_after_its_digest_was_taken_is_found_by_the_measured_bound(both: Both) -> None:
    both.plant("Late")
    both.learn()
    both.send()

    def padded(groups: Sequence[Group]) -> list[Floats]:
        return [both.trainer.logprobs(segment) for group in groups for segment in group.segments]

    paths = Paths(prefill=both.score, padded=padded, exact=None, layout=None)
    check = NoiseCheck(paths, floor=2e-6, stops=True, in_turn=True, seed=0, say=print)
    metrics = check.check(1, both.responses())
    assert metrics["verify/noise/gap"] < 5 * metrics["verify/noise/level"]
    assert metrics["verify/noise/decode_gap"] < 1e-5, (
        "what is read is scored as it was sampled: tempered, without the banned"
    )
    both.runner.run(both.engine._call("vlmrl_scale_layer", 1.01))
    try:
        with pytest.raises(SyncError, match="engine and trainer disagree"):
            check.check(2, both.responses())
    finally:
        both.runner.run(both.engine._call("vlmrl_scale_layer", 1 / 1.01))
