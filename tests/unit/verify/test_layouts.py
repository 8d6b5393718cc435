"""Which responses the layouts are compared on, and when a run stops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from scripted_loop import make_prompt, make_rollout

from vlmrl.data.media import Blank
from vlmrl.errors import SyncError
from vlmrl.types import Group, Layout, Sample
from vlmrl.verify.layouts import check_layouts


def groups() -> list[Group]:
    """Three of four responses, the last with an image."""
    prompts = [make_prompt(index) for index in range(3)]
    prompts[2] = replace(prompts[2], media=(Blank("grey", (28, 28)),))
    return [
        Group(prompt, tuple(make_rollout(prompt, "?", version=0, length=100) for _ in range(4))) for prompt in prompts
    ]


def test_two_short_responses_of_two_groups_are_compared_images_first() -> None:
    asked: list[Sample] = []

    def compare(samples: Sequence[Sample]) -> dict[Layout, tuple[float, float]]:
        asked.extend(samples)
        return {"packed": (1e-7, 3e-7), "shared": (2e-7, 1e-7)}

    metrics = check_layouts(groups(), compare)
    assert metrics == {"verify/layouts/values_gap": 2e-7, "verify/layouts/gradients_gap": 3e-7}
    assert [(sample.source, sample.group, int(sample.sampled.sum())) for sample in asked] == [
        ("toy:2", 0, 64),
        ("toy:2", 0, 64),
        ("toy:0", 1, 64),
        ("toy:0", 1, 64),
    ]


@pytest.mark.parametrize(
    ("gaps", "what"), [((2e-5, 0.0), "values"), ((0.0, 2e-5), "gradients"), ((np.nan, 0.0), "values")]
)
def test_a_layout_that_differs_by_more_than_fp32_explains_stops_the_run(gaps: tuple[float, float], what: str) -> None:
    with pytest.raises(SyncError, match=f"layout check: {what} .* between train.layout shared and padded"):
        check_layouts(groups(), lambda samples: {"packed": (0.0, 0.0), "shared": gaps})


def test_a_run_whose_layout_is_padded_has_nothing_to_compare() -> None:
    assert check_layouts(groups(), lambda samples: {}) == {}
