"""Operations and bytes of a model, per token, patch and pair of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vlmrl.errors import ConfigError
from vlmrl.models.kind import EXPERT_COUNTS

if TYPE_CHECKING:
    from vlmrl.models.sizes import Sizes
    from vlmrl.plugins import Processor

EXPERT_SETTINGS = (*EXPERT_COUNTS, "num_experts_per_tok")


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts of the feed-forward layers."""

    count: int
    per_token: int
    parameters: int
    """Of all experts in all layers."""

    def touched(self, tokens: float) -> float:
        """Share of the experts that at least one of these tokens uses, if the router is even."""
        return 1.0 - (1.0 - self.per_token / self.count) ** tokens


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """What a pass of the model computes, and what it reads."""

    parameters: float
    trained: float
    """Parameters that train, of the model or of its adapter."""
    dense: float
    """Parameters of the matrices that each token meets, without output layer and experts."""
    output: float
    """Parameters of the output layer, also if it is the embedding."""
    experts: Experts | None
    layers: int
    hidden: int
    attention: float
    """Channels of the queries of all layers."""
    keys_and_values: float
    """Numbers in the KV cache per token, of all layers."""
    between: float = 0.0
    """Numbers per token that a forward pass reads and writes between matrices, in norms, activations and residuals."""
    vocabulary: int = 0
    patch: float = 0.0
    """Parameters of the matrices of vision tower and projector that each patch meets."""
    patch_attention: float = 0.0
    """Channels of the tower's queries, of all layers with full attention."""
    bytes_per_parameter: int = 2
    adapts: bool = False
    """Only adapters train."""
    trains_vision: bool = True
    published: float = 0.0
    """Parameters that a weight sync sends."""

    @property
    def per_token(self) -> float:
        """Parameters that a token meets, without the output layer."""
        experts = self.experts
        return self.dense + (0.0 if experts is None else experts.parameters * experts.per_token / experts.count)

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.bytes_per_parameter

    @property
    def kv_bytes(self) -> float:
        """Bytes of the KV cache per token."""
        return self.keys_and_values * self.bytes_per_parameter


@dataclass(frozen=True, slots=True)
class Load:
    """What a pass, or all passes of a step, computes."""

    tokens: float
    pairs: float
    """Pairs of a token and one that it attends to."""
    outputs: float
    """Tokens with logits."""
    patches: float = 0.0
    patch_pairs: float = 0.0


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations of a forward pass, by part."""

    language: float
    vision: float


def forward_flops(costs: ModelCosts, load: Load) -> Flops:
    """Count a forward pass: two operations for each parameter that a token meets, and four per channel for each pair of
    attention (scores, and the sum of values)."""
    language = 2 * costs.per_token * load.tokens + 2 * costs.output * load.outputs + 4 * costs.attention * load.pairs
    return Flops(language, 2 * costs.patch * load.patches + 4 * costs.patch_attention * load.patch_pairs)


def train_flops(costs: ModelCosts, load: Load, *, checkpoints: bool) -> float:
    """Count forward and backward pass: twice the forward pass for the gradients of inputs and weights, once if only
    adapters train, and once more to recompute activations. A frozen tower has no backward pass."""
    flops = forward_flops(costs, load)
    backward = (1 if costs.adapts else 2) + checkpoints
    return flops.language * (1 + backward) + flops.vision * (1 + backward * costs.trains_vision)


def bytes_between(costs: ModelCosts, load: Load) -> float:
    """Count the bytes that a forward pass moves between matrices: in its layers, and six times the logits in fp32."""
    return costs.bytes_per_parameter * costs.between * load.tokens + 6 * 4 * costs.vocabulary * load.outputs


def model_costs(
    size: Sizes,
    processor: Processor,
    text: Mapping[str, Any],
    *,
    trained: float,
    published: float,
    bytes_per_parameter: int,
    adapts: bool,
    trains_vision: bool,
    full_attention: float = 1.0,
    merge: int = 4,
) -> ModelCosts:
    """Read the costs off a model's sizes.

    Args:
        text: `EXPERT_SETTINGS` of the language model's configuration; None or no entry where it has none.
        full_attention: share of the tower's layers whose attention is over whole images.
        merge: patches of an image token, by which the projector's work is divided.
    """
    group = processor.parameter_group
    by_part: dict[str, float] = {"language": 0.0, "vision": 0.0, "projector": 0.0}
    for name, (out, inner) in size.linears.items():
        if name.rpartition(".")[2] != "lm_head":
            by_part[group(f"{name}.weight")] += out * inner
    tower, recurrence = size.tower, size.text.recurrence
    # The state of linear attention: decay, update and output of a matrix per head.
    states = 0.0 if recurrence is None else 3.0 * recurrence.layers * recurrence.heads
    states *= 0.0 if recurrence is None else recurrence.keys * recurrence.values
    return ModelCosts(
        parameters=size.total,
        trained=trained,
        dense=by_part["language"] + states,
        output=float(size.vocabulary * size.text.hidden),
        experts=_experts(size, text),
        layers=size.text.layers,
        hidden=size.text.hidden,
        attention=float(size.text.attention_layers * size.text.queries),
        between=float(size.text.layers * (8 * size.text.hidden + 5 * size.text.intermediate)),
        vocabulary=size.vocabulary,
        keys_and_values=2.0 * size.text.attention_layers * size.text.keys,
        patch=by_part["vision"] + by_part["projector"] / merge,
        patch_attention=0.0 if tower is None else full_attention * tower.layers * tower.queries,
        bytes_per_parameter=bytes_per_parameter,
        adapts=adapts,
        trains_vision=trains_vision,
        published=published,
    )


def _experts(size: Sizes, text: Mapping[str, Any]) -> Experts | None:
    if not size.experts:
        return None
    count, chosen = next(filter(None, map(text.get, EXPERT_COUNTS)), None), text.get("num_experts_per_tok")
    if count is None or chosen is None:
        raise ConfigError("actor.model_name_or_path: this model has experts, and its configuration says not how many")
    return Experts(count, chosen, size.experts)
