"""One pack through one model: the log-probability and the entropy of each of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from vlmrl.config.actor import Model
from vlmrl.config.data import Columns
from vlmrl.config.ds import Ds
from vlmrl.data.packing import FILLER, Pack, collect
from vlmrl.learning.engine import DTYPES
from vlmrl.models.attention import implementation
from vlmrl.models.inputs import model_inputs
from vlmrl.models.load import load_model
from vlmrl.models.scorer import Scorer, ScorerOutput
from vlmrl.plugins import Processor, processor
from vlmrl.types import Floats, Sample


def read_model(actor: Model, *, ds: Ds, columns: Columns, where: torch.device) -> tuple[PreTrainedModel, Processor]:
    """The model that the settings name and its processor. Raises ConfigError when there is no such model."""
    net = load_model(
        actor.model_name_or_path,
        dtype=DTYPES[ds.param_dtype],
        attn_implementation=implementation(ds.attn_implementation, where),
        trust_remote_code=actor.trust_remote_code,
    )
    reader = processor(
        actor.model_name_or_path,
        min_pixels=columns.min_pixels,
        max_pixels=columns.max_pixels,
        trust_remote_code=actor.trust_remote_code,
    )
    return net, reader


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
        call: Callable[..., Any] | None = None,
    ) -> None:
        """`call` stands in for `scorer`: the engine around it, which must see every forward pass."""
        self._call = scorer if call is None else call
        self._scorer = scorer
        self._processor = processor
        self._temperature = temperature
        self._banned = tuple(processor.banned_tokens) if bans else ()
        self._device = device
        # DeepSpeed keeps the last step's gradient of a parameter that sits a pass out (ZeRO-3), or drops the one it has
        # (offload). So while a tower trains, no pass goes without an image.
        tower = [p for name, p in scorer.net.named_parameters() if processor.parameter_group(name) != "language"]
        self._filler = processor.dummy_sample() if any(p.requires_grad for p in tower) else None
        self.tower_calls = 0
        """Images that went through the vision tower since somebody last set this to 0."""

    def __call__(self, pack: Pack) -> ScorerOutput:
        """Log-probs and entropies, [B, T] each, laid out like the pack."""
        rows, columns = pack.shape
        if self._filler is not None and torch.is_grad_enabled() and not pack.holds_media:
            pack = _with(pack, self._filler)
        inputs = model_inputs(self._scorer.net, self._processor, pack)
        grid = inputs.get("image_grid_thw")
        self.tower_calls += 0 if grid is None else len(grid)
        inputs = {name: self._moved(value) for name, value in inputs.items()}
        output: ScorerOutput = self._call(inputs, temperature=self._temperature, banned=self._banned)
        return ScorerOutput(output.logprobs[:rows, :columns], output.entropy[:rows, :columns])

    def logprobs(self, packs: Sequence[Pack]) -> list[tuple[int, Floats]]:
        """(id, [T]) of each sample that somebody asked about, without gradients and with dropout off."""
        was_training = self._scorer.training
        self._scorer.eval()
        found: list[tuple[int, Floats]] = []
        try:
            with torch.no_grad():
                for pack in packs:
                    rows = collect(pack, self(pack).logprobs.float().cpu())
                    found += [(i, row.astype(np.float32)) for i, row in zip(pack.ids, rows, strict=True) if i >= 0]
        finally:
            self._scorer.train(was_training)
        return found

    def _moved(self, value: Any) -> Any:
        return value.to(self._device, non_blocking=True) if isinstance(value, torch.Tensor) else value


def _with(pack: Pack, filler: Sample) -> Pack:
    """The pack with one more sample at its end: in a row of its own where every sample has one."""
    number = len(pack.samples)
    is_padded = all(len(row) == 1 for row in pack.rows)
    rows = (*pack.rows, (number,)) if is_padded else (*pack.rows[:-1], (*pack.rows[-1], number))
    return Pack((*pack.samples, filler), rows, (*pack.ids, FILLER))
