"""Hands a model's weights out, bucket by bucket: all of them, the base alone, or its adapter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch.distributed
from transformers import PreTrainedModel

from vlmrl.learning.weights import NamedTensors, cut, gathered, saved_tensors, written
from vlmrl.models.adapter_plan import AdapterPlan, adapter_fingerprint
from vlmrl.models.adapters import adapter_tensors
from vlmrl.models.checksum import device_digest
from vlmrl.models.transfer import Outbox, Ticket, opened
from vlmrl.models.weights import Bucket, fingerprint
from vlmrl.types import Part


class Publisher:
    """One per rank. Every method is a collective: call it on all ranks, in the same order."""

    def __init__(self, net: PreTrainedModel, adapter: AdapterPlan | None) -> None:
        self._net = net
        self._adapter = adapter
        self._part: Part = "whole"
        self._buckets: list[NamedTensors] = []
        self._digests: dict[str, str] = {}
        self._num_bytes = 0
        self._max_bytes = 0
        self._sender: Any = None
        self._outbox = Outbox()
        self._is_first = torch.distributed.get_rank() == 0

    def num_buckets(self, max_bytes: int, part: Part = "whole") -> int:
        """How many buckets that part of the weights goes into when none holds more than `max_bytes`, single tensors
        apart.

        Begins a publish: `published` tells of the buckets since.
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
        self._buckets = cut(tensors, max_bytes=max_bytes)
        return len(self._buckets)

    def share(self, i: int, num_loaded: int) -> Ticket | None:
        """Lay the weights of bucket `i` into memory that the engines of this machine can open; on rank 0 how they do.

        They have the names of the checkpoint, those of an adapter the names of PEFT's files. The engines must have
        loaded the first `num_loaded` buckets: their memory is used again.

        Raises ClusterError when the machine has no memory for it.
        """
        with self._gathered(i) as run:
            if not self._is_first:
                return None
            tensors = self._told(run)
            self._outbox.release(num_loaded)
            ticket, digests = self._outbox.put(tensors)
            self._digests |= digests
            self._num_bytes += _num_bytes(tensors)
            return ticket

    def bucket(self, ticket: Ticket) -> Bucket:
        """What `share` laid into memory, for engines of another machine. No collective: ask rank 0 alone."""
        return opened(ticket)

    def connect(self, sender: str, **settings: Any) -> None:
        """Make the sender with which `offer` and `send` bring weights to the engines without leaving the device.

        `sender` is the dotted path of its class, one of those of `rollout.device_transfer`, which this package must not
        know. Over NCCL this waits for the engines.
        """
        module, name = sender.rsplit(".", 1)
        self._sender = getattr(import_module(module), name)(rank=torch.distributed.get_rank(), **settings)

    def offer(self, i: int) -> dict[str, Any]:
        """Take bucket `i` onto the device, in place of the one before; what the engines must know of it."""
        with self._gathered(i) as run:
            tensors = self._told(run)
            if self._is_first:
                self._digests |= {name: device_digest(name, tensor) for name, tensor in tensors}
                self._num_bytes += _num_bytes(tensors)
            offer: dict[str, Any] = self._sender.offer(tensors)
        return offer

    def send(self) -> None:
        """Send what was offered; the engines must be receiving it at the same time."""
        self._sender.send()

    def published(self) -> tuple[str, int]:
        """Fingerprint and bytes of all tensors since `num_buckets`, on rank 0: what the engines must hold now."""
        if self._sender is not None:
            self._sender.release()
        self._outbox.begin(keep_bytes=self._max_bytes)
        if self._part == "adapter":
            assert self._adapter is not None
            return adapter_fingerprint(self._digests, self._adapter.scaling), self._num_bytes
        return fingerprint(self._digests), self._num_bytes

    def adapter_is_zero(self) -> bool:
        """No adapter has learnt anything yet: every B is 0, so that the model is its base. The same on every rank."""
        halves: NamedTensors = [(n, t) for n, t in adapter_tensors(self._net) if n.endswith(".lora_B.weight")]
        with gathered(halves):
            return not any(bool(tensor.any()) for _, tensor in halves)

    @contextmanager
    def _gathered(self, i: int) -> Iterator[NamedTensors]:
        merges = self._part == "whole" and self._adapter is not None
        with gathered(self._buckets[i], adapters_of=self._net if merges else None):
            yield self._buckets[i]

    def _told(self, run: NamedTensors) -> NamedTensors:
        return run if self._part == "adapter" else written(self._net, run, merge=self._part == "whole")


def _num_bytes(tensors: NamedTensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
