"""Messages between both ends of a transfer. The transfer itself needs GPUs: tests/gpu/test_transfer.py."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from vlmrl.config.vllm import Vllm
from vlmrl.models.weight_buckets import device_digest
from vlmrl.rollout.gpu_transfer import (
    NcclSender,
    describe_tensors,
    init_infos,
    merge_offers,
    receive,
    update_info,
)
from vlmrl.rollout.launch import engine_arguments

TENSORS = [("a", torch.arange(6.0).reshape(2, 3)), ("b", torch.ones(4, dtype=torch.bfloat16))]


class Recorder:
    """An update that records digests."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}

    def load(self, tensors: Iterable[tuple[str, Tensor]], digest_of: Callable[[str, Tensor], str]) -> None:
        self.digests |= {name: digest_of(name, tensor) for name, tensor in tensors}


class Receiver:
    """The part of vLLM's transfer engine that a worker uses. It receives `TENSORS`, or fails."""

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
    expected = {"names": ["a", "b"], "dtype_names": ["float32", "bfloat16"], "shapes": [[2, 3], [4]]}
    assert describe_tensors(TENSORS) == expected


def test_a_rank_that_does_not_send_only_describes_the_bucket() -> None:
    sender = NcclSender(rank=1, address="nowhere", port=1, world_size=2)
    assert sender.offer(iter(TENSORS)) == describe_tensors(TENSORS)
    sender.send()
    sender.release()


def test_engines_get_the_handle_of_every_gpu() -> None:
    offers = [
        describe_tensors(TENSORS) | {"tensor_sizes": [24, 8], "ipc_handles": {gpu: b"h" + gpu.encode()}} for gpu in "xy"
    ]
    assert merge_offers(offers) == offers[0] | {"ipc_handles": {"x": b"hx", "y": b"hy"}}
    assert merge_offers([describe_tensors(TENSORS)] * 2) == describe_tensors(TENSORS)


def test_over_nccl_all_workers_of_all_engines_have_different_ranks() -> None:
    infos = init_infos("nccl", num_engines=3, gpus_per_engine=2, address="host", port=5)
    assert [info["rank_offset"] for info in infos] == [1, 3, 5]
    assert {info["world_size"] for info in infos} == {7}


def test_vllm_accepts_our_messages() -> None:
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferInitInfo, IPCWeightTransferUpdateInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo

    world = {"num_engines": 1, "gpus_per_engine": 1, "address": "host", "port": 5}
    assert NCCLWeightTransferInitInfo(**init_infos("nccl", **world)[0]).packed is False
    assert IPCWeightTransferInitInfo(**init_infos("ipc", **world)[0]).packed is True
    NCCLWeightTransferUpdateInfo(**update_info(describe_tensors(TENSORS)))
    offer = describe_tensors(TENSORS) | {"tensor_sizes": [24, 8], "ipc_handles": {"x": pickle.dumps((torch.Tensor, 1))}}
    assert IPCWeightTransferUpdateInfo(**update_info(offer)).ipc_handles == {"x": (torch.Tensor, 1)}


def test_received_tensors_are_digested_and_loaded() -> None:
    engine, update = Receiver(), Recorder()
    receive(engine, update, describe_tensors(TENSORS))
    assert update.digests == {name: device_digest(name, tensor) for name, tensor in TENSORS}
    assert engine.calls == ["reset"]


def test_the_buffer_of_another_process_is_closed_even_if_loading_fails() -> None:
    engine = Receiver(ValueError("IPC handle not found"))
    with pytest.raises(ValueError, match="handle not found"):
        receive(engine, Recorder(), describe_tensors(TENSORS) | {"tensor_sizes": [24, 8], "ipc_handles": {}})
    assert engine.calls == ["reset", "shutdown"]


class TextProcessor:
    resize_factor = None


@pytest.mark.parametrize("backend", ["shm", "nccl", "ipc"])
def test_vllm_gets_a_transfer_config_unless_weights_go_through_shared_memory(backend: str) -> None:
    vllm = Vllm.model_validate({"sync_backend": backend})
    arguments = engine_arguments(vllm=vllm, max_images=8, processor=TextProcessor(), top_p=1.0)  # type: ignore[arg-type]
    assert arguments.get("weight_transfer_config") == (None if backend == "shm" else {"backend": backend})
