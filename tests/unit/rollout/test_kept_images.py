"""What vLLM's scheduler hands to the workers of a request whose image lies in the prefix cache."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from vlmrl.rollout.kept_images import KeptImages, keep_images
from vlmrl.system.lifeline import Lifeline

output = pytest.importorskip("vllm.v1.core.sched.output")


@pytest.fixture(autouse=True)
def scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own, again after each test."""
    monkeypatch.setattr(output, "strip_covered_mm_data", output.strip_covered_mm_data)


def handed_on() -> list[bool]:
    """Which of a request's two images go to the workers with their pixels: 8 tokens of 20 are cached, the first image
    among them."""
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
    made = output.NewRequestData.from_request(request, block_ids=([0],))
    return [feature.data is not None for feature in made.mm_features]


def test_without_it_vllm_leaves_the_pixels_of_a_cached_image_behind() -> None:
    assert handed_on() == [False, True]


def test_pixels_are_kept_from_where_the_argument_arrives_and_not_before() -> None:
    packed = pickle.dumps(KeptImages())
    assert handed_on() == [False, True]
    arrived = pickle.loads(packed)
    assert handed_on() == [True, True]
    assert isinstance(arrived, KeptImages)
    assert isinstance(arrived, Lifeline)
    keep_images()
    assert handed_on() == [True, True]


def test_another_vllm_that_has_no_such_function_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(output, "strip_covered_mm_data")
    with pytest.raises(AssertionError, match="another way of leaving pixels behind"):
        keep_images()
