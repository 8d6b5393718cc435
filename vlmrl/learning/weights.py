"""Full tensors of a model that may be sharded over the ranks, and the trainer's end of a weight sync.

Tensors have the names of the model's checkpoint, which may differ from those in memory; tensors of an adapter have the
names of PEFT's files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import deepspeed
import torch.distributed
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from vlmrl.models.adapter_plan import AdapterPlan, adapter_fingerprint
from vlmrl.models.adapters import adapter_tensors, delta
from vlmrl.models.expert_parallel import is_shared, whole_experts
from vlmrl.models.quantize import dequantized, is_four_bit, true_dtype, true_shape
from vlmrl.models.shared_memory import Outbox, Ticket, open_ticket
from vlmrl.models.weight_buckets import Bucket, device_digest, fingerprint
from vlmrl.types import Part

NamedTensors = list[tuple[str, Tensor]]


def saved_tensors(net: PreTrainedModel) -> NamedTensors:
    """Return the tensors that `save_pretrained` writes, without adapters, under their names in memory; tied weights
    once.

    The tensors of a ZeRO-3 model are empty shards, and some may be in 4 bits: `written_bytes`, `gathered` and
    `checkpoint_tensors` account for that.
    """
    tied = set(getattr(net, "all_tied_weights_keys", None) or {})
    # Layers in 4 bits add entries to the state that are no parameters.
    names = {name for name, _ in (*net.named_parameters(remove_duplicate=False), *net.named_buffers())}
    saved = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in net.state_dict(keep_vars=True).items()
        if name in names and ".lora_" not in name
    }
    unique: dict[int, str] = {}
    for name, tensor in saved.items():
        if name not in tied:
            unique.setdefault(id(tensor), name)
    return [(name, saved[name]) for name in unique.values()]


def written_bytes(tensor: Tensor) -> int:
    """Return the bytes of the tensor as it is written: unsharded and dequantized."""
    return math.prod(true_shape(tensor)) * true_dtype(tensor).itemsize


def split_by_bytes(tensors: Sequence[tuple[str, Tensor]], *, max_bytes: int) -> list[NamedTensors]:
    """Split into runs of at most `max_bytes`; a larger tensor gets a separate run."""
    runs: list[NamedTensors] = []
    room = 0
    for name, tensor in tensors:
        size = written_bytes(tensor)
        if not runs or size > room:
            runs.append([])
            room = max_bytes
        runs[-1].append((name, tensor))
        room -= size
    return runs


@contextmanager
def gathered(tensors: NamedTensors, *, adapters_of: PreTrainedModel | None = None) -> Iterator[None]:
    """Gather the tensors on every rank within the context, and with `adapters_of` their adapters in that model. A
    collective."""
    needed = [tensor for _, tensor in tensors]
    if adapters_of is not None:
        layers = [layer for name, _ in tensors if (layer := adapted_layer(adapters_of, name)) is not None]
        needed += [p for layer in layers for name, p in layer.named_parameters() if name.startswith("lora_")]
    with ExitStack() as stack:
        # Experts that are spread over the ranks are sharded over fewer of them.
        for experts in (False, True):
            sharded = [t for t in needed if hasattr(t, "ds_id") and is_shared(t) == experts]
            if sharded:
                stack.enter_context(deepspeed.zero.GatheredParameters(sharded))
        stack.enter_context(whole_experts([tensor for tensor in needed if is_shared(tensor)]))
        yield


def checkpoint_tensors(net: PreTrainedModel, tensors: NamedTensors, *, merge: bool) -> NamedTensors:
    """Dequantize the tensors and rename them as in the checkpoint.

    Call within `gathered`. With `merge`, adapters are added, summed in fp32 and rounded once; that takes
    `gathered(tensors, adapters_of=net)`.
    """
    return checkpoint_names(net, [(name, _materialize(net, name, tensor, merge=merge)) for name, tensor in tensors])


def whole_tensors(
    net: PreTrainedModel, tensors: NamedTensors, *, max_bytes: int, merge: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield the full tensors, dequantized, in CPU memory, on rank 0; yield nothing on other ranks.

    A collective: every rank must exhaust it. At most `max_bytes` of shards are gathered at a time. With `merge`,
    adapters are added to the weights of `net`; see `checkpoint_tensors`.
    """
    is_first = torch.distributed.get_rank() == 0
    for run in split_by_bytes(tensors, max_bytes=max_bytes):
        with gathered(run, adapters_of=net if merge else None):
            whole = [(name, _whole(net, name, tensor, merge=merge)) for name, tensor in run] if is_first else []
        yield from whole


def adapted_layer(net: PreTrainedModel, name: str) -> nn.Module | None:
    """Return the layer of the weight `name`, a name of `saved_tensors`; None if it has no adapter."""
    path, _, attribute = name.rpartition(".")
    layer = net.get_submodule(path)
    return layer if attribute == "weight" and hasattr(layer, "lora_A") else None


def checkpoint_names(net: PreTrainedModel, tensors: NamedTensors) -> NamedTensors:
    """Rename, split and merge the tensors as in the checkpoint on disk.

    Transformers 5 renames weights while it loads some models, and merges or splits those of a few. `save_pretrained`
    reverts that with the same function.
    """
    return list(revert_weight_conversion(net, dict(tensors)).items())


def _materialize(net: PreTrainedModel, name: str, tensor: Tensor, *, merge: bool) -> Tensor:
    base = dequantized(tensor)
    layer = adapted_layer(net, name) if merge else None
    return base if layer is None else (base.float() + delta(layer)).to(base.dtype)


