"""Check engines of other kinds than those of `serving`: in FP8, and in two pipeline stages.

Each is started alone, gets weights as in a run, and its log-probs are compared with those of Transformers.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vlmrl.commands.self_test import models
from vlmrl.commands.self_test.outcome import Broken, Skipped
from vlmrl.config.data import Columns
from vlmrl.config.vllm import Vllm
from vlmrl.models.weight_buckets import pack_bucket
from vlmrl.plugins import processor_of
from vlmrl.rollout.engine import RolloutEngine
from vlmrl.rollout.settings import EngineSettings
from vlmrl.types import Floats, Group, Prompt, Sampling

_FACTOR = 1.5
_SAMPLING = Sampling(n=8, temperature=1.0, top_p=0.9, max_new_tokens=16, seed=0)
"""With top_p below 1 the engine's log-probs are the model's own."""
_ADA = (8, 9)
"""The compute capability from which on GPUs multiply in FP8."""


def fp8(folder: Path) -> str:
    """Check an engine that is quantized again by every weight sync (`vllm.quantization` fp8)."""
    capability = torch.cuda.get_device_capability()
    if capability < _ADA:
        raise Skipped(f"needs a GPU of compute capability 8.9, this one has {'.'.join(map(str, capability))}")
    return _check(folder, Vllm(quantization="fp8", gpu_memory_utilization=0.3))


def pipeline(folder: Path) -> str:
    """Check an engine of two stages (`vllm.pipeline_parallel_size`)."""
    if torch.cuda.device_count() < 2:
        raise Skipped(f"needs two visible GPUs, there is {torch.cuda.device_count()}")
    return _check(folder, Vllm(pipeline_parallel_size=2, gpu_memory_utilization=0.3))


def _check(folder: Path, vllm: Vllm) -> str:
    """Sync weights, and weights x 1.5; read all layers back, and compare log-probs with Transformers'."""
    path = models.build(folder)
    settings = EngineSettings(
        model=path,
        vllm=vllm,
        columns=Columns(),
        trust_remote_code=False,
        dtype="bf16",
        max_model_len=256,
        top_p=_SAMPLING.top_p,
        name="engine",
    )
    return asyncio.run(_compare(settings.build(), path))


async def _compare(engine: RolloutEngine, path: str) -> str:
    from transformers import AutoModelForImageTextToText

    net: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.bfloat16).cuda().eval()
    bound = engine._settings.vllm.logprob_diff_limit(param_dtype="bf16", load_in_4bit=False)
    prompt, gaps, unread = _prompt(path), [], 0
    await engine.start()
    try:
        for version, factor in enumerate((1.0, _FACTOR), start=1):
            _scale(net, factor)
            await engine.begin_update(version, readback={"seed": version, "is_full": True})
            await engine.load_bucket(pack_bucket([(name, p.detach().cpu()) for name, p in net.named_parameters()]))
            await engine.finish_update(vision_changed=True)
            gaps.append(_gap(net, await engine.generate(prompt, _SAMPLING)))
            unread = max(len(report["unread"]) for report in await engine.readback())
    finally:
        await engine.shutdown()
    if not max(gaps) <= bound:
        raise Broken(f"engine and Transformers differ by {max(gaps):.2g}, the bound is {bound:g}")
    return f"two weight syncs, {unread} tensors not read back, log-probs differ by {max(gaps):.2g} (bound {bound:g})"


@torch.no_grad()
def _scale(net: Any, factor: float) -> None:
    for parameter in net.parameters():
        parameter.mul_(factor)


@torch.no_grad()
def _gap(net: Any, group: Group) -> float:
    """Return the mean difference of the sampled tokens' log-probs."""
    differences: list[Floats] = []
    for segment in group.segments:
        tokens = torch.from_numpy(segment.tokens).cuda()
        logprobs = torch.log_softmax(net(input_ids=tokens[None]).logits[0, :-1].float(), dim=-1)
        of_tokens = logprobs.gather(1, tokens[1:, None])[:, 0].cpu().numpy()
        differences.append(np.abs(of_tokens - segment.logprobs[1:])[segment.sampled[1:]])
    return float(np.concatenate(differences).mean())


def _prompt(path: str) -> Prompt:
    processor = processor_of(path, Columns())
    text = processor.render("how many dots?", num_images=0, columns=Columns())
    tokens, request = processor.encode(text, [])
    return Prompt(index=0, source="self-test:0", text=text, tokens=tokens, request=request, label=None)
