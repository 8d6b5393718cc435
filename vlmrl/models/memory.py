"""Memory estimates of trainer ranks, references, reward models and engines, from a model's configuration.

With P parameters, T of them trainable, on N ranks, and s bytes of `ds.param_dtype` (2 or 4):

* **weights** are s P; in 4 bits 0.516 bytes per parameter of the language model's layers, and s for the rest. ZeRO-3
  shards them: 1/N, plus the gathered ones, which are all that is on the GPU with `ds.offload`.
* **gradients** are 4 T for the sums, plus s T for ZeRO's bucket; **optimizer** is 4 T for the fp32 copy that DeepSpeed
  updates, and 8 T (2 T in 8 bits) for Adam's two moments. Sharded by ZeRO, they are 1/N. With adapters T is r (in +
  out) per layer.
* **activations** are what each layer saves per token for the backward pass (`saved_per_token`), plus the gradients of
  one layer. With checkpointing they are s D per token and layer, plus two layers in full. A rank has 1/S of the tokens
  of its packs (`ds.sequence_parallel_size`), all images, and with images the embeddings of all tokens, s D each.
* States that sleep (`vllm.enable_sleep`, `ds.enable_sleep`) are in pinned main memory, in blocks of powers of two that
  PyTorch never frees: `pinned_bytes`.
* **update** is the flat copy of the gradient in the optimizer step, 4 T/N, as far as it exceeds activations and bucket,
  which are freed by then. Fused Adam needs no buffer.
"""

from __future__ import annotations

import math
from dataclasses import replace

from vlmrl.config.actor import Model
from vlmrl.config.ds import Ds
from vlmrl.config.vllm import Vllm
from vlmrl.models.adapter_plan import AdapterPlan, vision_trains
from vlmrl.models.logprobs import SLICE
from vlmrl.models.memory_parts import MemoryPart, RoleMemory
from vlmrl.models.sizes import Blocks, Recurrence, Sizes, num_adapter_parameters, stage_share

FOUR_BIT_BYTES = 0.5 + 0.127 / 8
"""Bytes of a parameter in NF4, with its share of the doubly quantized scales (arXiv:2305.14314, section 3)."""
_BUCKET = 500_000_000
"""Elements of DeepSpeed's `reduce_bucket_size`."""
_CHUNK = 64
"""Tokens that linear attention computes at once."""
_LIVE = 1_000_000_000
"""DeepSpeed's `stage3_max_live_parameters`: the number of gathered parameters that it keeps."""
_REFERENCE_HINT = (
    "set ds.lora.rank without ref.model_name_or_path: then the actor with its adapters off is the reference"
)
_MIB = 1 << 20
_FUSED = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
    "in_proj_qkv": "in_proj_qkvz",
    "in_proj_z": "in_proj_qkvz",
    "in_proj_b": "in_proj_ba",
    "in_proj_a": "in_proj_ba",
}
"""Linear layer -> the fused layer of vLLM that it becomes a part of."""
_BYTES = {"bf16": 2, "fp32": 4}


