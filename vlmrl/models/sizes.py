"""Sizes of a model that decide its memory, from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from vlmrl.models.adapter_plan import AdapterPlan
from vlmrl.models.expert_parallel import expert_layers
from vlmrl.models.quantize import quantized_layers
from vlmrl.plugins import ParameterGroup


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The layers of a stack that have linear attention (gated delta rule) in place of attention."""

    layers: int
    heads: int
    """Of values; keys have fewer and are repeated."""
    keys: int
    """Channels of a head's keys."""
    values: int
    """Channels of a head's values."""
    queries: int
    """Heads times channels of queries and keys together, before they are repeated."""
    taps: int
    """Width of the convolution over queries, keys and values."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """A stack of layers, equal but for those with linear attention."""

    layers: int
    hidden: int
    intermediate: int
    queries: int
    """Heads times channels of the queries."""
    keys: int
    """Heads times channels of the keys, and of the values."""
    key_heads: int = 1
    repeats: int = 1
    """Times that each key head is saved, on ranks that share tokens and have more ranks than key heads."""
    norms_heads: bool = False
    """Queries and keys are normalized (Qwen3)."""
    recurrence: Recurrence | None = None

    @property
    def attention_layers(self) -> int:
        """Layers with keys and values of every token."""
        return self.layers - (self.recurrence.layers if self.recurrence is not None else 0)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a model that decide its memory, as numbers of parameters."""

    parameters: dict[ParameterGroup, int]
    quantized: int
    """Parameters of the layers that are quantized in 4 bits."""
    linears: dict[str, tuple[int, int]]
    """(out, in) of every linear layer."""
    vocabulary: int
    text: Blocks
    tower: Blocks | None
    output: int = 0
    """Parameters of the output layer; 0 if it is tied to the embedding."""
    experts: int = 0
    """Parameters of all experts."""

    @property
    def total(self) -> int:
        return sum(self.parameters.values())


def model_sizes(net: PreTrainedModel, group: Callable[[str], ParameterGroup]) -> Sizes:
    """Read the sizes off a model, which may be a skeleton. `group` is `Processor.parameter_group`."""
    counts: dict[ParameterGroup, int] = {}
    for name, parameter in net.named_parameters():
        counts[group(name)] = counts.get(group(name), 0) + parameter.numel()
    linears = {
        name: (module.out_features, module.in_features)
        for name, module in net.named_modules()
        if isinstance(module, nn.Linear)
    }
    text = net.config.get_text_config()
    channels = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    vision = getattr(net.config, "vision_config", None)
    return Sizes(
        parameters=counts,
        quantized=sum(linears[name][0] * linears[name][1] for name in quantized_layers(net, group)),
        linears=linears,
        vocabulary=text.vocab_size,
        output=_num_output(net),
        experts=sum(p.numel() for layer in expert_layers(net) for p in layer.parameters(recurse=False)),
        text=Blocks(
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            intermediate=_intermediate(text),
            queries=channels * text.num_attention_heads,
            keys=channels * key_heads,
            key_heads=key_heads,
            norms_heads=any(name.endswith("q_norm.weight") for name, _ in net.named_parameters()),
            recurrence=_recurrence(text),
        ),
        tower=None if vision is None else _tower(vision),
    )


def with_value_head(size: Sizes) -> Sizes:
    """Sizes of the same model with a score layer in place of its output layer."""
    language = size.parameters["language"] - size.output + size.text.hidden
    return replace(size, parameters={**size.parameters, "language": language}, vocabulary=1, output=0)


def stage_share(size: Sizes, stages: int) -> float:
    """Return the share of the parameters in the largest stage of a pipeline. Each has a part of the layers and all of
    the tower, and one end the embedding or the output layer."""
    ends, layers = size.vocabulary * size.text.hidden, size.text.layers
    inside = size.parameters["language"] - ends - size.output
    elsewhere = inside * (1 - -(-layers // stages) / layers) + (size.output if stages > 1 else 0)
    return (size.total - elsewhere) / size.total


def num_adapter_parameters(size: Sizes, adapter: AdapterPlan) -> int:
    """Parameters of an adapter: r (in + out) of each layer, and DoRA's magnitudes."""
    shapes = [size.linears[target] for target in adapter.targets]
    return sum(adapter.rank * (out + inner) + (out if adapter.has_magnitude else 0) for out, inner in shapes)


def _recurrence(text: PretrainedConfig) -> Recurrence | None:
    layers = list(getattr(text, "layer_types", None) or ()).count("linear_attention")
    if not layers or not hasattr(text, "linear_num_value_heads"):
        return None
    return Recurrence(
        layers=layers,
        heads=text.linear_num_value_heads,
        keys=text.linear_key_head_dim,
        values=text.linear_value_head_dim,
        queries=2 * text.linear_num_key_heads * text.linear_key_head_dim,
        taps=text.linear_conv_kernel_dim,
    )


def _intermediate(text: object) -> int:
    """Channels inside a feed-forward layer that a token takes.

    With experts those of the chosen ones; their inputs and outputs, held once for each, count as much as 3/4 D.
    """
    if getattr(text, "moe_intermediate_size", None) is None:
        return int(text.intermediate_size)  # type: ignore[attr-defined]
    return int(text.num_experts_per_tok * (text.moe_intermediate_size + 3 * text.hidden_size // 4))  # type: ignore[attr-defined]


def _tower(vision: object) -> Blocks:
    hidden = int(getattr(vision, "hidden_size", 0) or getattr(vision, "embed_dim", 0))
    intermediate = getattr(vision, "intermediate_size", None) or hidden * getattr(vision, "mlp_ratio", 4)
    depth = int(getattr(vision, "depth", 0) or getattr(vision, "num_hidden_layers", 0))
    return Blocks(layers=depth, hidden=hidden, intermediate=int(intermediate), queries=hidden, keys=hidden)


def _num_output(net: PreTrainedModel) -> int:
    layer, embedding = net.get_output_embeddings(), net.get_input_embeddings()
    return 0 if layer is None or layer.weight is embedding.weight else int(layer.weight.numel())
