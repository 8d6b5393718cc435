"""Transfer of weight buckets from the trainer's GPUs to the engines' without the host, by vLLM's weight-transfer API.

NCCL where trainer and engines have separate GPUs, CUDA IPC where they share them. Each rank of the trainer has a
sender; the receiver is vLLM's own transfer engine in each worker, which passes the tensors to the worker's
`WeightUpdate`. Written for vLLM 0.32; not yet run on a GPU.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from vlmrl.models.weight_buckets import device_digest

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

Backend = Literal["nccl", "ipc"]

Offer = dict[str, Any]
"""Description of a bucket, sent before it: vLLM's update info as plain values, which any RPC can carry."""


class NcclSender:
    """Sender that broadcasts from rank 0 to all workers of all engines. The other ranks do nothing.

    A bucket stays on the device from `offer` until the next `offer` or `release`, as with `IpcSender`.
    """

    def __init__(self, *, rank: int, address: str, port: int, world_size: int) -> None:
        """Join the workers; blocks until all have joined. `world_size` counts them and rank 0."""
        self._tensors: list[Tensor] = []
        self._group: PyNcclCommunicator | None = None
        if rank == 0:
            from vllm.distributed.weight_transfer.nccl_common import trainer_init

            rendezvous = {"master_address": address, "master_port": port, "world_size": world_size}
            self._group = trainer_init(rendezvous)

    def offer(self, tensors: Iterable[tuple[str, Tensor]]) -> Offer:
        """Copy the tensors on the device; the originals may be freed or changed afterwards."""
        named = list(tensors)
        if self._group is not None:
            self._tensors = [tensor.detach().clone(memory_format=torch.contiguous_format) for _, tensor in named]
        return describe_tensors(named)

    def send(self) -> None:
        """Send the bucket; blocks until the engines have received it, so they must receive at the same time."""
        if self._group is None:
            return
        stream = torch.cuda.current_stream()
        for tensor in self._tensors:
            self._group.broadcast(tensor, src=0, stream=stream)
        stream.synchronize()

    def release(self) -> None:
        self._tensors = []


class IpcSender:
    """Sender that packs the bucket on each rank's GPU, from where the engine's worker on that GPU copies it."""

    def __init__(self, *, rank: int) -> None:
        del rank  # all ranks send, each to its own GPU
        self._gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        self._packing: Iterator[Any] | None = None

    def offer(self, tensors: Iterable[tuple[str, Tensor]]) -> Offer:
        """Copy the tensors into a buffer that another process on the same GPU can open."""
        from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_producer

        self.release()
        named = [(name, tensor.detach()) for name, tensor in tensors]
        sizes = [tensor.numel() * tensor.element_size() for _, tensor in named]
        # One chunk, because the buffer is as large as the bucket. vLLM's generator owns it until `release`.
        self._packing = packed_ipc_producer(iter(named), self._gpu, lambda item: item[1], buffer_size_bytes=sum(sizes))
        chunk = next(self._packing)
        # As bytes, because vLLM's RPC carries no classes unless it is set to unpickle any object.
        handles = {gpu: pickle.dumps(arguments) for gpu, arguments in chunk.ipc_handle.items()}
        return describe_tensors(named) | {"tensor_sizes": chunk.tensor_sizes, "ipc_handles": handles}

    def send(self) -> None:
        """Do nothing: the engines copy the bucket themselves."""

    def release(self) -> None:
        """Free the buffer. No engine may be reading it."""
        if self._packing is not None:
            self._packing = None
            torch.cuda.ipc_collect()


def describe_tensors(named: Sequence[tuple[str, Tensor]]) -> Offer:
    """Names, dtypes and shapes, in the order in which the tensors are sent."""
    return {
        "names": [name for name, _ in named],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
        "shapes": [list(tensor.shape) for _, tensor in named],
    }


def merge_offers(offers: Sequence[Offer]) -> Offer:
    """Merge the offers of all ranks into one for all engines: each worker looks up the handle of its own GPU."""
    offer = dict(offers[0])
    if "ipc_handles" in offer:
        offer["ipc_handles"] = {gpu: handle for other in offers for gpu, handle in other["ipc_handles"].items()}
    return offer


def update_info(offer: Offer) -> dict[str, Any]:
    """Return the fields of vLLM's NCCLWeightTransferUpdateInfo or IPCWeightTransferUpdateInfo."""
    if "ipc_handles" not in offer:
        return offer
    # Safe to unpickle: our own trainer wrote them.
    return offer | {"ipc_handles": {gpu: pickle.loads(handle) for gpu, handle in offer["ipc_handles"].items()}}


def init_infos(
    backend: Backend, *, num_engines: int, gpus_per_engine: int, address: str, port: int
) -> list[dict[str, Any]]:
    """For each engine, the fields of vLLM's NCCLWeightTransferInitInfo or IPCWeightTransferInitInfo.

    NCCL sends tensor by tensor: packing would save launches, but cost a copy and spread the loading over two streams.
    """
    if backend == "ipc":
        return [{"packed": True}] * num_engines
    world = {"master_address": address, "master_port": port, "world_size": 1 + num_engines * gpus_per_engine}
    return [world | {"rank_offset": 1 + n * gpus_per_engine, "packed": False} for n in range(num_engines)]


class Update(Protocol):
    """Receiver of the tensors: `worker_extension.WeightUpdate`."""

    def load(self, tensors: Iterable[tuple[str, Tensor]], digest_of: Callable[[str, Tensor], str]) -> None: ...


class _Target:
    """Stands in for the model in vLLM's transfer engine, so that each tensor is digested before it is loaded."""

    def __init__(self, update: Update) -> None:
        self._update = update

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._update.load(weights, device_digest)


def receive(engine: Any, update: Update, offer: Offer) -> None:
    """Let the transfer engine of a vLLM worker (a WeightTransferEngine) receive the bucket for `update`."""
    engine.set_weight_update_target(_Target(update), engine.model_config)
    try:
        engine.update_weights(update_info(offer))
    finally:
        engine.reset_weight_update_target()
        if "ipc_handles" in offer:
            # Closes only the trainer's buffer, which is a new one for each bucket.
            engine.shutdown()
