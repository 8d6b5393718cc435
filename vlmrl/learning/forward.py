"""One pack through one model: images that it need not look at again, and what it says of each token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NotRequired, TypedDict, Unpack

import numpy as np
import torch
import torch.distributed
from torch import Tensor
from transformers import PreTrainedModel

from vlmrl.config.actor import Model
from vlmrl.config.data import Columns
from vlmrl.config.ds import Ds
from vlmrl.data.packing import FILLER, Branch, Pack, collect
from vlmrl.learning.deepspeed_engine import DTYPES
from vlmrl.models.attention import implementation
from vlmrl.models.inputs import model_inputs
from vlmrl.models.liger import apply_liger
from vlmrl.models.load import load_model
from vlmrl.models.quantize import FourBit, four_bit
from vlmrl.models.scorer import Scorer, ScorerOutput
from vlmrl.models.value_head import Valuer, ValuerOutput, value_net
from vlmrl.models.vision_cache import VisionCache
from vlmrl.observe.metrics import Metric, Sum
from vlmrl.plugins import Processor, processor_of
from vlmrl.types import Floats, Sample


def read_model(actor: Model, *, ds: Ds, columns: Columns, where: torch.device) -> tuple[PreTrainedModel, Processor]:
    """The model that the settings name and its processor. Raises ConfigError when there is no such model."""
    reader = processor_of(actor.model_name_or_path, columns, trust_remote_code=actor.trust_remote_code)
    net = load_model(
        actor.model_name_or_path, trust_remote_code=actor.trust_remote_code, **_as_asked(ds, reader, where)
    )
    if ds.use_liger_kernel:
        apply_liger(net, where)
    return net, reader


def read_value_model(
    model: Model, *, ds: Ds, columns: Columns, where: torch.device, head_seed: int | None, flag: str
) -> tuple[PreTrainedModel, Processor]:
    """The same with a value head in the place of its output layer; see `models.value_head.value_net`.

    `flag` is the setting that named the model, for messages.
    """
    reader = processor_of(model.model_name_or_path, columns, trust_remote_code=model.trust_remote_code, flag=flag)
    net = value_net(
        model.model_name_or_path,
        trust_remote_code=model.trust_remote_code,
        head_seed=head_seed,
        flag=flag,
        **_as_asked(ds, reader, where),
    )
    if ds.use_liger_kernel:
        apply_liger(net.base_model, where)
    return net, reader


class _Asked(TypedDict):
    dtype: torch.dtype
    attn_implementation: str | dict[str, str] | None
    four_bit: FourBit | None


def _as_asked(ds: Ds, reader: Processor, where: torch.device) -> _Asked:
    return {
        "dtype": DTYPES[ds.param_dtype],
        "attn_implementation": implementation(ds.attn_implementation, where),
        "four_bit": four_bit(ds, reader),
    }


Scored = tuple[list[tuple[int, Floats]], dict[str, Metric]]
"""(id, [T]) of each sample that somebody asked about, and what it took."""


class Passing(TypedDict):
    """What `Passes` takes by name."""

    device: torch.device
    cache_bytes: int
    call: NotRequired[Callable[..., Any]]
    ranks_move_together: NotRequired[bool]


class Passes:
    """A model around which somebody has put a head, and its way through packs, whatever the head says of a token."""

    def __init__(
        self,
        module: Scorer | Valuer,
        processor: Processor,
        *,
        device: torch.device,
        cache_bytes: int,
        call: Callable[..., Any] | None = None,
        ranks_move_together: bool = False,
    ) -> None:
        """`call` stands in for `module`: the engine around it, which must see every forward pass.

        Up to `cache_bytes` of what the vision tower makes of images is kept when neither it nor the projector trains.
        With `ranks_move_together` no rank may skip the tower while another runs it: ZeRO-3 would wait for ever.
        """
        self._call = module if call is None else call
        self._module = module
        self._processor = processor
        self._device = device
        self._cache_bytes = cache_bytes
        self._ranks_move_together = ranks_move_together
        self.tower = {n: p for n, p in module.net.named_parameters() if processor.parameter_group(n) != "language"}
        """The parameters of vision tower and projector: what the features of an image come from."""
        trains = any(p.requires_grad for p in self.tower.values())
        self._cache: VisionCache | None = None
        if self.tower and not trains and cache_bytes:
            self.keep_features()
        # DeepSpeed keeps the last step's gradient of a parameter that sits a pass out (ZeRO-3), or drops the one it has
        # (offload). So while a tower trains, no pass goes without an image.
        self._filler = processor.dummy_sample() if trains else None
        self._tower_calls = self._cache_hits = 0

    def run(self, pack: Pack, **how: Any) -> Any:
        """What the module says of a pack, `how` passed on to it: its [B, T] tensors may be longer than the pack's."""
        if self._filler is not None and torch.is_grad_enabled() and not pack.media:
            pack = _with(pack, self._filler)
        features = None if self._cache is None else self._cache.take(pack.media, device=self._device)
        seen = self._agreed(pack, set(features or ()))
        inputs = model_inputs(self._module.net, self._processor, pack, seen=seen)
        self._tower_calls += len(inputs.get("images", ()))
        self._cache_hits += len(seen)
        inputs = {name: self._moved(value) for name, value in inputs.items()}
        output = self._call(inputs, features=features, **how)
        if self._cache is not None and features is not None:
            self._cache.put({name: features[name] for name in pack.media if name not in seen})
        return output

    def each(
        self, packs: Sequence[Pack], say: Callable[[Pack], Tensor], *, gradient: bool = False
    ) -> list[tuple[int, Floats]]:
        """(id, [T]) of each sample that somebody asked about: what `say` says of its pack, [B, T], with dropout off.

        With `gradient` the passes are those of an update, recorded and thrown away: for who wants to know whether an
        update sees what it should.
        """
        was_training = self._module.training
        self._module.train(gradient)
        for module in self._module.modules():
            if isinstance(module, torch.nn.Dropout):
                module.eval()
        found: list[tuple[int, Floats]] = []
        try:
            with torch.set_grad_enabled(gradient):
                for pack in packs:
                    rows = collect(pack, say(pack).detach().float().cpu())
                    found += [(i, row.astype(np.float32)) for i, row in zip(pack.ids, rows, strict=True) if i >= 0]
        finally:
            self._module.train(was_training)
        return found

    @property
    def keeps_features(self) -> bool:
        """What the tower makes of an image is kept."""
        return self._cache is not None

    def keep_features(self) -> None:
        """Begin to keep them anew, for this model alone."""
        self._cache = VisionCache(list(self.tower.values()), max_bytes=self._cache_bytes)

    @contextmanager
    def looking_anew(self) -> Iterator[None]:
        """Within the context every image goes through the tower, and nothing of it is kept."""
        kept, self._cache = self._cache, None
        try:
            yield
        finally:
            self._cache = kept

    def share_features(self, other: Passes) -> None:
        """Begin to keep them anew, together with `other`, whose tower must have the same weights."""
        both = [*self.tower.values(), *other.tower.values()]
        self._cache = other._cache = VisionCache(both, max_bytes=self._cache_bytes)

    def shares_features(self, other: Passes) -> bool:
        """They are kept together with `other`."""
        return self._cache is not None and self._cache is other._cache

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
        return value.to(self._device, non_blocking=True) if isinstance(value, Tensor) else value