def _whole(net: PreTrainedModel, name: str, tensor: Tensor, *, merge: bool) -> Tensor:
    if merge and adapted_layer(net, name) is not None:
        return _materialize(net, name, tensor, merge=True).cpu()
    return _on_cpu(tensor)


def _on_cpu(tensor: Tensor) -> Tensor:
    # A gathered tensor is released again, so it must be copied even if it is on the CPU.
    is_gathered = hasattr(tensor, "ds_id") or is_shared(tensor)
    return dequantized(tensor).to("cpu", copy=is_gathered and not is_four_bit(tensor))


class DeviceSender(Protocol):
    """Transfer of weights from the GPU of one rank to those of the engines."""

    def offer(self, tensors: NamedTensors) -> dict[str, Any]:
        """Stage the tensors on the device; returns the description that the engines need to receive them."""

    def send(self) -> None:
        """Send the offered tensors."""

    def release(self) -> None:
        """Free the tensors that `offer` staged."""


class MakeSender(Protocol):
    """Constructor of a rank's sender."""

    def __call__(self, *, rank: int) -> DeviceSender: ...


class WeightSender:
    """The trainer's end of a weight sync, one per rank: sends all weights, only the base, or the adapter.

    Every method but `bucket` is a collective: call it on all ranks, in the same order.
    """

    def __init__(self, net: PreTrainedModel, adapter: AdapterPlan | None) -> None:
        self._net = net
        self._adapter = adapter
        self._part: Part = "whole"
        self._buckets: list[NamedTensors] = []
        self._digests: dict[str, str] = {}
        self._num_bytes = 0
        self._max_bytes = 0
        self._sender: DeviceSender | None = None
        self._outbox = Outbox()
        self._is_first = torch.distributed.get_rank() == 0

    def begin_sync(self, max_bytes: int, part: Part = "whole") -> int:
        """Begin a sync; returns the number of buckets for this part of the weights.

        A bucket holds at most `max_bytes`, or a single larger tensor. `finish_sync` covers all buckets since this call.
        """
        assert part == "whole" or self._adapter is not None, f"without an adapter there is no {part}"
        self._part = part
        self._digests = {}
        self._num_bytes = 0
        self._max_bytes = max_bytes
        self._outbox.begin(keep_bytes=max_bytes)
        tensors: NamedTensors = (
            list(adapter_tensors(self._net)) if part == "adapter" else list(saved_tensors(self._net))
        )
        self._buckets = split_by_bytes(tensors, max_bytes=max_bytes)
        return len(self._buckets)

    def share(self, i: int, num_loaded: int) -> Ticket | None:
        """Copy the weights of bucket `i` into shared memory for the engines of this machine; rank 0 returns the ticket
        that opens it.

        The engines must have loaded the first `num_loaded` buckets: their memory is reused.

        Raises ClusterError when the machine lacks the memory.
        """
        with self._gathered(i) as run:
            if not self._is_first:
                return None
            tensors = self._tensors(run)
            self._outbox.release(num_loaded)
            ticket, digests = self._outbox.put(tensors)
            self._digests |= digests
            self._num_bytes += _num_bytes(tensors)
            return ticket

    def bucket(self, ticket: Ticket) -> Bucket:
        """Read a shared bucket back, for engines of another machine. Not a collective: call it only on rank 0."""
        return open_ticket(ticket)

    def connect(self, make_sender: MakeSender) -> None:
        """Make the sender that `offer` and `send` use to send weights from device to device.

        Over NCCL this waits for the engines.
        """
        self._sender = make_sender(rank=torch.distributed.get_rank())

    def offer(self, i: int) -> dict[str, Any]:
        """Stage bucket `i` on the device, in place of the previous one; returns its description for the engines."""
        assert self._sender is not None, "offer comes after connect"
        with self._gathered(i) as run:
            tensors = self._tensors(run)
            if self._is_first:
                self._digests |= {name: device_digest(name, tensor) for name, tensor in tensors}
                self._num_bytes += _num_bytes(tensors)
            return self._sender.offer(tensors)

    def send(self) -> None:
        """Send the offered bucket; the engines must be receiving it at the same time."""
        assert self._sender is not None, "send comes after connect"
        self._sender.send()

    def finish_sync(self) -> tuple[str, int]:
        """End a sync; rank 0 returns the fingerprint and bytes of all tensors since `begin_sync`.

        The engines must report the same fingerprint.
        """
        if self._sender is not None:
            self._sender.release()
        self._outbox.begin(keep_bytes=self._max_bytes)
        if self._part == "adapter":
            assert self._adapter is not None
            return adapter_fingerprint(self._digests, self._adapter.scaling), self._num_bytes
        return fingerprint(self._digests), self._num_bytes

    def adapter_is_zero(self) -> bool:
        """Whether every B of the adapter is 0, as before the first update, so that the model equals its base. The same
        on all ranks."""
        b_tensors: NamedTensors = [(n, t) for n, t in adapter_tensors(self._net) if n.endswith(".lora_B.weight")]
        with gathered(b_tensors):
            return not any(bool(tensor.any()) for _, tensor in b_tensors)

    @contextmanager
    def _gathered(self, i: int) -> Iterator[NamedTensors]:
        merge = self._part == "whole" and self._adapter is not None
        with gathered(self._buckets[i], adapters_of=self._net if merge else None):
            yield self._buckets[i]

    def _tensors(self, run: NamedTensors) -> NamedTensors:
        return run if self._part == "adapter" else checkpoint_tensors(self._net, run, merge=self._part == "whole")


def _num_bytes(tensors: NamedTensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
