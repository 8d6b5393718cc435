"""How a bucket of weights gets from the learner's GPU to the engines' without the host: vLLM's weight-transfer API.

Over NCCL where trainer and engines have GPUs of their own, by CUDA IPC where they share them. Written against vLLM 0.32
and not yet run on a GPU. Each rank of the learner has a sender; the engine's end is vLLM's own transfer engine in each
worker, which hands what arrives to the worker's `WeightUpdate`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from vlmrl.models.weights import device_digest

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

Backend = Literal["nccl", "ipc"]

Offer = dict[str, Any]
"""What the engines must know of a bucket before it comes: vLLM's update info, in plain values that any RPC carries."""


class NcclSender:
    """Broadcasts from rank 0 to all workers of all engines; the other ranks have nothing to do.

    A bucket lies on the device from `offer` to the next one or `release`, as it does with `IpcSender`.
    """

    def __init__(self, *, rank: int, address: str, port: int, world_size: int) -> None:
        """Blocks until all workers have joined. `world_size` counts them and rank 0."""
        self._tensors: list[Tensor] = []
        self._group: PyNcclCommunicator | None = None
        if rank == 0:
            from vllm.distributed.weight_transfer.nccl_common import trainer_init

            rendezvous = {"master_address": address, "master_port": port, "world_size": world_size}
            self._group = trainer_init(rendezvous)

    def offer(self, tensors: Iterable[tuple[str, Tensor]]) -> Offer:
        """Take the tensors, on the device; what they lie in may be freed or changed afterwards."""
        named = list(tensors)
        if self._group is not None:
            self._tensors = [tensor.detach().clone(memory_format=torch.contiguous_format) for _, tensor in named]
        return description(named)

    def send(self) -> None:
        """Blocks until the engines have received, so they must be receiving at the same time."""
        if self._group is None:
            return
        stream = torch.cuda.current_stream()
        for tensor in self._tensors:
            self._group.broadcast(tensor, src=0, stream=stream)
        stream.synchronize()

    def release(self) -> None:
        self._tensors = []


class IpcSender:
    """Packs the bucket on every rank's GPU, from where the engine worker on that GPU copies it."""

    def __init__(self, *, rank: int) -> None:
        del rank  # every rank is the one of its GPU
        self._gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        self._packing: Iterator[Any] | None = None

    def offer(self, tensors: Iterable[tuple[str, Tensor]]) -> Offer:
        """Copy the tensors into a buffer that another process on the same GPU can open."""
        from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_producer

        self.release()
        named = [(name, tensor.detach()) for name, tensor in tensors]
        sizes = [tensor.numel() * tensor.element_size() for _, tensor in named]
        # One chunk, for the buffer is as large as the bucket. vLLM's generator owns it: it lives until `release`.
        self._packing = packed_ipc_producer(iter(named), self._gpu, lambda item: item[1], buffer_size_bytes=sum(sizes))
        chunk = next(self._packing)
        # As bytes, because vLLM's RPC carries no classes unless it is told to unpickle whatever comes.
        handles = {gpu: pickle.dumps(arguments) for gpu, arguments in chunk.ipc_handle.items()}
        return description(named) | {"tensor_sizes": chunk.tensor_sizes, "ipc_handles": handles}

    def send(self) -> None:
        """The engines fetch the bucket themselves."""

    def release(self) -> None:
        """Free the buffer; nobody may be reading it."""
        if self._packing is not None:
            self._packing = None
            torch.cuda.ipc_collect()


def description(named: Sequence[tuple[str, Tensor]]) -> Offer:
    """Names, dtypes and shapes, in the order in which the tensors travel."""
    return {
        "names": [name for name, _ in named],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
        "shapes": [list(tensor.shape) for _, tensor in named],
    }


def merged(offers: Sequence[Offer]) -> Offer:
    """One offer for all engines out of those of all ranks: each worker looks for the handle of its own GPU."""
    offer = dict(offers[0])
    if "ipc_handles" in offer:
        offer["ipc_handles"] = {gpu: handle for other in offers for gpu, handle in other["ipc_handles"].items()}
    return offer


def update_info(offer: Offer) -> dict[str, Any]:
    """The fields of vLLM's NCCLWeightTransferUpdateInfo or IPCWeightTransferUpdateInfo."""
    if "ipc_handles" not in offer:
        return offer
    # Our own learner wrote them.
    return offer | {"ipc_handles": {gpu: pickle.loads(handle) for gpu, handle in offer["ipc_handles"].items()}}


def init_infos(
    backend: Backend, *, num_engines: int, tensor_parallel_size: int, address: str, port: int
) -> list[dict[str, Any]]:
    """For each engine the fields of vLLM's NCCLWeightTransferInitInfo or IPCWeightTransferInitInfo.

    NCCL sends tensor by tensor: packing would save launches, cost a copy, and spread the loading over two streams.
    """
    if backend == "ipc":
        return [{"packed": True}] * num_engines
    world = {"master_address": address, "master_port": port, "world_size": 1 + num_engines * tensor_parallel_size}
    return [world | {"rank_offset": 1 + n * tensor_parallel_size, "packed": False} for n in range(num_engines)]


class Update(Protocol):
    """What takes the tensors: `worker_extension.WeightUpdate`."""

    def load(self, tensors: Iterable[tuple[str, Tensor]], digest_of: Callable[[str, Tensor], str]) -> None: ...


class _Target:
    """Stands where vLLM's transfer engine expects the model, so that each tensor is proven before it is loaded."""

    def __init__(self, update: Update) -> None:
        self._update = update

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._update.load(weights, device_digest)


def receive(engine: Any, update: Update, offer: Offer) -> None:
    """In a worker of vLLM: let its transfer engine (a WeightTransferEngine) receive the bucket, for `update`."""
    engine.set_weight_update_target(_Target(update), engine.model_config)
    try:
        engine.update_weights(update_info(offer))
    finally:
        engine.reset_weight_update_target()
        if "ipc_handles" in offer:
            # Closes the learner's buffer, which is a new one with each bucket, and nothing else.
            engine.shutdown()