class Forward(Passes):
    """A model with all that its log-probs depend on: temperature, banned tokens, processor."""

    def __init__(
        self, scorer: Scorer, processor: Processor, *, temperature: float, bans: bool, **how: Unpack[Passing]
    ) -> None:
        super().__init__(scorer, processor, **how)
        self._temperature = temperature
        self._banned = tuple(processor.banned_tokens) if bans else ()

    def __call__(self, pack: Pack) -> ScorerOutput:
        """Log-probs and entropies, [B, T] each, laid out like the pack."""
        rows, columns = pack.shape
        output: ScorerOutput = self.run(pack, temperature=self._temperature, banned=self._banned)
        return ScorerOutput(output.logprobs[:rows, :columns], output.entropy[:rows, :columns])

    def logprobs(self, packs: Sequence[Pack], *, gradient: bool = False) -> list[tuple[int, Floats]]:
        """(id, [T]) of each sample that somebody asked about; see `each`."""
        return self.each(packs, lambda pack: self(pack).logprobs, gradient=gradient)


class ValueForward(Passes):
    """A model with a head for values."""

    def __call__(self, pack: Pack) -> Tensor:
        """[B, T] the value of the state before each sampled token, laid out like the pack; 0 elsewhere."""
        rows, columns = pack.shape
        output: ValuerOutput = self.run(pack)
        return output.values[:rows, :columns]

    def values(self, packs: Sequence[Pack]) -> list[tuple[int, Floats]]:
        """(id, [T]) of each sample that somebody asked about."""
        return self.each(packs, self)


def _with(pack: Pack, filler: Sample) -> Pack:
    """The pack with one more sample at its end: in a row of its own where every sample has one."""
    branch = Branch((len(pack.samples),), 0)
    rows = (*pack.rows, (branch,)) if pack.is_one_per_row else (*pack.rows[:-1], (*pack.rows[-1], branch))
    return Pack((*pack.samples, filler), rows, (*pack.ids, FILLER))
