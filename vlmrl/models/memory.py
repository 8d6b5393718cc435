"""What a trainer rank, a reference and an engine take of memory, from sizes that a model's configuration tells.

With P numbers in the model, of which T train, on N ranks, s bytes in `ds.param_dtype` (2 or 4):

* **weights** are s P; in 4 bits 0.516 bytes for each number of the language model's layers and s for the rest. ZeRO-3
  shards them: 1/N, and what it has gathered.
* **gradients** are 4 T summed, and s T on their way through ZeRO's bucket; **optimizer** is 4 T for the copy that
  DeepSpeed updates, and 8 T (2 T in 8 bits) for Adam's two moments. What ZeRO shards of them is 1/N. With adapters T is
  r (in + out) per layer.
* **activations** are what the backward pass needs of every token and layer, which `saved` counts, and what it makes of
  one layer. With checkpointing they are s D per token and layer, and two layers in full.
* What sleeps on a GPU (`vllm.enable_sleep`, `ds.enable_sleep`) lies in pinned main memory, in blocks of powers of two
  that PyTorch keeps for good: `pinned_bytes`.
* **update** is what the optimizer step takes when activations and bucket are gone, as far as it is more than they were:
  a flat copy of the gradient, 4 T/N. Fused Adam makes no array of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn
from transformers import PreTrainedModel

from vlmrl.config.actor import Model
from vlmrl.config.ds import Ds
from vlmrl.config.vllm import Vllm
from vlmrl.models.adapter_plan import AdapterPlan, vision_trains
from vlmrl.models.logprobs import SLICE
from vlmrl.models.quantize import quantized_layers
from vlmrl.plugins import ParameterGroup

FOUR_BIT_BYTES = 0.5 + 0.127 / 8
"""Of a number in NF4, its share of the doubly quantised scales included (arXiv:2305.14314, section 3)."""
_BUCKET = 500_000_000
"""Numbers in DeepSpeed's `reduce_bucket_size`."""
_LIVE = 1_000_000_000
"""Numbers in DeepSpeed's `stage3_max_live_parameters`: so many of those that it gathered it keeps."""
_ANOTHER = "set ds.lora.rank without ref.model_name_or_path: then the actor with its adapters off is the reference"
_MIB = 1 << 20
_FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
"""Linear layers -> the one that vLLM makes of them."""
_BYTES = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True)
class Blocks:
    """A stack of equal layers."""

    layers: int
    hidden: int
    intermediate: int
    queries: int
    """Heads times channels."""
    keys: int
    """The same of keys and values."""
    norms_heads: bool = False
    """Queries and keys are normalised (Qwen3)."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What of a model decides its memory, in numbers."""

    parameters: dict[ParameterGroup, int]
    quantized: int
    """Numbers in the layers that 4 bits would hold."""
    linears: dict[str, tuple[int, int]]
    """(out, in) of every linear layer."""
    vocabulary: int
    text: Blocks
    tower: Blocks | None
    output: int = 0
    """Numbers in an output layer that is not the embedding too."""

    @property
    def total(self) -> int:
        return sum(self.parameters.values())


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of memory that a role takes."""

    name: str
    num_bytes: float
    flag: str
    """What to change to make it less."""
    in_host_memory: bool = False
    """Even where the role computes on a GPU."""
    stays: bool = True
    """Between the role's passes too, while engines on the same GPU are awake."""


@dataclass(frozen=True, slots=True)
class Role:
    """One process of a run."""

    name: str
    parts: tuple[Part, ...]

    def num_bytes(self, *, on_device: bool = True) -> float:
        """Of its device, or with False of main memory beside it."""
        return sum(part.num_bytes for part in self.parts if part.in_host_memory != on_device)


def sizes(net: PreTrainedModel, group: Callable[[str], ParameterGroup]) -> Sizes:
    """Sizes of a model, which may be a skeleton. `group` is `Processor.parameter_group`."""
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
    vision = getattr(net.config, "vision_config", None)
    return Sizes(
        parameters=counts,
        quantized=sum(linears[name][0] * linears[name][1] for name in quantized_layers(net, group)),
        linears=linears,
        vocabulary=text.vocab_size,
        output=_output(net),
        text=Blocks(
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            intermediate=text.intermediate_size,
            queries=channels * text.num_attention_heads,
            keys=channels * (getattr(text, "num_key_value_heads", None) or text.num_attention_heads),
            norms_heads=any(name.endswith("q_norm.weight") for name, _ in net.named_parameters()),
        ),
        tower=None if vision is None else _tower(vision),
    )


