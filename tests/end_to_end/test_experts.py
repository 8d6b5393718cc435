"""Real vLLM on CPU records the experts that it chose, and the trainer's passes replay them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_pair import EXACT, SAMPLING, TEMPERATURE, Pair, Trainer, rollout_engine

from vlmrl.data.packing import collect, make_pack
from vlmrl.data.responses import to_samples
from vlmrl.models import tiny
from vlmrl.models.experts import routers
from vlmrl.models.inputs import model_inputs
from vlmrl.models.load import load_model
from vlmrl.models.scorer import Scorer
from vlmrl.rollout.engine import RolloutEngine
from vlmrl.types import Group, Sample


class RecordingEngine(RolloutEngine):
    """An engine that records experts, whatever its settings say."""

    def __init__(self, settings: object) -> None:
        super().__init__(dataclasses.replace(settings, returns_experts=True))  # type: ignore[type-var]


@pytest.mark.prove
def test_the_trainer_replays_the_experts_of_an_engine_with_other_routers(tmp_path: Path) -> None:
    """Routers of the opposite sign would choose the experts that the engine did not."""
    model = tiny.build("qwen3_vl_moe", tmp_path / "model", size="micro")
    trainer = Trainer(model)
    pair = Pair(rollout_engine(model, kind=RecordingEngine), trainer, asyncio.Runner())
    pair.run(pair.engine.start())
    first = pair.generate(trainer.prompts())
    again = pair.generate(trainer.prompts())
    pair.run(pair.engine.shutdown())
    pair.runner.close()
    samples = to_samples(first)
    for sample in samples:
        assert sample.experts is not None
        assert sample.experts.shape == (len(sample.tokens) - 1, 2, 2)
        assert sample.experts.min() >= 0, "a new prompt is computed as a whole"
    assert all(group.segments[0].experts is not None for group in again), "also where the KV cache has the prompt"
    scorer = Scorer(load_model(str(model), dtype=torch.float32, attn_implementation="sdpa").eval())
    assert gap(scorer, trainer, first, samples, replays=True) < EXACT
    with torch.no_grad():
        for router in routers(scorer.net):
            router.weight.mul_(-1.0)  # type: ignore[operator]
    assert gap(scorer, trainer, first, samples, replays=False) > 1e-2
    chosen = ExpertsSeen(scorer.net)
    gap(scorer, trainer, first, samples, replays=True)
    assert chosen.equal(samples), "the engine's, although these routers would choose the others"


class ExpertsSeen:
    """The experts that the routers of a model return."""

    def __init__(self, net: torch.nn.Module) -> None:
        self._rows: list[torch.Tensor] = []
        for router in routers(net):
            router.register_forward_hook(lambda module, args, output: self._rows.append(output[2]))

    def equal(self, samples: Sequence[Sample]) -> bool:
        by_sample = zip(self._rows[::2], self._rows[1::2], samples, strict=True)
        pairs = [(torch.stack([a, b], dim=1)[:-1].numpy(), sample.experts) for a, b, sample in by_sample]
        return all(np.array_equal(seen, experts) for seen, experts in pairs)


def gap(
    scorer: Scorer, trainer: Trainer, groups: Sequence[Group], samples: Sequence[Sample], *, replays: bool
) -> float:
    """Largest difference of the log-probs of engine and trainer."""
    largest = 0.0
    segments = [segment for group in groups for segment in group.segments]
    for segment, sample in zip(segments, samples, strict=True):
        pack = make_pack([sample], [0], "padded")
        with torch.no_grad():
            inputs = model_inputs(scorer.net, trainer.tools, pack, replays_experts=replays)
            output = scorer(inputs, temperature=TEMPERATURE, banned=trainer.tools.banned_tokens)
        (row,) = collect(pack, output.logprobs)
        largest = max(largest, float(np.abs(row - segment.logprobs)[sample.sampled].max()))
    assert SAMPLING.temperature == TEMPERATURE
    return largest
