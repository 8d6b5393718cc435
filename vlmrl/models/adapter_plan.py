"""Which layers of a model get an adapter, and whether the engines can hold it: known before anything starts."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

from vlmrl.config.actor import Model
from vlmrl.config.lora import LARGEST_RANK, Lora
from vlmrl.errors import ConfigError
from vlmrl.models.weights import fingerprint
from vlmrl.plugins import ParameterGroup, Processor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, LARGEST_RANK)
"""vLLM's choices of `max_lora_rank`."""

PREFIX = "base_model.model."
"""What PEFT puts before the name of every tensor in a file."""
WORDS = ("all-linear", "vision", "all")
"""What `ds.lora.target_modules` understands beside the names of layers."""
_NOUN = {"vision": "vision tower", "projector": "projector"}
_FLAG = {"vision": "actor.freeze_visual_encoder", "projector": "actor.freeze_projector"}


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """One adapter on one model."""

    rank: int
    alpha: float
    dropout: float
    is_rank_stabilized: bool
    has_magnitude: bool
    """DoRA."""
    targets: tuple[str, ...]
    """Full names of the layers, as the model has them in memory: `model.language_model.layers.0.self_attn.q_proj`."""
    groups: frozenset[ParameterGroup]
    """The parts of the model that they belong to."""

    @property
    def scaling(self) -> float:
        """What B @ A is multiplied by."""
        return scaling(self.rank, self.alpha, is_rank_stabilized=self.is_rank_stabilized)

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The last parts of the targets' names: how vLLM is told which layers to prepare."""
        return tuple(sorted({name.rpartition(".")[2] for name in self.targets}))

    @property
    def fits_engine(self) -> bool:
        """vLLM applies it exactly, so that it travels by itself; otherwise merged weights do."""
        return self.groups == {"language"} and not self.has_magnitude

    @property
    def engine_rank(self) -> int:
        """vLLM's `max_lora_rank` for it. Only where it `fits_engine`."""
        return next(rank for rank in _ENGINE_RANKS if rank >= self.rank)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of its matrices in PEFT's files; [rank, in] and [out, rank] in turn."""
        halves = ("lora_A", "lora_B")
        return tuple(f"{PREFIX}{target}.{half}.weight" for target in self.targets for half in halves)


def scaling(rank: int, alpha: float, *, is_rank_stabilized: bool) -> float:
    """What B @ A is multiplied by (arXiv:2106.09685; arXiv:2312.03732 where the rank is stabilised)."""
    return alpha / (math.sqrt(rank) if is_rank_stabilized else rank)


def adapter_fingerprint(digests: Mapping[str, str], scaling: float) -> str:
    """One digest of an adapter: of its matrices, and of the number that B @ A is multiplied by.

    Args:
        digests: name -> `digest(name, tensor)`, under the names of `AdapterPlan.tensor_names`.
    """
    return fingerprint({**digests, "scaling": f"{scaling:.9g}"})


def plan_adapter(model: Model, lora: Lora, processor: Processor) -> AdapterPlan | None:
    """The adapter that the settings ask for, None when the model itself trains. Reads no weights.

    `processor` is the model's: it knows which part a layer belongs to.

    Raises ConfigError for targets that the model has not, or that lie in a part that is frozen.
    """
    if lora.rank == 0:
        return None
    from vlmrl.models.load import skeleton

    net = skeleton(model.model_name_or_path, trust_remote_code=model.trust_remote_code)
    freezes: dict[ParameterGroup, bool] = {
        "vision": model.freeze_visual_encoder,
        "projector": model.freeze_projector,
    }
    frozen = [group for group, is_frozen in freezes.items() if is_frozen]
    targets = choose_targets(lora.target_modules, layers(net, processor), frozen=frozen)
    return AdapterPlan(
        rank=lora.rank,
        alpha=lora.alpha,
        dropout=lora.dropout,
        is_rank_stabilized=lora.use_rslora,
        has_magnitude=lora.use_dora,
        targets=tuple(targets),
        groups=frozenset(targets.values()),
    )


def check_engine_dtype(adapter: AdapterPlan | None, dtype: str, *, has_gpu: bool) -> None:
    """Raise ConfigError where an engine would apply the adapter in fp32 on a GPU: vLLM's kernels for adapters take bf16
    and fp16 alone, and the engine would die of a bare assertion. `dtype` is `ds.param_dtype`.
    """
    if has_gpu and dtype == "fp32" and adapter is not None and adapter.fits_engine:
        raise ConfigError(
            "ds.param_dtype fp32 with ds.lora: on a GPU vLLM applies adapters in bf16 only: set ds.param_dtype bf16"
        )


def vision_trains(model: Model, adapter: AdapterPlan | None) -> bool:
    """Whether an update changes what the model sees in an image. Under adapters they alone train."""
    if adapter is not None:
        return adapter.groups != {"language"}
    return not (model.freeze_visual_encoder and model.freeze_projector)


def layers(net: PreTrainedModel, processor: Processor) -> dict[str, ParameterGroup]:
    """The linear layers of a model that can have an adapter, in its own order: all but the output layer."""
    from torch import nn

    head = net.get_output_embeddings()
    return {
        name: processor.parameter_group(f"{name}.weight")
        for name, module in net.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }


def choose_targets(
    wanted: Sequence[str], layers: Mapping[str, ParameterGroup], *, frozen: Collection[ParameterGroup]
) -> dict[str, ParameterGroup]:
    """Those of the layers that `ds.lora.target_modules` means, in the order of the model.

    A name stands for every layer whose own name ends with it: of the language model, and of tower and projector only
    where the language model has none.

    Raises ConfigError for a word or name that means no layer, or one of a frozen part.
    """
    chosen: set[str] = set()
    for word in wanted:
        found = _meant(word, layers, frozen)
        if not found:
            raise ConfigError(_nothing_meant(word, layers))
        shut = [name for name in found if layers[name] in frozen]
        if shut:
            part = layers[shut[0]]
            raise ConfigError(
                f"ds.lora.target_modules: {word} reaches into the frozen {_NOUN[part]} ({shut[0]}): "
                f"leave it out, or turn {_FLAG[part]} off"
            )
        chosen |= set(found)
    if not chosen:
        raise ConfigError("ds.lora.target_modules is empty: name layers, or leave it at all-linear")
    return {name: group for name, group in layers.items() if name in chosen}


def _meant(word: str, layers: Mapping[str, ParameterGroup], frozen: Collection[ParameterGroup]) -> list[str]:
    if word == "all-linear":
        return [name for name, group in layers.items() if group == "language"]
    if word == "vision":
        return [name for name, group in layers.items() if group != "language"]
    if word == "all":
        return [name for name, group in layers.items() if group not in frozen]
    named = [name for name in layers if f".{name}".endswith(f".{word}")]
    return [name for name in named if layers[name] == "language"] or named


def _nothing_meant(word: str, layers: Mapping[str, ParameterGroup]) -> str:
    if word == "vision":
        return "ds.lora.target_modules: vision, but the model has no vision tower: leave it at all-linear"
    ends = sorted({name.rpartition(".")[2] for name in layers})
    likely = get_close_matches(word, [*ends, *WORDS], n=1)
    hint = f"did you mean {likely[0]}?" if likely else f"there are {', '.join(WORDS)}, or {' '.join(ends)}"
    return f"ds.lora.target_modules: the model has no linear layer {word} that can have an adapter: {hint}"
