"""Shared parts of the rollout engine's tests: an engine and a minimal trainer of the same model."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from processes import engine_processes
from transformers.core_model_loading import revert_weight_conversion

from vlmrl import plugins
from vlmrl.config.data import Columns
from vlmrl.config.vllm import Vllm
from vlmrl.data.media import InlineMedia
from vlmrl.models import tiny
from vlmrl.models.adapter_plan import AdapterPlan
from vlmrl.models.checkpoint_layout import keep_checkpoint_layout
from vlmrl.models.weight_buckets import pack_bucket
from vlmrl.rollout.engine import RolloutEngine
from vlmrl.rollout.settings import EngineSettings
from vlmrl.types import Floats, Group, Prompt, Sampling, Segment

COLUMNS = Columns(max_pixels=200 * 200)
TEMPERATURE = 0.7
SAMPLING = Sampling(n=3, temperature=TEMPERATURE, top_p=1.0, max_new_tokens=12, seed=0)
EXACT = 5e-5
"""fp32 noise of small random models is 1e-6; the smallest fault in these tests causes 1e-3."""


class PlantableEngine(RolloutEngine):
    """An engine whose workers can be made to load weights wrongly (`weight_faults`)."""

    def arguments(self) -> dict[str, Any]:
        return super().arguments() | {"worker_extension_cls": "weight_faults.Faulty"}


def rollout_engine(
    model: Path | str,
    *,
    kind: type[RolloutEngine] = RolloutEngine,
    adapter: AdapterPlan | None = None,
    temperature: float | None = None,
    dtype: str = "fp32",
    **vllm: Any,
) -> RolloutEngine:
    settings = EngineSettings(
        model=str(model),
        vllm=Vllm(**({"cpu_kv_cache_gib": 0.25} | vllm)),
        columns=COLUMNS,
        trust_remote_code=False,
        dtype=dtype,
        max_model_len=640,
        top_p=1.0,
        name="engine-0",
        adapter=adapter,
        temperature=temperature,
    )
    return kind(settings)


class Trainer:
    """A minimal trainer: a Transformers model, one forward pass per response."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        self.tools = plugins.processor_of(str(model), COLUMNS)
        factory: Any = AutoModelForCausalLM if self.tools.resize_factor is None else AutoModelForImageTextToText
        self.net = factory.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").eval()
        keep_checkpoint_layout(self.net)

    def prompt(self, index: int, question: str, *, images: int = 0, tools: plugins.Processor | None = None) -> Prompt:
        """Make a prompt whose images depend only on `index`: the same index gives the same image hashes."""
        tools = tools or self.tools
        rng = np.random.default_rng(index)
        side = tools.resize_factor or 0
        sizes = [tools.target_size((side * (4 + i), side * 4)) for i in range(images)] if side else []
        media = tuple(
            InlineMedia(f"{index}.{i}", (w, h), rng.integers(0, 255, (h, w, 3), dtype=np.uint8))
            for i, (w, h) in enumerate(sizes)
        )
        text = tools.render(question, num_images=len(media), columns=COLUMNS)
        tokens, request = tools.encode(text, sizes)
        return Prompt(index, f"test:{index}", text, tokens, request, label=None, media=media)

    def prompts(self) -> list[Prompt]:
        return [self.prompt(i, "how many dots?", images=n) for i, n in enumerate((1, 0, 3))]

    def logprobs(self, segment: Segment) -> Floats:
        """Compute log-probs under the distribution that the response was sampled from."""
        logits = self._logits(segment)
        logits[:, list(self.tools.banned_tokens)] -= 100.0
        return _sampled_logprobs(logits / TEMPERATURE, segment)

    def plain_logprobs(self, segment: Segment) -> Floats:
        """Compute log-probs at temperature 1, without banned tokens."""
        return _sampled_logprobs(self._logits(segment), segment)

    @torch.no_grad()
    def _logits(self, segment: Segment) -> torch.Tensor:
        inputs: dict[str, Any] = {"input_ids": torch.from_numpy(segment.tokens)[None]}
        if segment.media:
            inputs |= self.tools.pixel_inputs(segment.media)
            inputs["mm_token_type_ids"] = torch.from_numpy(self.tools.token_types(segment.tokens))[None]
        return self.net(**inputs).logits[0]

    def difference(self, groups: Sequence[Group]) -> float:
        """Return the largest difference between the log-probs of engine and trainer."""
        segments = [segment for group in groups for segment in group.segments]
        return max(float(np.abs(self.logprobs(segment) - segment.logprobs).max()) for segment in segments)

    @torch.no_grad()
    def change(self, part: str, *, by: float = 0.1) -> bool:
        """Add noise to `vision`, `projector`, `language` layers, `embeddings` or `everything`. Return whether any
        parameter matched.
        """
        has_matched = False
        for name, parameter in self.net.named_parameters():
            is_embedding = "embed_tokens" in name or "lm_head" in name
            group = "embeddings" if is_embedding else self.tools.parameter_group(name)
            if part in (group, "everything"):
                has_matched = True
                parameter.add_(torch.randn_like(parameter) * by * max(float(parameter.std()), 0.01))
        return has_matched

    def weights(self) -> list[tuple[str, torch.Tensor]]:
        """The parameters under the names and in the layout of the checkpoint."""
        weights = dict(self.net.named_parameters())
        has_experts = any(".experts." in name for name in weights)
        return list((revert_weight_conversion(self.net, weights) if has_experts else weights).items())

    @torch.no_grad()
    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Set the weights to these, which have the names of `weights`."""
        for name, parameter in self.net.named_parameters():
            parameter.copy_(weights[name])


def _sampled_logprobs(logits: torch.Tensor, segment: Segment) -> Floats:
    logprobs = torch.log_softmax(logits[:-1], dim=-1)
    sampled_logprobs = logprobs.gather(1, torch.from_numpy(segment.tokens)[1:, None])[:, 0]
    return np.concatenate([[0.0], sampled_logprobs.numpy()]) * segment.sampled


@dataclasses.dataclass
class Pair:
    """An engine and a trainer of the same model, with the engine's event loop."""

    engine: RolloutEngine
    trainer: Trainer
    runner: asyncio.Runner

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling = SAMPLING) -> list[Group]:
        async def ask() -> list[Group]:
            return await asyncio.gather(*(self.engine.generate(prompt, sampling) for prompt in prompts))

        return self.run(ask())

    def difference(self) -> float:
        return self.trainer.difference(self.generate(self.trainer.prompts()))

    def plant(self, fault: str) -> None:
        """Switch the worker to this class of `weight_faults` for the next updates."""
        self.run(self.engine._call("vlmrl_plant", fault))

    def sync(self, *, version: int | None = None, vision_changed: bool = True, skip: str = "") -> str:
        """Send all weights in three buckets, except those whose name ends in `skip`."""
        weights = [(name, w) for name, w in self.trainer.weights() if not (skip and name.endswith(skip))]
        return self.run(sync(self.engine, weights, version or self.engine.version + 1, vision_changed=vision_changed))