def with_value_head(size: Sizes) -> Sizes:
    """Of the same model with a score layer in the place of its output layer."""
    language = size.parameters["language"] - size.output + size.text.hidden
    return replace(size, parameters={**size.parameters, "language": language}, vocabulary=1, output=0)


def trainer(
    size: Sizes,
    *,
    role: str = "actor",
    model: Model,
    ds: Ds,
    adapter: AdapterPlan | None,
    ranks: int,
    tokens: int,
    patches: int,
    device: str,
    cache_bytes: float = 0.0,
    has_average: bool = False,
) -> Role:
    """A rank that trains on packs of so many tokens and vision patches, on `device` (cpu or cuda).

    `role` is actor or critic. `has_average`: the ranks keep a moving average of the weights together, in fp32.
    """
    s = _BYTES[ds.param_dtype]
    own = adapter_numbers(size, adapter) if adapter is not None else 0
    trains = own if adapter is not None else _thawed(size, model)
    sharded = ranks if ds.zero_stage else 1
    # Without sharding, DeepSpeed's bf16 optimizer is that of stage 1; in fp32 there is no copy to update.
    plain = ds.zero_stage == 0 and ds.param_dtype == "fp32"
    moments = _moment_bytes(size, model, adapter)
    optimizer = trains * (moments if plain else moments + 4) / sharded
    bucket = min(trains, _BUCKET) * (4 if ds.zero_stage < 2 else s) * (2 if ds.overlap_comm else 1)
    # Plain fp32 reduces when the backward pass is over.
    bucket, update = (0, 4 * trains) if plain else (bucket, 4 * trains / sharded - bucket)
    gradients = 4 * trains / (sharded if ds.zero_stage > 1 else 1) + bucket
    working = _working(
        size, model, s, device, tokens, patches, vision_trains(model, adapter), adapted=adapter is not None
    )
    asleep = 0.0
    if ds.enable_sleep and device != "cpu":
        # DeepSpeed has each of them in one piece: the copy that is updated, and two moments.
        asleep = _pinned(4 * trains / sharded) + 2 * _pinned(moments / 2 * trains / sharded)
    more = "set ds.lora.rank to train adapters alone" if adapter is None else "lower ds.lora.rank"
    shard = "" if ds.zero_stage == 3 else f", or raise ds.zero_stage and {role}.num_gpus_per_node"
    parts = [
        Part("weights", weight_bytes(size, ds, ranks=ranks), _weights_flag(ds, adapter)),
        Part("adapters", own * s / (ranks if ds.zero_stage == 3 else 1), "lower ds.lora.rank"),
        # Stage 3 allocates them, and the bucket, once and for all; the others for each update.
        Part("gradients", gradients, more + shard, stays=ds.zero_stage == 3),
        Part(
            "optimizer",
            optimizer,
            f"{more}{shard}, or {role}.optim adam_8bit",
            in_host_memory=ds.adam_offload and device != "cpu",
            stays=not ds.enable_sleep,
        ),
        Part("activations", working, _activations_flag(role, model), stays=False),
        Part("update", max(0.0, update - working), more + shard, stays=False),
        Part("asleep, pinned", asleep, "leave ds.enable_sleep off", in_host_memory=True),
        Part("moving average", has_average * 4 * trains / ranks, "leave train.enable_ema off", in_host_memory=True),
        Part("vision cache", cache_bytes, "lower vision.cache_gib", in_host_memory=True),
    ]
    return Role(role, tuple(part for part in parts if part.num_bytes))


def in_turn_with(actor: Role, critic: Role, *, shares_features: bool) -> Role:
    """The critic in the actor's process. They learn one after the other: it counts with what is above the actor's peak.

    `shares_features`: both look for the features of images in one cache.
    """
    in_turn = {"gradients", "activations", "update", *(("vision cache",) if shares_features else ())}
    of_actor = {part.name: part.num_bytes for part in actor.parts if part.name in in_turn}
    parts = (replace(p, num_bytes=max(0.0, p.num_bytes - of_actor.get(p.name, 0.0))) for p in critic.parts)
    return Role(critic.name, tuple(part for part in parts if part.num_bytes))


