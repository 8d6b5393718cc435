"""Patches of vLLM: images of preempted requests, and adapters on CPU."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vlmrl.rollout.vllm_patches import KeepImages, add_adapter_output, apply_adapter_by_row, keep_images
from vlmrl.system.lifeline import Lifeline

scheduler_output = pytest.importorskip("vllm.v1.core.sched.output")


@pytest.fixture
def unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore vLLM's own function after the test."""
    monkeypatch.setattr(scheduler_output, "strip_covered_mm_data", scheduler_output.strip_covered_mm_data)


def has_pixels() -> list[bool]:
    """Which of a request's two images go to the workers with their pixels: 8 of its 20 tokens are cached, and the first
    image is among them."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange

    features = [
        MultiModalFeatureSpec(
            data=MultiModalKwargsItem({}),
            modality="image",
            identifier=str(offset),
            mm_position=PlaceholderRange(offset=offset, length=4),
        )
        for offset in (2, 12)
    ]
    request: Any = SimpleNamespace(
        request_id="one",
        prompt_token_ids=list(range(20)),
        mm_features=features,
        num_computed_tokens=8,
        sampling_params=None,
        pooling_params=None,
        lora_request=None,
        prompt_embeds=None,
        prompt_is_token_ids=None,
        replay_start=0,
    )
    data = scheduler_output.NewRequestData.from_request(request, block_ids=([0],))
    return [feature.data is not None for feature in data.mm_features]


@pytest.mark.usefixtures("unpatched")
def test_without_the_patch_vllm_drops_the_pixels_of_a_cached_image() -> None:
    assert has_pixels() == [False, True]


@pytest.mark.usefixtures("unpatched")
def test_pixels_are_kept_in_the_process_that_unpickles_the_argument_and_not_before() -> None:
    pickled = pickle.dumps(KeepImages())
    assert has_pixels() == [False, True]
    unpickled = pickle.loads(pickled)
    assert has_pixels() == [True, True]
    assert isinstance(unpickled, KeepImages)
    assert isinstance(unpickled, Lifeline)
    keep_images()
    assert has_pixels() == [True, True]


def test_a_vllm_without_the_patched_function_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(scheduler_output, "strip_covered_mm_data")
    with pytest.raises(AssertionError, match="drops the pixels of cached images in another way"):
        keep_images()


A = torch.tensor([[[[1.0, 0.0], [0.0, 0.0]]]])
"""Room for rank 2, of which 1 is used: it reads the first input."""
B = torch.tensor([[[[3.0, 0.0], [5.0, 0.0]]]])
ZERO_A, ZERO_B = torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 1, 2)
INPUTS = torch.tensor([[1.0, 7.0], [2.0, 7.0], [-1.0, 7.0]])


def outputs(rows: Tensor | None, dtype: torch.dtype = torch.float32) -> list[list[float]]:
    output = torch.ones(3, 3, dtype=dtype)
    a, b = (ZERO_A.to(dtype), A.to(dtype)), (ZERO_B.to(dtype), B.to(dtype))
    add_adapter_output(output, INPUTS.to(dtype), a, b, (1, 2), rows=rows)
    return output.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_part_of_a_packed_layer_gets_its_own_matrices(dtype: torch.dtype) -> None:
    assert outputs(None, dtype) == [[1, 4, 6], [1, 7, 11], [1, -2, -4]]


def test_rows_without_the_adapter_do_not_change() -> None:
    assert outputs(torch.tensor([True, False, True])) == [[1, 4, 6], [1, 1, 1], [1, -2, -4]]


class Wrapper:
    """The fields of vLLM's PunicaWrapperCPU that describe a batch."""

    def __init__(self, slots: list[int]) -> None:
        self.token_lora_indices = torch.tensor(slots)
        self.batch_size = len(torch.unique_consecutive(self.token_lora_indices))
        self.no_lora = self.batch_size == 1 and slots[0] == -1


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        ([-1, -1, -1], [[1, 1], [1, 1], [1, 1]]),
        ([0, 0, 0], [[4, 6], [7, 11], [-2, -4]]),
        ([-1, 0, 0], [[1, 1], [7, 11], [-2, -4]]),
    ],
)
def test_a_patched_wrapper_applies_the_adapter_to_the_rows_that_ask_for_it(
    slots: list[int], expected: list[list[float]]
) -> None:
    wrapper = Wrapper(slots)
    apply_adapter_by_row(wrapper)
    output = torch.ones(3, 2)
    wrapper.add_lora_linear(output, INPUTS, (A,), (B,), 1.0, (2,))  # type: ignore[attr-defined]
    assert output.tolist() == expected
