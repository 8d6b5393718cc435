"""Whole tensors out of a model whose parameters may be sharded over the ranks, under the names of its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import deepspeed
import torch.distributed
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

NamedTensors = list[tuple[str, Tensor]]


def saved_tensors(net: PreTrainedModel) -> NamedTensors:
    """What `save_pretrained` writes, under the names that the model has in memory: one entry for tied weights.

    The tensors of a ZeRO-3 model are empty shards: `full_size` and `gathered` see through that.
    """
    tied = set(getattr(net, "all_tied_weights_keys", None) or {})
    saved = net.state_dict(keep_vars=True)
    unique: dict[int, str] = {}
    for name, tensor in saved.items():
        if name not in tied:
            unique.setdefault(id(tensor), name)
    return [(name, saved[name]) for name in unique.values()]


def full_size(tensor: Tensor) -> int:
    """Bytes of the whole tensor, sharded or not."""
    numel = getattr(tensor, "ds_numel", tensor.numel())
    return int(numel) * tensor.element_size()


def full_shape(tensor: Tensor) -> tuple[int, ...]:
    """Shape of the whole tensor, sharded or not."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


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


def gathered(tensors: NamedTensors) -> AbstractContextManager[None]:
    """Within the context, each of the tensors is whole on every rank. A collective."""
    sharded = [t for _, t in tensors if hasattr(t, "ds_id")]
    context: AbstractContextManager[None] = deepspeed.zero.GatheredParameters(sharded) if sharded else nullcontext()
    return context


def whole_tensors(net: PreTrainedModel, tensors: NamedTensors, *, max_bytes: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors in CPU memory, on rank 0; nothing on the others. A collective: every rank must exhaust it.

    At most `max_bytes` of shards are gathered at a time.
    """
    is_first = torch.distributed.get_rank() == 0
    for run in cut(tensors, max_bytes=max_bytes):
        with gathered(run):
            whole = [(name, _on_cpu(tensor)) for name, tensor in run] if is_first else []
        yield from whole


def checkpoint_names(net: PreTrainedModel, tensors: NamedTensors) -> NamedTensors:
    """The tensors under the names, and in the form, that the checkpoint on disk has.

    Transformers 5 renames weights while it loads some models, and merges or splits those of a few. `save_pretrained`
    undoes that with the same function.
    """
    return list(revert_weight_conversion(net, dict(tensors)).items())


def _on_cpu(tensor: Tensor) -> Tensor:
    # What was gathered is released again, so it must be copied even where it is on the CPU already.
    return tensor.detach().to("cpu", copy=hasattr(tensor, "ds_id"))