def trainer_memory(
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
) -> RoleMemory:
    """Estimate a rank that trains on packs of this many tokens and vision patches, on `device` (cpu or cuda).

    The ranks of `ds.sequence_parallel_size` share the tokens of a pack, those of `ds.expert_parallel_size` the experts
    of each layer. `role` is actor or critic. `has_average`: the
    ranks together keep a moving average of the weights in fp32.
    """
    s = _BYTES[ds.param_dtype]
    num_adapter = num_adapter_parameters(size, adapter) if adapter is not None else 0
    trains = num_adapter if adapter is not None else _num_unfrozen(size, model)
    shards = ranks if ds.zero_stage else 1
    # At stage 0 DeepSpeed's bf16 optimizer is that of stage 1; in fp32 there is no copy to update.
    plain = ds.zero_stage == 0 and ds.param_dtype == "fp32"
    moments = _moment_bytes(size, model, adapter)
    optimizer = trains * (moments if plain else moments + 4) / shards
    bucket = min(trains, _BUCKET) * (4 if ds.zero_stage < 2 else s) * (2 if ds.overlap_comm else 1)
    # Plain fp32 reduces after the backward pass.
    bucket, update = (0, 4 * trains) if plain else (bucket, 4 * trains / shards - bucket)
    gradients = 4 * trains / (shards if ds.zero_stage > 1 else 1) + bucket
    # Under ZeRO-3 they are sharded in any case.
    elsewhere = 0.0 if ds.zero_stage == 3 else size.experts * (1 - 1 / ds.expert_parallel_size)
    gradients -= 4 * elsewhere if ds.zero_stage == 1 else 0.0
    group = ds.sequence_parallel_size
    activations = _activation_bytes(
        # As `models.sequence` repeats key heads.
        replace(size, text=replace(size.text, repeats=math.lcm(size.text.key_heads, group) // size.text.key_heads)),
        model,
        s,
        device,
        -(-tokens // group),
        patches,
        vision_trains(model, adapter),
        adapted=adapter is not None,
    )
    if group > 1 and size.tower is not None:
        # Embeddings with the images in them, which the vision-language model holds beside its slice.
        activations += s * size.text.hidden * tokens
    asleep = 0.0
    if ds.enable_sleep and device != "cpu":
        # Each is one tensor in DeepSpeed: the fp32 copy, and two moments.
        asleep = _pinned(4 * trains / shards) + 2 * _pinned(moments / 2 * trains / shards)
    fewer = "set ds.lora.rank to train only adapters" if adapter is None else "lower ds.lora.rank"
    shard = "" if ds.zero_stage == 3 else f", or raise ds.zero_stage and {role}.num_gpus_per_node"
    parts = [
        MemoryPart("weights", weight_bytes(size, ds, ranks=ranks) - s * elsewhere, _weights_flag(ds, adapter)),
        MemoryPart("adapters", num_adapter * s / (ranks if ds.zero_stage == 3 else 1), "lower ds.lora.rank"),
        # Stage 3 allocates gradients and bucket once; other stages allocate them for each update.
        MemoryPart("gradients", gradients, fewer + shard, stays=ds.zero_stage == 3),
        MemoryPart(
            "optimizer",
            optimizer,
            f"{fewer}{shard}, or {role}.optim adam_8bit",
            in_host_memory=ds.adam_offload and device != "cpu",
            stays=not ds.enable_sleep,
        ),
        MemoryPart("activations", activations, _activations_flag(role, model), stays=False),
        MemoryPart("update", max(0.0, update - activations), fewer + shard, stays=False),
        MemoryPart("asleep, pinned", asleep, "leave ds.enable_sleep off", in_host_memory=True),
        MemoryPart(
            "moving average", has_average * 4 * trains / ranks, "leave train.enable_ema off", in_host_memory=True
        ),
        MemoryPart("vision cache", cache_bytes, "lower vision.cache_gib", in_host_memory=True),
    ]
    if ds.adam_offload and ds.zero_stage == 3 and device != "cpu":
        parts = _offloaded(parts, size, ds, ranks=ranks, sums=4 * trains / ranks, flag=fewer)
    return RoleMemory(role, tuple(part for part in parts if part.num_bytes))


def _offloaded(parts: list[MemoryPart], size: Sizes, ds: Ds, *, ranks: int, sums: float, flag: str) -> list[MemoryPart]:
    """Move to main memory what stage 3 keeps there with `ds.adam_offload`: the sums of gradients, twice (added up, and
    flat for the step), and with `ds.offload` the weights, apart from those that are gathered."""
    rest = [part for part in parts if part.name not in ("gradients", "update", "weights")]
    weights, gradients = parts[0], next(part for part in parts if part.name == "gradients")
    if ds.offload != "none":
        s = _BYTES[ds.param_dtype]
        rest.insert(0, MemoryPart("gathered weights", min(size.total, _LIVE) * s, "use GPUs with more memory"))
        weights = replace(weights, num_bytes=size.total * s / ranks, in_host_memory=True)
    on_device = replace(gradients, num_bytes=gradients.num_bytes - sums)
    return [weights, on_device, MemoryPart("sums of gradients", 2 * sums, flag, in_host_memory=True), *rest]


def colocated_critic(actor: RoleMemory, critic: RoleMemory, *, shares_features: bool) -> RoleMemory:
    """Reduce the critic's memory to what it adds in the actor's process: they train alternately, so that transient
    parts count only as far as they exceed the actor's.

    `shares_features`: both share one cache of image features.
    """
    in_turn = {"gradients", "activations", "update", *(("vision cache",) if shares_features else ())}
    of_actor = {part.name: part.num_bytes for part in actor.parts if part.name in in_turn}
    parts = (replace(p, num_bytes=max(0.0, p.num_bytes - of_actor.get(p.name, 0.0))) for p in critic.parts)
    return RoleMemory(critic.name, tuple(part for part in parts if part.num_bytes))


def engine_memory(
    size: Sizes, *, vllm: Vllm, ds: Ds, adapter: AdapterPlan | None, device: str, device_bytes: float = 0.0
) -> RoleMemory:
    """Estimate an engine. On a GPU it fills its share of the memory, `device_bytes` in all, with KV cache."""
    s = _BYTES[ds.param_dtype]
    model_bytes = float(size.total * s)
    if ds.load_in_4bit and vllm.qlora_base == "bitsandbytes":
        model_bytes = size.quantized * FOUR_BIT_BYTES + (size.total - size.quantized) * s
    if vllm.quantization == "fp8":
        model_bytes = float(size.quantized + (size.total - size.quantized) * s)
    weights = model_bytes * stage_share(size, vllm.pipeline_parallel_size) / vllm.tensor_parallel_size
    slots = 0.0
    if adapter is not None and adapter.fits_engine:
        slots = (
            num_adapter_parameters(size, adapter) / adapter.rank * adapter.engine_rank * s / vllm.tensor_parallel_size
        )
    if device == "cpu":
        cache, flag = vllm.cpu_kv_cache_gib * 2**30, "lower vllm.cpu_kv_cache_gib"
    else:
        cache = max(0.0, vllm.gpu_memory_utilization * device_bytes - weights - slots)
        flag = "lower vllm.gpu_memory_utilization"
    pinned = 0.0
    if vllm.enable_sleep and device != "cpu":
        share = weights * vllm.tensor_parallel_size / (size.total * s)
        pinned = pinned_bytes(size, s / vllm.tensor_parallel_size) * share + slots
    parts = [
        MemoryPart("weights", weights, "raise vllm.tensor_parallel_size, or vllm.pipeline_parallel_size"),
        MemoryPart("adapters", slots, "lower ds.lora.rank"),
        MemoryPart("KV cache", cache, flag),
        MemoryPart("asleep, pinned", pinned, "raise vllm.tensor_parallel_size", in_host_memory=True),
    ]
    return RoleMemory("vllm", tuple(part for part in parts if part.num_bytes))


def pinned_bytes(size: Sizes, bytes_per_parameter: float) -> float:
    """Estimate the pinned main memory for the weights of a sleeping engine.

    vLLM copies every block of PyTorch's allocator to a pinned block. A tensor of at least 10 MiB has its own block, in
    steps of 2 MiB; smaller ones share blocks of 20 MiB, and those up to 1 MiB blocks of 2 MiB.
    """
    tensors: dict[str, int] = {"embedding": size.vocabulary * size.text.hidden}
    for name, (out, inner) in size.linears.items():
        layer, _, last = name.rpartition(".")
        if last != "lm_head" or size.output:
            fused = f"{layer}.{_FUSED.get(last, last)}"
            tensors[fused] = tensors.get(fused, 0) + out * inner
    rest = max(0, size.total - sum(tensors.values()))
    return rest * bytes_per_parameter + sum(_pinned(count * bytes_per_parameter) for count in tensors.values())


def _pinned(num_bytes: float) -> float:
    if num_bytes <= _MIB:
        return num_bytes
    if num_bytes < 10 * _MIB:
        return num_bytes * 32 / 20
    block = math.ceil(num_bytes / (2 * _MIB)) * 2 * _MIB
    return float(1 << (block - 1).bit_length())


def sequence_bytes(size: Sizes, *, vllm: Vllm, ds: Ds, tokens: int) -> float:
    """KV cache of a sequence of this many tokens, on one device of an engine, and its states of linear attention: the
    last inputs of the convolution, and a matrix per head in fp32."""
    s = _BYTES[ds.param_dtype]
    num_bytes = 2.0 * size.text.attention_layers * size.text.keys * s * tokens
    if (linear := size.text.recurrence) is not None:
        convolution = (linear.taps - 1) * (linear.queries + linear.heads * linear.values) * s
        num_bytes += linear.layers * (convolution + 4 * linear.heads * linear.keys * linear.values)
    of_stage = -(-size.text.layers // vllm.pipeline_parallel_size) / size.text.layers
    return num_bytes * of_stage / vllm.tensor_parallel_size


def reference_memory(size: Sizes, *, ds: Ds, tokens: int, device: str) -> RoleMemory:
    """Estimate a reference model, all of whose weights are on every rank."""
    weights = MemoryPart("weights", weight_bytes(size, ds, ranks=1), _REFERENCE_HINT)
    return _frozen("ref", size, ds, weights, tokens, device)


def reward_model_memory(
    name: str, size: Sizes, *, ds: Ds, ranks: int, tokens: int, device: str, is_offloaded: bool
) -> RoleMemory:
    """Estimate a reward model, of `with_value_head` sizes. It is never in 4 bits, and sharded under ZeRO-3 only."""
    return _offloadable(name, "reward", size, ds, ranks, tokens, device, is_offloaded=is_offloaded)


def teacher_memory(size: Sizes, *, ds: Ds, ranks: int, tokens: int, device: str, is_offloaded: bool) -> RoleMemory:
    """Estimate a teacher, which is never in 4 bits, and sharded under ZeRO-3 only."""
    return _offloadable("teacher", "algo.distill", size, ds, ranks, tokens, device, is_offloaded=is_offloaded)


def inner_teacher_memory(size: Sizes, *, ds: Ds, ranks: int) -> MemoryPart:
    """Estimate the weights of a teacher in the actor's process: never in 4 bits; under ZeRO-3 a shard, and a copy of
    the output layer."""
    num_bytes = weight_bytes(size, ds.model_copy(update={"load_in_4bit": False}), ranks=ranks)
    if ds.zero_stage == 3:
        num_bytes += size.vocabulary * size.text.hidden * _BYTES[ds.param_dtype]
    return MemoryPart("teacher", num_bytes, "set ds.zero_stage 3, on more GPUs, or use a smaller teacher")


def _offloadable(
    name: str, section: str, size: Sizes, ds: Ds, ranks: int, tokens: int, device: str, *, is_offloaded: bool
) -> RoleMemory:
    ds = ds.model_copy(update={"load_in_4bit": False})
    flag = f"set {section}.offload" if device != "cpu" and not is_offloaded else "set ds.zero_stage 3, on more GPUs"
    num_bytes = weight_bytes(size, ds, ranks=ranks)
    weights = MemoryPart("weights", num_bytes, flag, in_host_memory=is_offloaded and device != "cpu")
    return _frozen(name, size, ds, weights, tokens, device)


def _frozen(name: str, size: Sizes, ds: Ds, weights: MemoryPart, tokens: int, device: str) -> RoleMemory:
    s = _BYTES[ds.param_dtype]
    num_bytes = saved_per_token(size.text, s, adapted=True) * tokens + _logit_bytes(size, tokens, device)
    activations = MemoryPart("activations", num_bytes, "lower rollout.max_tokens_per_gpu", stays=False)
    return RoleMemory(name, (weights, activations))


def weight_bytes(size: Sizes, ds: Ds, *, ranks: int) -> float:
    """Return the bytes of the model on one trainer rank, without adapters."""
    s = _BYTES[ds.param_dtype]
    unsharded = float(size.total * s)
    if ds.load_in_4bit:
        unsharded = size.quantized * FOUR_BIT_BYTES + (size.total - size.quantized) * s
    if ds.zero_stage < 3 or ranks == 1:
        return unsharded
    # 4-bit weights are loaded in full before they are sharded.
    return max(unsharded if ds.load_in_4bit else 0.0, unsharded / ranks + min(unsharded, _LIVE * s))


def _activation_bytes(
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
    """Peak bytes of a pass. A frozen tower saves nothing for the backward pass."""
    one_layer = max(tokens * saved_per_token(size.text, s, adapted=adapted), _logit_bytes(size, tokens, device))
    text = saved_bytes(size.text, tokens, s, model=model, adapted=adapted) + one_layer
    if size.tower is None or not patches:
        return text
    layer = patches * saved_per_token(size.tower, s, adapted=adapted)
    if reaches_vision:
        return text + saved_bytes(size.tower, patches, s, model=model, adapted=adapted)
    return max(text, layer)


def saved_bytes(blocks: Blocks, tokens: int, s: int, *, model: Model, adapted: bool) -> float:
    """Return the bytes that all layers save for the backward pass of this many tokens."""
    if model.gradient_checkpointing_enable:
        return tokens * (blocks.layers * blocks.hidden * s + saved_per_token(blocks, s, adapted=adapted))
    per_token = blocks.attention_layers * _saved_with_attention(blocks, s, adapted=adapted)
    if (linear := blocks.recurrence) is not None:
        per_token += linear.layers * _saved_with_recurrence(blocks, linear, s, adapted=adapted)
    return tokens * per_token


def saved_per_token(blocks: Blocks, s: int, *, adapted: bool) -> float:
    """Return the bytes that one layer, the largest, saves per token for its backward pass."""
    with_attention = _saved_with_attention(blocks, s, adapted=adapted)
    if blocks.recurrence is None:
        return with_attention
    return max(with_attention, _saved_with_recurrence(blocks, blocks.recurrence, s, adapted=adapted))


def _saved_with_attention(blocks: Blocks, s: int, *, adapted: bool) -> float:
    """Attention saves queries, keys, values and output, and the inputs of their norms."""
    heads = blocks.queries + blocks.keys
    norms = heads * (4 + (0 if adapted else s)) if blocks.norms_heads else 0
    attention = s * (2 * blocks.queries + 2 * blocks.keys * blocks.repeats + blocks.queries)
    return norms + attention + _saved_beside(blocks, s, adapted=adapted)


def _saved_with_recurrence(blocks: Blocks, linear: Recurrence, s: int, *, adapted: bool) -> float:
    """Linear attention, as PyTorch computes it, in chunks of 64 tokens: in fp32, for each head, 8 times the keys and 6
    times the values, 5 matrices of a chunk by a chunk, and a state per chunk; inputs and outputs of convolution and
    gate. Counted in Transformers 5.19 within 1 %; fused kernels save less."""
    chunks = 8 * linear.keys + 6 * linear.values + 5 * _CHUNK + linear.keys * linear.values / _CHUNK
    inputs = 2 * linear.queries + 5 * linear.heads * linear.values
    return 4 * linear.heads * chunks + s * inputs + _saved_beside(blocks, s, adapted=adapted)


def _saved_beside(blocks: Blocks, s: int, *, adapted: bool) -> float:
    """Two norms save their input in fp32, and their normalized input if they train. Linear layers save their inputs: 2
    D, and that of the last projection of the feed-forward, which saves gate, activated gate and up."""
    norms = 2 * blocks.hidden * (4 + (0 if adapted else s))
    return norms + s * (2 * blocks.hidden + 4 * blocks.intermediate)


def _logit_bytes(size: Sizes, tokens: int, device: str) -> float:
    """Three fp32 arrays of a slice of the logits."""
    return 12.0 * min(SLICE[device], tokens * size.vocabulary)


def _num_unfrozen(size: Sizes, model: Model) -> int:
    frozen = {"vision": model.freeze_visual_encoder, "projector": model.freeze_projector, "language": False}
    return sum(count for group, count in size.parameters.items() if not frozen[group])


def _weights_flag(ds: Ds, adapter: AdapterPlan | None) -> str:
    if adapter is not None and not ds.load_in_4bit:
        return "set ds.load_in_4bit"
    return "set ds.lora.rank and ds.load_in_4bit" if adapter is None else "set ds.zero_stage 3, on more GPUs"


def _moment_bytes(size: Sizes, model: Model, adapter: AdapterPlan | None) -> float:
    """Return the bytes per trainable parameter, on average: two moments, or Muon's one for the matrices inside the
    layers."""
    if model.optim != "muon":
        return 2.0 if "8bit" in model.optim else 8.0
    inside = sum(out * inner for out, inner in size.linears.values()) - size.output
    return 4.0 if adapter is not None else 8.0 - 4.0 * inside / size.total


def _activations_flag(role: str, model: Model) -> str:
    less = "lower train.max_tokens_per_gpu, or for long sequences raise ds.sequence_parallel_size"
    return less if model.gradient_checkpointing_enable else f"set {role}.gradient_checkpointing_enable, or {less}"
