"""Forward passes of packs: cached image features, and log-probs or values per token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
from vlmrl.models.divergence import TeacherRows
from vlmrl.models.experts import use_experts
from vlmrl.models.inputs import model_inputs, states_at
from vlmrl.models.liger import apply_liger
from vlmrl.models.load import load_model
from vlmrl.models.quantize import FourBit, four_bit
from vlmrl.models.scorer import Backbone, Scorer, ScorerOutput
from vlmrl.models.value_head import ValueOutput, value_net
from vlmrl.models.vision_cache import VisionCache
from vlmrl.observe.metrics import Metric, Sum
from vlmrl.plugins import Processor, processor_of
from vlmrl.types import Bools, Floats, Sample


def read_model(actor: Model, *, ds: Ds, columns: Columns, where: torch.device) -> tuple[PreTrainedModel, Processor]:
    """Load `actor.model_name_or_path` and its processor. Raises ConfigError when there is no such model."""
    processor = processor_of(actor.model_name_or_path, columns, trust_remote_code=actor.trust_remote_code)
    net = load_model(
        actor.model_name_or_path, trust_remote_code=actor.trust_remote_code, **_load_options(ds, processor, where)
    )
    use_experts(net, ds.experts_implementation)
    if ds.use_liger_kernel:
        apply_liger(net, where)
    return net, processor


def read_value_model(
    model: Model, *, ds: Ds, columns: Columns, where: torch.device, head_seed: int | None, flag: str
) -> tuple[PreTrainedModel, Processor]:
    """Load a model with a value head in place of its output layer; see `models.value_head.value_net`.

    `flag` is the setting that names the model, for messages.
    """
    processor = processor_of(model.model_name_or_path, columns, trust_remote_code=model.trust_remote_code, flag=flag)
    net = value_net(
        model.model_name_or_path,
        trust_remote_code=model.trust_remote_code,
        head_seed=head_seed,
        flag=flag,
        **_load_options(ds, processor, where),
    )
    use_experts(net, ds.experts_implementation)
    if ds.use_liger_kernel:
        apply_liger(net.base_model, where)
    return net, processor


class _LoadOptions(TypedDict):
    dtype: torch.dtype
    attn_implementation: str | dict[str, str] | None
    four_bit: FourBit | None


def _load_options(ds: Ds, processor: Processor, where: torch.device) -> _LoadOptions:
    return {
        "dtype": DTYPES[ds.param_dtype],
        "attn_implementation": implementation(ds.attn_implementation, where),
        "four_bit": four_bit(ds, processor),
    }


RowsAndMetrics = tuple[list[tuple[int, Floats]], dict[str, Metric]]
"""(id, [T]) of each sample with a non-negative id, and metrics of the passes."""


class ForwardOptions(TypedDict):
    """Keyword arguments of `ModelForward`."""

    device: torch.device
    cache_bytes: int
    call: NotRequired[Callable[..., Any]]
    ranks_in_lockstep: NotRequired[bool]


class ModelForward:
    """Forward passes of packs through a model with any head per token, with cached image features."""

    def __init__(
        self,
        module: Backbone,
        processor: Processor,
        *,
        device: torch.device,
        cache_bytes: int,
        call: Callable[..., Any] | None = None,
        ranks_in_lockstep: bool = False,
    ) -> None:
        """Wrap `module` and the processor of its model.

        Args:
            cache_bytes: limit of the cached image features. They are cached when neither tower nor projector trains.
            call: the engine around `module`, which is called instead of it.
            ranks_in_lockstep: either all ranks run the tower or none does. Under ZeRO-3 anything else would hang.
        """
        self._call = module if call is None else call
        self._module = module
        self._processor = processor
        self._device = device
        self._cache_bytes = cache_bytes
        self._ranks_in_lockstep = ranks_in_lockstep
        self.tower = {n: p for n, p in module.net.named_parameters() if processor.parameter_group(n) != "language"}
        """Parameters of vision tower and projector, which image features depend on."""
        trains = any(p.requires_grad for p in self.tower.values())
        self._cache: VisionCache | None = None
        if self.tower and not trains and cache_bytes:
            self.start_cache()
        # For a parameter without a gradient in a pass, DeepSpeed keeps the last step's (ZeRO-3) or drops the sum so far
        # (offload). So while a tower trains, every pass with a gradient has an image.
        self._filler = processor.dummy_sample() if trains else None
        self._tower_calls = self._cache_hits = 0
        self.replays_experts = False
        """Passes take the experts that the engine chose, where samples have them."""

    def run(self, pack: Pack, **options: Any) -> Any:
        """Run the module on a pack, with `options`. Its [B, T] outputs may have more rows and columns than the pack."""
        pack = self.completed(pack)
        features = None if self._cache is None else self._cache.get(pack.media, device=self._device)
        cached = self._agree_on_cached(pack, set(features or ()))
        replays = self.replays_experts
        inputs = model_inputs(self._module.net, self._processor, pack, cached=cached, replays_experts=replays)
        self._tower_calls += len(inputs.get("images", ()))
        self._cache_hits += len(cached)
        inputs = {name: self._to_device(value) for name, value in inputs.items()}
        output = self._call(inputs, features=features, **options)
        if self._cache is not None and features is not None:
            self._cache.put({name: features[name] for name in pack.media if name not in cached})
        return output

    def completed(self, pack: Pack) -> Pack:
        """Return the pack as `run` computes it: with a filler, if this pass needs an image and the pack has none."""
        needs_image = self._filler is not None and torch.is_grad_enabled() and not pack.media
        return _append(pack, self._filler) if needs_image and self._filler is not None else pack

    def run_packs(
        self, packs: Sequence[Pack], compute: Callable[[Pack], Tensor], *, gradient: bool = False
    ) -> list[tuple[int, Floats]]:
        """Call `compute`, which returns [B, T], on each pack, with dropout off; returns (id, [T]) of each sample with a
        non-negative id.

        With `gradient` the passes are those of an update, but their graph is discarded: for checks of what an update
        sees.
        """
        was_training = self._module.training
        self._module.train(gradient)
        for module in self._module.modules():
            if isinstance(module, torch.nn.Dropout):
                module.eval()
        by_id: list[tuple[int, Floats]] = []
        try:
            with torch.set_grad_enabled(gradient):
                for pack in packs:
                    rows = collect(pack, compute(pack).detach().float().cpu())
                    by_id += [(i, row.astype(np.float32)) for i, row in zip(pack.ids, rows, strict=True) if i >= 0]
        finally:
            self._module.train(was_training)
        return by_id

    @property
    def caches_features(self) -> bool:
        """Whether image features are cached."""
        return self._cache is not None

    def start_cache(self) -> None:
        """Start an empty cache for this model only."""
        self._cache = VisionCache(list(self.tower.values()), max_bytes=self._cache_bytes)

    @contextmanager
    def without_cache(self) -> Iterator[None]:
        """Run every image through the tower within the context, and cache nothing."""
        cache, self._cache = self._cache, None
        try:
            yield
        finally:
            self._cache = cache

    @contextmanager
    def without_replay(self) -> Iterator[None]:
        """Let the routers choose the experts within the context."""
        replays, self.replays_experts = self.replays_experts, False
        try:
            yield
        finally:
            self.replays_experts = replays

    def take_replay_counts(self) -> Tensor:
        """[2] replayed choices of the last pass; see `Backbone.take_replay_counts`."""
        return self._module.take_replay_counts()

    def share_cache(self, other: ModelForward) -> None:
        """Start an empty cache together with `other`, whose tower must have the same weights."""
        both = [*self.tower.values(), *other.tower.values()]
        self._cache = other._cache = VisionCache(both, max_bytes=self._cache_bytes)

    def shares_features(self, other: ModelForward) -> bool:
        """Whether the cache is the one of `other`."""
        return self._cache is not None and self._cache is other._cache

    def take_counts(self) -> dict[str, Metric]:
        """Images that went through the vision tower, and cache hits, since the last call."""
        calls, self._tower_calls = self._tower_calls, 0
        hits, self._cache_hits = self._cache_hits, 0
        return {"vision/tower_calls": Sum(calls), "vision/cache_hits": Sum(hits)}

    def clear_cache(self) -> None:
        """Drop cached features, after the weights were replaced."""
        if self._cache is not None:
            self._cache.clear()

    def _agree_on_cached(self, pack: Pack, cached: set[str]) -> set[str]:
        """Return the cached images that a pass may use: in lockstep, either every rank runs the tower or none does."""
        if self._cache is None or not self._ranks_in_lockstep:
            return cached
        num_new = torch.tensor(len(pack.media.keys() - cached), device=self._device)
        torch.distributed.all_reduce(num_new, op=torch.distributed.ReduceOp.MAX)
        if num_new and cached == pack.media.keys():
            cached.discard(min(cached, key=lambda name: self._processor.num_tokens(pack.media[name].size)))
        return cached

    def _to_device(self, value: Any) -> Any:
        return value.to(self._device, non_blocking=True) if isinstance(value, Tensor) else value


class LogprobForward(ModelForward):
    """Forward passes that return log-probs, under a temperature and with or without the banned tokens."""

    def __init__(
        self,
        scorer: Scorer,
        processor: Processor,
        *,
        temperature: float,
        bans: bool,
        more_bans: Iterable[int] = (),
        **options: Unpack[ForwardOptions],
    ) -> None:
        """`bans`: the tokens are banned that the engines never sample. `more_bans` are banned in any case."""
        super().__init__(scorer, processor, **options)
        self._temperature = temperature
        self._banned = (*(processor.banned_tokens if bans else ()), *more_bans)

    def __call__(self, pack: Pack, *, teacher: TeacherRows | None = None) -> ScorerOutput:
        """Compute log-probs, entropies, and with a teacher divergences, [B, T] each, in the layout of the pack."""
        rows, columns = pack.shape
        options = {} if teacher is None else {"teacher": teacher}
        output: ScorerOutput = self.run(pack, temperature=self._temperature, banned=self._banned, **options)
        divergence = None if output.divergence is None else output.divergence[:rows, :columns]
        return ScorerOutput(output.logprobs[:rows, :columns], output.entropy[:rows, :columns], divergence)

    def logprobs(self, packs: Sequence[Pack], *, gradient: bool = False) -> list[tuple[int, Floats]]:
        """Return log-probs as (id, [T]); see `run_packs`."""
        return self.run_packs(packs, lambda pack: self(pack).logprobs, gradient=gradient)


class ValueForward(ModelForward):
    """Forward passes that return values."""

    def __call__(self, pack: Pack) -> Tensor:
        """Compute the value of the state before each sampled token, [B, T] in the layout of the pack; 0 elsewhere."""
        rows, columns = pack.shape
        output: ValueOutput = self.run(pack)
        return output.values[:rows, :columns]

    def values(self, packs: Sequence[Pack]) -> list[tuple[int, Floats]]:
        """Values as (id, [T]); see `run_packs`."""
        return self.run_packs(packs, self)


class StateForward(ModelForward):
    """Forward passes that return values of the states at marked tokens."""

    def __call__(self, pack: Pack, marks: Sequence[Bools]) -> Tensor:
        """Compute the values of the tokens that `marks`, [T] per sample, marks: [B, T] in the layout of the pack; 0
        elsewhere."""
        rows, columns = pack.shape
        whole = self.completed(pack)
        none = [np.zeros(len(sample.tokens), dtype=np.bool_) for sample in whole.samples[len(marks) :]]
        positions = states_at(whole, [*marks, *none])
        output: ValueOutput = self.run(whole, positions={n: self._to_device(t) for n, t in positions.items()})
        return output.values[:rows, :columns]

    def values_at(self, packs: Sequence[Pack], marks: Sequence[Sequence[Bools]]) -> list[tuple[int, Floats]]:
        """Values at the tokens that `marks`, [T] per sample and pack, marks, as (id, [T]); see `run_packs`."""
        marks_of = {id(pack): of_pack for pack, of_pack in zip(packs, marks, strict=True)}
        return self.run_packs(packs, lambda pack: self(pack, marks_of[id(pack)]))

    def scores(self, packs: Sequence[Pack]) -> list[tuple[int, float]]:
        """Scores: (id, value of the state at the last token) for each sample with a non-negative id."""
        rows = self.values_at(packs, [[last_token(sample) for sample in pack.samples] for pack in packs])
        return [(i, float(row[-1])) for i, row in rows]


def last_token(sample: Sample) -> Bools:
    """[T]: True at the last token."""
    return np.arange(len(sample.tokens)) == len(sample.tokens) - 1


def _append(pack: Pack, filler: Sample) -> Pack:
    """Append a sample to the pack: in a new row if each row is one sample, else in the last row."""
    branch = Branch((len(pack.samples),), 0)
    rows = (*pack.rows, (branch,)) if pack.is_one_per_row else (*pack.rows[:-1], (*pack.rows[-1], branch))
    return Pack((*pack.samples, filler), rows, (*pack.ids, FILLER))
