"""Plan of a model's adapter before any weight is read: its layers, and whether vLLM can apply it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

from vlmrl.config.actor import Model
from vlmrl.config.lora import MAX_RANK, Lora
from vlmrl.errors import ConfigError
from vlmrl.models.weight_buckets import fingerprint
from vlmrl.plugins import ParameterGroup, Processor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, MAX_RANK)
"""vLLM's choices of `max_lora_rank`."""

PREFIX = "base_model.model."
"""Prefix of all tensor names in PEFT's files."""
WORDS = ("all-linear", "vision", "all")
"""Keywords of `ds.lora.target_modules`; other values are names of layers."""
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
    """The parts of the model that the targets belong to."""
    has_experts: bool = False
    """The model is a mixture of experts."""

    @property
    def scaling(self) -> float:
        """Factor of B @ A."""
        return scaling(self.rank, self.alpha, is_rank_stabilized=self.is_rank_stabilized)

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The last components of the targets' names, by which vLLM selects the layers."""
        return tuple(sorted({name.rpartition(".")[2] for name in self.targets}))

    @property
    def fits_engine(self) -> bool:
        """Whether vLLM applies the adapter exactly, so that only the adapter is synced; otherwise merged weights
        are.

        vLLM fuses the input projections of linear attention, and takes an adapter of the gates `in_proj_z` only with
        one of `in_proj_qkv`. It has no CPU kernel for experts with an adapter. A matrix that is gate and up projection
        (GLM-4.1V) is two to vLLM.
        """
        targets = set(self.targets)
        has_lone_gates = any(
            name.endswith(".in_proj_z") and f"{name.removesuffix('z')}qkv" not in targets for name in targets
        )
        is_fused = any(name.endswith(".gate_up_proj") for name in targets)
        is_whole = not (self.has_magnitude or self.has_experts or has_lone_gates or is_fused)
        return self.groups == {"language"} and is_whole

    @property
    def engine_rank(self) -> int:
        """vLLM's `max_lora_rank` for the adapter, if it `fits_engine`."""
        return next(rank for rank in _ENGINE_RANKS if rank >= self.rank)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of the matrices in PEFT's files: alternately A [rank, in] and B [out, rank]."""
        halves = ("lora_A", "lora_B")
        return tuple(f"{PREFIX}{target}.{half}.weight" for target in self.targets for half in halves)


def scaling(rank: int, alpha: float, *, is_rank_stabilized: bool) -> float:
    """Compute the factor of B @ A (arXiv:2106.09685; arXiv:2312.03732 if rank-stabilized)."""
    return alpha / (math.sqrt(rank) if is_rank_stabilized else rank)


def adapter_fingerprint(digests: Mapping[str, str], scaling: float) -> str:
    """Combine the digests of an adapter's matrices with its scaling.

    Args:
        digests: name -> `digest(name, tensor)`, under the names of `AdapterPlan.tensor_names`.
    """
    return fingerprint({**digests, "scaling": f"{scaling:.9g}"})


def plan_adapter(model: Model, lora: Lora, processor: Processor) -> AdapterPlan | None:
    """Plan the adapter of the settings; None when the model itself trains. Reads no weights.

    `processor` is the model's: it maps layers to parts of the model.

    Raises ConfigError for targets that the model lacks, or that belong to a frozen part.
    """
    if lora.rank == 0:
        return None
    from vlmrl.models.experts import routers
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
        has_experts=bool(routers(net)),
    )


def check_engine_dtype(adapter: AdapterPlan | None, dtype: str, *, has_gpu: bool) -> None:
    """Raise ConfigError when an engine would apply the adapter in fp32 on a GPU.

    vLLM's kernels for adapters take bf16 and fp16 only, and the engine would end with a bare assertion. `dtype` is
    `ds.param_dtype`.
    """
    if has_gpu and dtype == "fp32" and adapter is not None and adapter.fits_engine:
        raise ConfigError(
            "ds.param_dtype fp32 with ds.lora: on a GPU vLLM applies adapters in bf16 only: set ds.param_dtype bf16"
        )


def vision_trains(model: Model, adapter: AdapterPlan | None) -> bool:
    """Whether updates change image features. With an adapter, only the adapter trains."""
    if adapter is not None:
        return adapter.groups != {"language"}
    return not (model.freeze_visual_encoder and model.freeze_projector)


def layers(net: PreTrainedModel, processor: Processor) -> dict[str, ParameterGroup]:
    """Return the linear layers of a model that can have an adapter, in the model's order: all but the output layer."""
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
    """Select the layers of `ds.lora.target_modules`, in the order of the model.

    A name selects all layers whose names end with it: those of the language model, or, if there are none, those of
    tower and projector.

    Raises ConfigError for a keyword or name that selects no layer, or a layer of a frozen part.
    """
    chosen: set[str] = set()
    for word in wanted:
        selected = _select(word, layers, frozen)
        if not selected:
            raise ConfigError(_no_match(word, layers))
        in_frozen = [name for name in selected if layers[name] in frozen]
        if in_frozen:
            part = layers[in_frozen[0]]
            raise ConfigError(
                f"ds.lora.target_modules: {word} selects {in_frozen[0]} of the frozen {_NOUN[part]}: "
                f"leave it out, or turn {_FLAG[part]} off"
            )
        chosen |= set(selected)
    if not chosen:
        raise ConfigError("ds.lora.target_modules is empty: name layers, or leave it at all-linear")
    return {name: group for name, group in layers.items() if name in chosen}


def _select(word: str, layers: Mapping[str, ParameterGroup], frozen: Collection[ParameterGroup]) -> list[str]:
    if word == "all-linear":
        return [name for name, group in layers.items() if group == "language"]
    if word == "vision":
        return [name for name, group in layers.items() if group != "language"]
    if word == "all":
        return [name for name, group in layers.items() if group not in frozen]
    named = [name for name in layers if f".{name}".endswith(f".{word}")]
    return [name for name in named if layers[name] == "language"] or named


def _no_match(word: str, layers: Mapping[str, ParameterGroup]) -> str:
    if word == "vision":
        return "ds.lora.target_modules: vision, but the model has no vision tower: leave it at all-linear"
    ends = sorted({name.rpartition(".")[2] for name in layers})
    likely = get_close_matches(word, [*ends, *WORDS], n=1)
    hint = f"did you mean {likely[0]}?" if likely else f"there are {', '.join(WORDS)}, or {' '.join(ends)}"
    return f"ds.lora.target_modules: the model has no linear layer {word} that can have an adapter: {hint}"
