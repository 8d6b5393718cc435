"""Weight transfer between GPUs: the engine holds what was sent, and refuses to generate from incomplete weights.

The test's process is the learner; the engine's worker is a separate process.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vlmrl import plugins
from vlmrl.config.data import Columns
from vlmrl.config.vllm import Vllm
from vlmrl.errors import SyncError
from vlmrl.models import tiny
from vlmrl.models.weight_buckets import checksum, device_digest, fingerprint
from vlmrl.rollout.engine import RolloutEngine
from vlmrl.rollout.gpu_transfer import Backend, IpcSender, NcclSender, init_infos, merge_offers
from vlmrl.rollout.settings import EngineSettings
from vlmrl.types import Group, Prompt, Sampling

GREEDY = Sampling(n=1, temperature=1.0, top_p=1.0, max_new_tokens=8, seed=0)
BACKENDS = [
    "ipc",
    pytest.param("nccl", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")),
]
Named = list[tuple[str, Tensor]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build("qwen3", tmp_path_factory.mktemp("gpu") / "model")


def changed_weights(model: Path) -> Named:
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to("cuda:0")
    tied = set(net.all_tied_weights_keys or {})
    return [(name, tensor.detach() * 1.5) for name, tensor in net.state_dict().items() if name not in tied]


def with_engine(model: Path, backend: Backend, use: Callable[[RolloutEngine, Any], Awaitable[Any]]) -> Any:
    """Start an engine, connect it to a sender, use both, and stop it."""

    async def run() -> Any:
        engine = EngineSettings(
            model=str(model),
            vllm=Vllm(gpu_memory_utilization=0.2, enforce_eager=True, sync_backend=backend),
            columns=Columns(),
            trust_remote_code=False,
            dtype="bf16",
            max_model_len=256,
            top_p=1.0,
            name="vllm",
        ).build()
        await engine.start()
        try:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            rendezvous = {"address": "127.0.0.1", "port": port}
            info = init_infos(backend, num_engines=1, gpus_per_engine=1, **rendezvous)[0]
            build = (
                (lambda: IpcSender(rank=0))
                if backend == "ipc"
                else (lambda: NcclSender(rank=0, world_size=2, **rendezvous))
            )
            _, sender = await asyncio.gather(engine.connect(info), asyncio.to_thread(build))
            return await use(engine, sender)
        finally:
            await engine.shutdown()

    return asyncio.run(run())


async def sync(engine: RolloutEngine, sender: Any, buckets: list[Named], *, version: int) -> str:
    await engine.begin_update(version, readback={"seed": version, "is_full": True})
    for bucket in buckets:
        offer = merge_offers([sender.offer(bucket)])
        await asyncio.gather(engine.receive(offer), asyncio.to_thread(sender.send))
    sender.release()
    return await engine.finish_update(vision_changed=False)


def make_prompt(model: Path) -> Prompt:
    processor = plugins.processor_of(str(model), Columns())
    text = processor.render("2 + 2 = ?", num_images=0, columns=Columns())
    tokens, request = processor.encode(text, [])
    return Prompt(index=0, source="test:0", text=text, tokens=tokens, request=request, label="4")


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_engine_holds_what_was_sent_from_gpu_to_gpu(
    model: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = changed_weights(model)
    if backend == "nccl":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # for the engine's process; this one has its devices already

    async def use(engine: RolloutEngine, sender: Any) -> tuple[list[str], Group]:
        # The second sync has new buffers; the tensors of a layer are split over buckets.
        replies = [await sync(engine, sender, [weights[:5], weights[5:]], version=version) for version in (1, 2)]
        return replies, await engine.generate(make_prompt(model), GREEDY)

    replies, group = with_engine(model, backend, use)
    assert replies == [fingerprint({name: device_digest(name, tensor) for name, tensor in weights})] * 2
    assert {v for rollout in group.rollouts for v in rollout.versions} == {2}


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_engine_refuses_to_generate_after_a_missing_tensor(
    model: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = changed_weights(model)
    if backend == "nccl":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")

    async def use(engine: RolloutEngine, sender: Any) -> int:
        with pytest.raises(SyncError, match="no weights arrived for"):
            await sync(engine, sender, [weights[:-1]], version=1)
        with pytest.raises(SyncError, match="no weights arrived for"):
            await engine.generate(make_prompt(model), GREEDY)
        await sync(engine, sender, [weights], version=2)
        await engine.generate(make_prompt(model), GREEDY)
        return engine.version

    assert with_engine(model, backend, use) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_checksum_is_equal_on_cpu_and_gpu(dtype: torch.dtype) -> None:
    tensor = torch.randn(5_000_001, generator=torch.Generator().manual_seed(0)).to(dtype)  # more than one chunk
    assert checksum(tensor) == checksum(tensor.to("cuda"))
