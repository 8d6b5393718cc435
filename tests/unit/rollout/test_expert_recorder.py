"""The experts of each request are kept apart, and a prompt's are found with whichever response computed it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vlmrl.rollout.expert_recorder import ExpertRecorder, attach_experts


class Router:
    def set_capture_fn(self, capture: Any) -> None:
        self.capture = capture


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model runner with two layers of experts: `step` runs a batch of requests."""
    module = pytest.importorskip("vllm.model_executor.layers.fused_moe.layer")
    layers = [SimpleNamespace(router=Router()) for _ in range(2)]
    monkeypatch.setattr(module, "MoERunner", SimpleNamespace)
    batch = SimpleNamespace(req_ids=[], num_computed_tokens_cpu=[])
    runner = SimpleNamespace(input_batch=batch, _prepare_inputs=lambda *_: None)
    recorder = ExpertRecorder(runner, SimpleNamespace(modules=lambda: layers))  # type: ignore[arg-type]

    def step(*requests: tuple[str, int, int]) -> None:
        """Compute tokens `start` to `end` of each request. Layer l chooses experts 10 l + position, and 99."""
        batch.req_ids = [name for name, *_ in requests]
        batch.num_computed_tokens_cpu = [start for _, start, _ in requests]
        runner._prepare_inputs(None, [end - start for _, start, end in requests])
        positions = [position for _, start, end in requests for position in range(start, end)]
        for number, layer in enumerate(layers):
            layer.router.capture(torch.tensor([[10 * number + position, 99] for position in positions]))

    return SimpleNamespace(recorder=recorder, step=step, layers=layers)


def test_experts_go_to_their_request_and_position(worker: Any) -> None:
    worker.step(("0_7-1-aaaaaaaa", 0, 3), ("0_17-1-bbbbbbbb", 2, 4))
    worker.step(("0_17-1-bbbbbbbb", 4, 5), ("0_7-1-aaaaaaaa", 3, 4))
    taken = worker.recorder.take("7-1")
    assert list(taken) == [0]
    assert taken[0][:4, :, 0].tolist() == [[0, 10], [1, 11], [2, 12], [3, 13]]
    assert (taken[0][4:] == -1).all()
    assert worker.recorder.take("7-1") == {}, "they are kept until they are taken"
    assert worker.recorder.take("17-1")[0][:5, 0, 0].tolist() == [-1, -1, 2, 3, 4]


def test_passes_without_requests_are_ignored(worker: Any) -> None:
    worker.step(("3-0-cccccccc", 0, 2))
    for layer in worker.layers:
        layer.router.capture(torch.full((7, 2), 5))
    assert worker.recorder.take("3-0")[0][:2, 0, 0].tolist() == [0, 1]


def test_responses_share_the_experts_of_their_prompt(worker: Any) -> None:
    """The prompt has three tokens; the second response found two of them in the cache."""
    worker.step(("0_5-2-dddddddd", 0, 3), ("1_5-2-dddddddd", 2, 3))
    worker.step(("0_5-2-dddddddd", 3, 4), ("1_5-2-dddddddd", 3, 4))
    completions = [SimpleNamespace(index=i, token_ids=[8, 9], routed_experts=None) for i in (1, 0)]
    output = SimpleNamespace(request_id="5-2", prompt_token_ids=[1, 2, 3], outputs=completions)

    async def call(method: str, name: str) -> list[Any]:
        assert method == "vlmrl_take_experts"
        return [[(i, list(rows.shape), rows.tobytes()) for i, rows in worker.recorder.take(name).items()]]

    asyncio.run(attach_experts(call, output))
    for completion in completions:
        assert completion.routed_experts[:, 0, 0].tolist() == [0, 1, 2, 3]
    completions[0].routed_experts = np.zeros((4, 2, 2), np.uint8)
    asyncio.run(attach_experts(call, output))
    assert completions[0].routed_experts.dtype == np.uint8, "those of vLLM itself stay"
