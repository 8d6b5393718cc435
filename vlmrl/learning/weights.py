"""Whole tensors out of a model whose parameters may be sharded over the ranks, under the names of its checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import deepspeed
import torch.distributed
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from vlmrl.models.adapters import delta
from vlmrl.models.quantize import dequantized, is_four_bit, true_dtype, true_shape

NamedTensors = list[tuple[str, Tensor]]


def saved_tensors(net: PreTrainedModel) -> NamedTensors:
    """What `save_pretrained` writes of a model, or of the base of one with adapters, under the names that the model has
    in memory: one entry for tied weights.

    The tensors of a ZeRO-3 model are empty shards, and some may be in 4 bits: `full_size`, `gathered` and `written` see
    through that.
    """
    tied = set(getattr(net, "all_tied_weights_keys", None) or {})
    # A layer in 4 bits adds entries of its own to the state, which are no parameters.
    own = {name for name, _ in (*net.named_parameters(remove_duplicate=False), *net.named_buffers())}
    saved = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in net.state_dict(keep_vars=True).items()
        if name in own and ".lora_" not in name
    }
    unique: dict[int, str] = {}
    for name, tensor in saved.items():
        if name not in tied:
            unique.setdefault(id(tensor), name)
    return [(name, saved[name]) for name in unique.values()]


def full_size(tensor: Tensor) -> int:
    """Bytes of the tensor as it is written: whole, and not in 4 bits."""
    return math.prod(true_shape(tensor)) * true_dtype(tensor).itemsize


def cut(tensors: Sequence[tuple[str, Tensor]], *, max_bytes: int) -> list[NamedTensors]:
    """Runs of tensors that stay within `max_bytes`; a tensor that is larger has a run of its own."""
    runs: list[NamedTensors] = []
    room = 0
    for name, tensor in tensors:
        size = full_size(tensor)
        if not runs or size > room:
            runs.append([])
            room = max_bytes
        runs[-1].append((name, tensor))
        room -= size
    return runs


def gathered(tensors: NamedTensors, *, adapters_of: PreTrainedModel | None = None) -> AbstractContextManager[None]:
    """Within the context, each of the tensors is whole on every rank, and so are the adapters on them in the model
    `adapters_of`. A collective."""
    found = [tensor for _, tensor in tensors]
    if adapters_of is not None:
        layers = [layer for name, _ in tensors if (layer := adapted_layer(adapters_of, name)) is not None]
        found += [p for layer in layers for name, p in layer.named_parameters() if name.startswith("lora_")]
    sharded = [tensor for tensor in found if hasattr(tensor, "ds_id")]
    context: AbstractContextManager[None] = deepspeed.zero.GatheredParameters(sharded) if sharded else nullcontext()
    return context


def written(net: PreTrainedModel, tensors: NamedTensors, *, merge: bool) -> NamedTensors:
    """The tensors as a checkpoint has them: numbers where they are in 4 bits, and under its names.

    Call within `gathered`. With `merge` each has what its adapter adds to it, summed in fp32 and rounded once; that
    takes `gathered(tensors, adapters_of=net)`.
    """
    return checkpoint_names(net, [(name, _real(net, name, tensor, merge=merge)) for name, tensor in tensors])


def whole_tensors(net: PreTrainedModel, tensors: NamedTensors, *, max_bytes: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors in CPU memory, none of them in 4 bits, on rank 0; nothing on the others.

    A collective: every rank must exhaust it. At most `max_bytes` of shards are gathered at a time.
    """
    is_first = torch.distributed.get_rank() == 0
    for run in cut(tensors, max_bytes=max_bytes):
        with gathered(run):
            whole = [(name, _on_cpu(tensor)) for name, tensor in run] if is_first else []
        yield from whole


def adapted_layer(net: PreTrainedModel, name: str) -> nn.Module | None:
    """The layer whose weight `saved_tensors` calls `name`, where it has an adapter."""
    path, _, what = name.rpartition(".")
    layer = net.get_submodule(path)
    return layer if what == "weight" and hasattr(layer, "lora_A") else None


def checkpoint_names(net: PreTrainedModel, tensors: NamedTensors) -> NamedTensors:
    """The tensors under the names, and in the form, that the checkpoint on disk has.

    Transformers 5 renames weights while it loads some models, and merges or splits those of a few. `save_pretrained`
    undoes that with the same function.
    """
    return list(revert_weight_conversion(net, dict(tensors)).items())


def _real(net: PreTrainedModel, name: str, tensor: Tensor, *, merge: bool) -> Tensor:
    base = dequantized(tensor)
    layer = adapted_layer(net, name) if merge else None
    return base if layer is None else (base.float() + delta(layer)).to(base.dtype)


def _on_cpu(tensor: Tensor) -> Tensor:
    # What was gathered is released again, so it must be copied even where it is on the CPU already.
    return dequantized(tensor).to("cpu", copy=hasattr(tensor, "ds_id") and not is_four_bit(tensor))
