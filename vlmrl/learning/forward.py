"""One pack through one model: the log-probability and the entropy of each of its tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed
from transformers import PreTrainedModel

from vlmrl.config.actor import Model
from vlmrl.config.data import Columns
from vlmrl.config.ds import Ds
from vlmrl.data.packing import FILLER, Branch, Pack, collect
from vlmrl.learning.engine import DTYPES
from vlmrl.models.attention import implementation
from vlmrl.models.inputs import model_inputs
from vlmrl.models.liger import apply_liger
from vlmrl.models.load import load_model
from vlmrl.models.quantize import four_bit
from vlmrl.models.scorer import Scorer, ScorerOutput
from vlmrl.models.vision_cache import VisionCache
from vlmrl.observe.metrics import Metric, Sum
from vlmrl.plugins import Processor, processor_of
from vlmrl.types import Floats, Sample


def read_model(actor: Model, *, ds: Ds, columns: Columns, where: torch.device) -> tuple[PreTrainedModel, Processor]:
    """The model that the settings name and its processor. Raises ConfigError when there is no such model."""
    reader = processor_of(actor.model_name_or_path, columns, trust_remote_code=actor.trust_remote_code)
    net = load_model(
        actor.model_name_or_path,
        dtype=DTYPES[ds.param_dtype],
        attn_implementation=implementation(ds.attn_implementation, where),
        trust_remote_code=actor.trust_remote_code,
        four_bit=four_bit(ds, reader),
    )
    if ds.use_liger_kernel:
        apply_liger(net, where)
    return net, reader


Scored = tuple[list[tuple[int, Floats]], dict[str, Metric]]
"""(id, [T]) of each sample that somebody asked about, and what it took."""


class Forward:
    """A model with all that its log-probs depend on: temperature, banned tokens, processor."""

    def __init__(
        self,
        scorer: Scorer,
        processor: Processor,
        *,
        temperature: float,
        bans: bool,
        device: torch.device,
        cache_bytes: int,
        call: Callable[..., Any] | None = None,
        ranks_move_together: bool = False,
    ) -> None:
        """`call` stands in for `scorer`: the engine around it, which must see every forward pass.

        Up to `cache_bytes` of what the vision tower makes of images is kept when neither it nor the projector trains.
        With `ranks_move_together` no rank may skip the tower while another runs it: ZeRO-3 would wait for ever.
        """
        self._call = scorer if call is None else call
        self._scorer = scorer
        self._processor = processor
        self._temperature = temperature
        self._banned = tuple(processor.banned_tokens) if bans else ()
        self._device = device
        self._ranks_move_together = ranks_move_together
        tower = [p for name, p in scorer.net.named_parameters() if processor.parameter_group(name) != "language"]
        trains = any(p.requires_grad for p in tower)
        self._cache = VisionCache(tower, max_bytes=cache_bytes) if tower and not trains and cache_bytes else None
        # DeepSpeed keeps the last step's gradient of a parameter that sits a pass out (ZeRO-3), or drops the one it has
        # (offload). So while a tower trains, no pass goes without an image.
        self._filler = processor.dummy_sample() if trains else None
        self._tower_calls = self._cache_hits = 0

    def __call__(self, pack: Pack) -> ScorerOutput:
        """Log-probs and entropies, [B, T] each, laid out like the pack."""
        rows, columns = pack.shape
        if self._filler is not None and torch.is_grad_enabled() and not pack.media:
            pack = _with(pack, self._filler)
        features = None if self._cache is None else self._cache.take(pack.media, device=self._device)
        seen = self._agreed(pack, set(features or ()))
        inputs = model_inputs(self._scorer.net, self._processor, pack, seen=seen)
        self._tower_calls += len(inputs.get("images", ()))
        self._cache_hits += len(seen)
        inputs = {name: self._moved(value) for name, value in inputs.items()}
        output: ScorerOutput = self._call(inputs, temperature=self._temperature, banned=self._banned, features=features)
        if self._cache is not None and features is not None:
            self._cache.put({name: features[name] for name in pack.media if name not in seen})
        return ScorerOutput(output.logprobs[:rows, :columns], output.entropy[:rows, :columns])

    def logprobs(self, packs: Sequence[Pack], *, gradient: bool = False) -> list[tuple[int, Floats]]:
        """(id, [T]) of each sample that somebody asked about, with dropout off.

        With `gradient` the passes are those of an update, recorded and thrown away: for who wants to know whether an
        update sees what it should.
        """
        was_training = self._scorer.training
        self._scorer.train(gradient)
        for module in self._scorer.modules():
            if isinstance(module, torch.nn.Dropout):
                module.eval()
        found: list[tuple[int, Floats]] = []
        try:
            with torch.set_grad_enabled(gradient):
                for pack in packs:
                    rows = collect(pack, self(pack).logprobs.detach().float().cpu())
                    found += [(i, row.astype(np.float32)) for i, row in zip(pack.ids, rows, strict=True) if i >= 0]
        finally:
            self._scorer.train(was_training)
        return found

    def take_counts(self) -> dict[str, Metric]:
        """Images that went through the vision tower, and images that did not have to, since this was last asked."""
        calls, self._tower_calls = self._tower_calls, 0
        hits, self._cache_hits = self._cache_hits, 0
        return {"vision/tower_calls": Sum(calls), "vision/cache_hits": Sum(hits)}

    def forget(self) -> None:
        """The weights are others now."""
        if self._cache is not None:
            self._cache.clear()

    def _agreed(self, pack: Pack, seen: set[str]) -> set[str]:
        """The images of a pack that need not go through the tower: where ranks move together, all or not all on all."""
        if self._cache is None or not self._ranks_move_together:
            return seen
        news = torch.tensor(len(pack.media.keys() - seen), device=self._device)
        torch.distributed.all_reduce(news, op=torch.distributed.ReduceOp.MAX)
        if news and seen == pack.media.keys():
            seen.discard(min(seen, key=lambda name: math.prod(pack.media[name].size)))
        return seen

    def _moved(self, value: Any) -> Any:
        return value.to(self._device, non_blocking=True) if isinstance(value, torch.Tensor) else value


def _with(pack: Pack, filler: Sample) -> Pack:
    """The pack with one more sample at its end: in a row of its own where every sample has one."""
    branch = Branch((len(pack.samples),), 0)
    rows = (*pack.rows, (branch,)) if pack.is_one_per_row else (*pack.rows[:-1], (*pack.rows[-1], branch))
    return Pack((*pack.samples, filler), rows, (*pack.ids, FILLER))
