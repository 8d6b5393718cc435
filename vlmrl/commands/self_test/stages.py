"""ZeRO's stages 0, 2 and 3 are one function: equal buffers, and log-probs of 2,000 tokens that are equal."""

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
"""How far log-probs of two stages may be apart in fp32."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What one stage makes of the model, and says of the tokens."""

    buffers: Mapping[str, Tensor]
    logprobs: Floats
    """[T] of the sampled tokens"""


class _Opened(Policy):
    """A policy whose model can be looked at."""

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        return self._net.named_buffers()


def check(folder: Path) -> str:
    """Buffers bit for bit, log-probs to what the type explains."""
    model = models.build(folder)
    exact = {stage: trained(model, stage, "fp32") for stage in STAGES}
    apart = max(_mean_gap(exact[stage].logprobs, exact[0].logprobs) for stage in STAGES)
    rough = {stage: trained(model, stage, "bf16") for stage in STAGES}
    noise = _mean_gap(rough[0].logprobs, exact[0].logprobs)
    rounded = max(_mean_gap(rough[stage].logprobs, rough[0].logprobs) for stage in STAGES)
    figure = f"log-probs differ by {apart:.1g} in fp32 and {rounded:.1g} in bf16, whose noise is {noise:.1g}"
    for dtype, found in (("fp32", exact), ("bf16", rough)):
        for stage in STAGES:
            fault = fault_of_buffers(model, found[stage].buffers)
            if fault is not None:
                raise Broken(f"stage {stage} in {dtype}: {fault}; {figure}")
    # Stages that compute alike differ by no more than rounding does.
    if not (apart <= _EXACT and rounded <= max(noise, _EXACT)):
        raise Broken(figure)
    return f"{figure}; {len(exact[0].buffers)} buffers equal"


def trained(model: str, stage: int, dtype: str) -> Stage:
    """The policy of a run with `ds.zero_stage`, alone in this process."""
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
    policy = _Opened(settings)
    sample = _sample(model)
    ((_, row),) = policy.logprobs([make_pack([sample], [0], "shared")])[0]
    return Stage({name: buffer.detach().cpu().clone() for name, buffer in policy.buffers()}, row[sample.sampled])


def fault_of_buffers(model: str, found: Mapping[str, Tensor]) -> str | None:
    """What is wrong with a model's buffers; None when they are, bit for bit, those of one that nobody has sharded.

    In fp32, whatever the run's type: `from_pretrained` keeps them so.
    """
    plain = dict(load_model(model, dtype=torch.float32, attn_implementation=None).named_buffers())
    if plain.keys() != found.keys():
        return f"it has the buffers {', '.join(sorted(found))}, a plain model {', '.join(sorted(plain))}"
    for name, wanted in plain.items():
        if not torch.equal(found[name].to(wanted.dtype), wanted):
            error = float((found[name].double() - wanted.double()).abs().max())
            return f"{name} is off by {error:.2g}, as {str(found[name].dtype).removeprefix('torch.')}"
    return None


def _sample(model: str) -> Sample:
    """An image and text, the last half of it sampled."""
    reader = processor_of(model, Columns())
    rng = np.random.default_rng(0)
    assert reader.resize_factor is not None
    side = 4 * reader.resize_factor
    image = InlineMedia("self-test", (side, side), rng.integers(0, 256, (side, side, 3), dtype=np.uint8))
    prompt, _ = reader.encode(reader.render("how many?", num_images=1, columns=Columns()), [image.size])
    tokens = np.concatenate([prompt, rng.integers(32, 127, _TOKENS - len(prompt))])
    return Sample(tokens=tokens, sampled=np.arange(_TOKENS) >= _TOKENS // 2, media=(image,))


def _mean_gap(one: Floats, two: Floats) -> float:
    return float(np.abs(one.astype(np.float64) - two).mean())