@contextmanager
def two_workers(model: Path, **vllm: int) -> Iterator[Pair]:
    """An engine of two workers, whose log-probs equal the trainer's after each of two syncs, and its trainer."""
    with asyncio.Runner() as runner:
        pair = Pair(rollout_engine(model, kind=PlantableEngine, **vllm), Trainer(model), runner)
        pair.run(pair.engine.start())
        try:
            for _ in range(2):
                pair.trainer.change("everything")
                pair.sync()
                assert pair.difference() < EXACT
            reports = pair.run(pair.engine.readback())
            assert [(report["wrong"], report["unread"]) for report in reports] == [([], [])] * 2
            yield pair
        finally:
            pair.run(pair.engine.shutdown())


async def sync(engine: RolloutEngine, weights: Any, version: int, *, vision_changed: bool = True) -> str:
    """Send all weights in three buckets; all layers of the engine are read back."""
    await engine.begin_update(version, readback={"seed": version, "is_full": True})
    third = -(-len(weights) // 3)
    for start in range(0, len(weights), third):
        await engine.load_bucket(pack_bucket(weights[start : start + third]))
    return await engine.finish_update(vision_changed=vision_changed)


class Engines:
    """At most one running engine: starting another stops the previous one."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._key: tuple[str, bool] | None = None
        self._pair: Pair | None = None

    def folder(self, family: Any, tied: bool = False) -> Path:
        out = self._root / f"{family}-{tied}"
        return out if out.exists() else tiny.build(family, out, tied=tied, size="micro")

    def pair(self, family: str, tied: bool = False) -> Pair:
        if self._pair is None or self._key != (family, tied):
            self.stop()
            torch.manual_seed(0)
            model = self.folder(family, tied)
            pair = Pair(rollout_engine(model, kind=PlantableEngine), Trainer(model), asyncio.Runner())
            pair.run(pair.engine.start())
            self._key, self._pair = (family, tied), pair
        return self._pair

    def stop(self) -> None:
        pair, self._pair = self._pair, None
        if pair is not None:
            pair.run(pair.engine.shutdown())
            pair.runner.close()
            assert not engine_processes(psutil.Process()), "an engine that was shut down left a process"