def engine(
    size: Sizes, *, vllm: Vllm, ds: Ds, adapter: AdapterPlan | None, device: str, device_bytes: float = 0.0
) -> Role:
    """An engine. On a GPU it fills its share of the memory with KV cache; `device_bytes` are those of the GPU."""
    s = _BYTES[ds.param_dtype]
    held = float(size.total * s)
    if ds.load_in_4bit and vllm.qlora_base == "bitsandbytes":
        held = size.quantized * FOUR_BIT_BYTES + (size.total - size.quantized) * s
    weights = held / vllm.tensor_parallel_size
    slots = 0.0
    if adapter is not None and adapter.fits_engine:
        slots = adapter_numbers(size, adapter) / adapter.rank * adapter.engine_rank * s / vllm.tensor_parallel_size
    if device == "cpu":
        cache, flag = vllm.cpu_kv_cache_gib * 2**30, "lower vllm.cpu_kv_cache_gib"
    else:
        cache = max(0.0, vllm.gpu_memory_utilization * device_bytes - weights - slots)
        flag = "lower vllm.gpu_memory_utilization"
    pinned = 0.0
    if vllm.enable_sleep and device != "cpu":
        shard = s / vllm.tensor_parallel_size
        pinned = pinned_bytes(size, shard) * held / (size.total * s) + slots
    parts = [
        Part("weights", weights, "raise vllm.tensor_parallel_size"),
        Part("adapters", slots, "lower ds.lora.rank"),
        Part("KV cache", cache, flag),
        Part("asleep, pinned", pinned, "raise vllm.tensor_parallel_size", in_host_memory=True),
    ]
    return Role("vllm", tuple(part for part in parts if part.num_bytes))


def pinned_bytes(size: Sizes, each: float) -> float:
    """Main memory for all the weights of a sleeping engine, of `each` bytes a number.

    vLLM copies every block of PyTorch's allocator to a pinned block. A tensor of 10 MiB and more has a block of its
    own, in steps of 2 MiB; those below share blocks of 20 MiB, and those up to 1 MiB of 2 MiB.
    """
    tensors: dict[str, int] = {"embedding": size.vocabulary * size.text.hidden}
    for name, (out, inner) in size.linears.items():
        layer, _, last = name.rpartition(".")
        if last != "lm_head" or size.output:
            fused = f"{layer}.{_FUSED.get(last, last)}"
            tensors[fused] = tensors.get(fused, 0) + out * inner
    rest = max(0, size.total - sum(tensors.values()))
    return rest * each + sum(_pinned(numbers * each) for numbers in tensors.values())


def _pinned(num_bytes: float) -> float:
    if num_bytes <= _MIB:
        return num_bytes
    if num_bytes < 10 * _MIB:
        return num_bytes * 32 / 20
    block = math.ceil(num_bytes / (2 * _MIB)) * 2 * _MIB
    return float(1 << (block - 1).bit_length())


def sequence_bytes(size: Sizes, *, vllm: Vllm, ds: Ds, tokens: int) -> float:
    """KV cache of a sequence of so many tokens, on one device of an engine."""
    return 2.0 * size.text.layers * size.text.keys * _BYTES[ds.param_dtype] * tokens / vllm.tensor_parallel_size


def reference(size: Sizes, *, ds: Ds, tokens: int, device: str) -> Role:
    """A frozen model of its own, whole on every rank."""
    return _frozen("ref", size, ds, Part("weights", weight_bytes(size, ds, ranks=1), _ANOTHER), tokens, device)


def reward_model(name: str, size: Sizes, *, ds: Ds, ranks: int, tokens: int, device: str, is_offloaded: bool) -> Role:
    """A reward model, of `with_value_head` sizes. Never in 4 bits; whole on every rank, but for ZeRO-3."""
    ds = ds.model_copy(update={"load_in_4bit": False})
    flag = "set reward.offload" if device != "cpu" and not is_offloaded else "set ds.zero_stage 3, on more GPUs"
    held = weight_bytes(size, ds, ranks=ranks)
    weights = Part("weights", held, flag, in_host_memory=is_offloaded and device != "cpu")
    return _frozen(name, size, ds, weights, tokens, device)


def _frozen(name: str, size: Sizes, ds: Ds, weights: Part, tokens: int, device: str) -> Role:
    s = _BYTES[ds.param_dtype]
    working = saved(size.text, s, adapted=True) * tokens + _head(size, tokens, device)
    activations = Part("activations", working, "lower rollout.max_tokens_per_gpu", stays=False)
    return Role(name, (weights, activations))


def weight_bytes(size: Sizes, ds: Ds, *, ranks: int) -> float:
    """Of the model on one trainer rank, adapters apart."""
    s = _BYTES[ds.param_dtype]
    whole = float(size.total * s)
    if ds.load_in_4bit:
        whole = size.quantized * FOUR_BIT_BYTES + (size.total - size.quantized) * s
    if ds.zero_stage < 3 or ranks == 1:
        return whole
    # What is in 4 bits is read whole before it is sharded.
    return max(whole if ds.load_in_4bit else 0.0, whole / ranks + min(whole, _LIVE * s))


