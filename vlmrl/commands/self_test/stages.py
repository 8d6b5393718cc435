"""Check that ZeRO stages 0, 2 and 3 compute the same: equal buffers, and equal log-probs of 2,000 tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vlmrl.commands.self_test import models
from vlmrl.commands.self_test.outcome import Broken
from vlmrl.config.actor import Model
from vlmrl.config.data import Columns
from vlmrl.config.ds import Ds
from vlmrl.config.train import Loop
from vlmrl.config.vision import Vision
from vlmrl.data.media import InlineMedia
from vlmrl.data.packing import make_pack
from vlmrl.learning.policy import Policy
from vlmrl.learning.settings import PolicySettings
from vlmrl.models.load import load_model
from vlmrl.plugins import processor_of
from vlmrl.types import Floats, Sample

STAGES = (0, 2, 3)
_TOKENS = 2000
_EXACT = 1e-5
"""The largest mean difference between log-probs of two stages in fp32."""


@dataclass(frozen=True, slots=True)
class StageOutputs:
    """The buffers of a model loaded with one stage, and its log-probs."""

    buffers: Mapping[str, Tensor]
    logprobs: Floats
    """[T] of the sampled tokens"""


class _InspectablePolicy(Policy):
    """A policy that gives access to its model's buffers."""

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        return self._net.named_buffers()


def check(folder: Path) -> str:
    """Compare buffers bit for bit, and log-probs up to rounding."""
    model = models.build(folder)
    fp32 = {stage: run_stage(model, stage, "fp32") for stage in STAGES}
    gap = max(_mean_gap(fp32[stage].logprobs, fp32[0].logprobs) for stage in STAGES)
    bf16 = {stage: run_stage(model, stage, "bf16") for stage in STAGES}
    noise = _mean_gap(bf16[0].logprobs, fp32[0].logprobs)
    bf16_gap = max(_mean_gap(bf16[stage].logprobs, bf16[0].logprobs) for stage in STAGES)
    figure = f"log-probs differ by {gap:.1g} in fp32 and {bf16_gap:.1g} in bf16, whose noise is {noise:.1g}"
    for dtype, outputs in (("fp32", fp32), ("bf16", bf16)):
        for stage in STAGES:
            fault = fault_of_buffers(model, outputs[stage].buffers)
            if fault is not None:
                raise Broken(f"stage {stage} in {dtype}: {fault}; {figure}")
    # Stages that compute the same differ by no more than rounding.
    if not (gap <= _EXACT and bf16_gap <= max(noise, _EXACT)):
        raise Broken(figure)
    return f"{figure}; {len(fp32[0].buffers)} buffers equal"


def run_stage(model: str, stage: int, dtype: str) -> StageOutputs:
    """Load the policy of a run with this `ds.zero_stage` in this process, and compute log-probs."""
    settings = PolicySettings(
        actor=Model.model_validate({"model_name_or_path": model}),
        ds=Ds.model_validate({"zero_stage": stage, "param_dtype": dtype}),
        loop=Loop(),
        columns=Columns(),
        vision=Vision(),
        total_steps=1,
        loss=None,
        temperature=1.0,
        bans=False,
    )
    policy = _InspectablePolicy(settings)
    sample = _sample(model)
    ((_, row),) = policy.logprobs([make_pack([sample], [0], "shared")])[0]
    return StageOutputs({name: buffer.detach().cpu().clone() for name, buffer in policy.buffers()}, row[sample.sampled])


def fault_of_buffers(model: str, buffers: Mapping[str, Tensor]) -> str | None:
    """Describe how buffers differ from those of a model that is not sharded; None when they are equal bit for bit.

    They are compared in fp32, in which `from_pretrained` keeps them for any type of the run.
    """
    expected = dict(load_model(model, dtype=torch.float32, attn_implementation=None).named_buffers())
    if expected.keys() != buffers.keys():
        return f"it has the buffers {', '.join(sorted(buffers))}, a plain model {', '.join(sorted(expected))}"
    for name, buffer in expected.items():
        if not torch.equal(buffers[name].to(buffer.dtype), buffer):
            error = float((buffers[name].double() - buffer.double()).abs().max())
            return f"{name} is off by {error:.2g}, as {str(buffers[name].dtype).removeprefix('torch.')}"
    return None


def _sample(model: str) -> Sample:
    """Return an image and text, of which the second half is sampled."""
    processor = processor_of(model, Columns())
    rng = np.random.default_rng(0)
    assert processor.resize_factor is not None
    side = 4 * processor.resize_factor
    width, height = processor.target_size((side, side))
    image = InlineMedia("self-test", (width, height), rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
    prompt, _ = processor.encode(processor.render("how many?", num_images=1, columns=Columns()), [image.size])
    tokens = np.concatenate([prompt, rng.integers(32, 127, _TOKENS - len(prompt))])
    return Sample(tokens=tokens, sampled=np.arange(_TOKENS) >= _TOKENS // 2, media=(image,))


def _mean_gap(one: Floats, two: Floats) -> float:
    return float(np.abs(one.astype(np.float64) - two).mean())
