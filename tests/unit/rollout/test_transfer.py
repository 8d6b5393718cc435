"""What both ends say to each other before a byte moves. The moving needs GPUs: tests/gpu/test_transfer.py."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from vlmrl.config.data import Columns
from vlmrl.config.vllm import Vllm
from vlmrl.models.weights import device_digest
from vlmrl.rollout.launch import engine_arguments
from vlmrl.rollout.transfer import (
    NcclSender,
    description,
    init_infos,
    merged,
    receive,
    update_info,
)

TENSORS = [("a", torch.arange(6.0).reshape(2, 3)), ("b", torch.ones(4, dtype=torch.bfloat16))]


class Recorder:
    """Takes what a worker's update takes."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}

    def load(self, tensors: Iterable[tuple[str, Tensor]], digest_of: Callable[[str, Tensor], str]) -> None:
        self.digests |= {name: digest_of(name, tensor) for name, tensor in tensors}


class Receiver:
    """vLLM's transfer engine, as far as a worker uses it; what arrives is `TENSORS`, or an error."""

    model_config = "config"

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.target: Any = None
        self.calls: list[str] = []

    def set_weight_update_target(self, model: Any, model_config: Any) -> None:
        assert model_config == self.model_config
        self.target = model

    def reset_weight_update_target(self) -> None:
        self.calls.append("reset")

    def update_weights(self, info: dict[str, Any]) -> None:
        if self.error is not None:
            raise self.error
        self.info = info
        self.target.load_weights(TENSORS)

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def test_a_bucket_is_described_in_plain_values() -> None:
    wanted = {"names": ["a", "b"], "dtype_names": ["float32", "bfloat16"], "shapes": [[2, 3], [4]]}
    assert description(TENSORS) == wanted


def test_a_rank_that_does_not_send_describes_and_keeps_nothing() -> None:
    sender = NcclSender(rank=1, address="nowhere", port=1, world_size=2)
    assert sender.offer(iter(TENSORS)) == description(TENSORS)
    sender.send()
    sender.release()


def test_engines_get_the_handle_of_every_gpu() -> None:
    offers = [
        description(TENSORS) | {"tensor_sizes": [24, 8], "ipc_handles": {gpu: b"h" + gpu.encode()}} for gpu in "xy"
    ]
    assert merged(offers) == offers[0] | {"ipc_handles": {"x": b"hx", "y": b"hy"}}
    assert merged([description(TENSORS)] * 2) == description(TENSORS)


def test_over_nccl_each_worker_of_each_engine_has_a_rank_of_its_own() -> None:
    infos = init_infos("nccl", num_engines=3, tensor_parallel_size=2, address="host", port=5)
    assert [info["rank_offset"] for info in infos] == [1, 3, 5]
    assert {info["world_size"] for info in infos} == {7}


def test_vllm_takes_what_we_say() -> None:
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferInitInfo, IPCWeightTransferUpdateInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo

    where = {"num_engines": 1, "tensor_parallel_size": 1, "address": "host", "port": 5}
    assert NCCLWeightTransferInitInfo(**init_infos("nccl", **where)[0]).packed is False
    assert IPCWeightTransferInitInfo(**init_infos("ipc", **where)[0]).packed is True
    NCCLWeightTransferUpdateInfo(**update_info(description(TENSORS)))
    offer = description(TENSORS) | {"tensor_sizes": [24, 8], "ipc_handles": {"x": pickle.dumps((torch.Tensor, 1))}}
    assert IPCWeightTransferUpdateInfo(**update_info(offer)).ipc_handles == {"x": (torch.Tensor, 1)}


def test_what_arrives_is_proven_and_loaded() -> None:
    engine, update = Receiver(), Recorder()
    receive(engine, update, description(TENSORS))
    assert update.digests == {name: device_digest(name, tensor) for name, tensor in TENSORS}
    assert engine.calls == ["reset"]


def test_a_buffer_of_another_process_is_closed_even_when_loading_fails() -> None:
    engine = Receiver(ValueError("IPC handle not found"))
    with pytest.raises(ValueError, match="handle not found"):
        receive(engine, Recorder(), description(TENSORS) | {"tensor_sizes": [24, 8], "ipc_handles": {}})
    assert engine.calls == ["reset", "shutdown"]


class Tools:
    resize_factor = None


@pytest.mark.parametrize("backend", ["shm", "nccl", "ipc"])
def test_vllm_is_told_of_the_transfer_unless_it_is_shared_memory(backend: str) -> None:
    chosen = Vllm.model_validate({"sync_backend": backend})
    arguments = engine_arguments(vllm=chosen, columns=Columns(), processor=Tools(), top_p=1.0)  # type: ignore[arg-type]
    assert arguments.get("weight_transfer_config") == (None if backend == "shm" else {"backend": backend})