def adapter_numbers(size: Sizes, adapter: AdapterPlan) -> int:
    """Numbers in an adapter: r (in + out) of each layer, and DoRA's magnitudes."""
    shapes = [size.linears[target] for target in adapter.targets]
    return sum(adapter.rank * (out + inner) + (out if adapter.has_magnitude else 0) for out, inner in shapes)


def _working(
    size: Sizes,
    model: Model,
    s: int,
    device: str,
    tokens: int,
    patches: int,
    reaches_vision: bool,
    *,
    adapted: bool,
) -> float:
    """Bytes of a pass that are gone when it is over. A frozen tower keeps nothing beyond its own turn."""
    passing = max(tokens * saved(size.text, s, adapted=adapted), _head(size, tokens, device))
    text = kept(size.text, tokens, s, model=model, adapted=adapted) + passing
    if size.tower is None or not patches:
        return text
    layer = patches * saved(size.tower, s, adapted=adapted)
    if reaches_vision:
        return text + kept(size.tower, patches, s, model=model, adapted=adapted)
    return max(text, layer)


def kept(blocks: Blocks, tokens: int, s: int, *, model: Model, adapted: bool) -> float:
    """Bytes that the backward pass needs of so many tokens."""
    each = saved(blocks, s, adapted=adapted)
    if model.gradient_checkpointing_enable:
        return tokens * (blocks.layers * blocks.hidden * s + each)
    return tokens * blocks.layers * each


def saved(blocks: Blocks, s: int, *, adapted: bool) -> float:
    """Bytes that one layer keeps of a token for its backward pass.

    Two norms keep their input in fp32, and, to train themselves, what it came to. Linear layers keep their inputs:
    2 D, and those of the last projections of attention and feed-forward. Attention keeps queries, keys, values and
    output; the feed-forward keeps gate, activated gate and up.
    """
    own = 0 if adapted else s
    heads = blocks.queries + blocks.keys
    norms = 2 * blocks.hidden * (4 + own) + (heads * (4 + own) if blocks.norms_heads else 0)
    attention = s * (2 * blocks.queries + 2 * blocks.keys + blocks.queries)
    return norms + attention + s * (2 * blocks.hidden + 4 * blocks.intermediate)


def _head(size: Sizes, tokens: int, device: str) -> float:
    """Three arrays of the logits that exist at the same time, in fp32."""
    return 12.0 * min(SLICE[device], tokens * size.vocabulary)


def _tower(vision: object) -> Blocks:
    hidden = int(getattr(vision, "hidden_size", 0) or getattr(vision, "embed_dim", 0))
    intermediate = getattr(vision, "intermediate_size", None) or hidden * getattr(vision, "mlp_ratio", 4)
    depth = int(getattr(vision, "depth", 0) or getattr(vision, "num_hidden_layers", 0))
    return Blocks(layers=depth, hidden=hidden, intermediate=int(intermediate), queries=hidden, keys=hidden)


def _thawed(size: Sizes, model: Model) -> int:
    frozen = {"vision": model.freeze_visual_encoder, "projector": model.freeze_projector, "language": False}
    return sum(count for group, count in size.parameters.items() if not frozen[group])


def _weights_flag(ds: Ds, adapter: AdapterPlan | None) -> str:
    if adapter is not None and not ds.load_in_4bit:
        return "set ds.load_in_4bit"
    return "set ds.lora.rank and ds.load_in_4bit" if adapter is None else "set ds.zero_stage 3, on more GPUs"


def _moment_bytes(size: Sizes, model: Model, adapter: AdapterPlan | None) -> float:
    """Of a number that trains, on average: two moments, or Muon's one for the matrices inside the layers."""
    if model.optim != "muon":
        return 2.0 if "8bit" in model.optim else 8.0
    inside = sum(out * inner for out, inner in size.linears.values()) - size.output
    return 4.0 if adapter is not None else 8.0 - 4.0 * inside / size.total


def _activations_flag(role: str, model: Model) -> str:
    less = "lower train.max_tokens_per_gpu"
    return less if model.gradient_checkpointing_enable else f"set {role}.gradient_checkpointing_enable, or {less}"


def _output(net: PreTrainedModel) -> int:
    layer, embedding = net.get_output_embeddings(), net.get_input_embeddings()
    return 0 if layer is None or layer.weight is embedding.weight else int(layer.weight.numel())
