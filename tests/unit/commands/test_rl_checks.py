"""Checks of an asynchronous run's responses, which older weights have sampled."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scripted_loop import Notebook, config, make_prompt, make_rollout

from vlmrl.commands.rl_checks import Checks
from vlmrl.data.media import InlineMedia
from vlmrl.errors import SyncError
from vlmrl.types import Floats, Group, Sample
from vlmrl.verify.images import ImageGroundingCheck


def flat(grey: int) -> InlineMedia:
    """An image of one colour."""
    return InlineMedia(f"grey{grey}", (28, 28), np.full((28, 28, 3), grey, dtype=np.uint8))


AHEAD = {"batch_size": 4, "async_enable": True}


class Sides:
    """Engine and trainer, both with the current weights: -2 for each sampled token, the trainer's with an error."""

    def __init__(self, error: float) -> None:
        self.error = error
        self.num_scored = 0

    def score(self, groups: Sequence[Group]) -> list[Floats]:
        segments = [segment for group in groups for segment in group.segments]
        self.num_scored += len(segments)
        return [np.where(segment.sampled, -2.0, 0.0).astype(np.float32) for segment in segments]

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        return [np.where(sample.sampled, -2.0 + self.error, 0.0).astype(np.float32) for sample in samples]

    def uncounted(self) -> Any:
        return nullcontext()


class Recorded:
    """Stands for the checks of images and noise, and keeps the groups that they get."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.logprobs: Sequence[Floats] | None = None
        """The trainer's, where it has computed them before."""

    def is_due(self, step: int, groups: Sequence[Group]) -> bool:
        return False

    def check(
        self, step: int, groups: Sequence[Group], *, logprobs: Sequence[Floats] | None = None
    ) -> dict[str, float]:
        self.groups += groups
        self.logprobs = logprobs
        return {}


def checks(sides: Sides, recorded: Recorded, *, images: ImageGroundingCheck | None = None, **changes: Any) -> Checks:
    parts: list[Any] = [config(**changes), Notebook(), sides, sides, images or recorded, recorded]
    return Checks(*parts, adapters=None, first_step=1)


# The weights that sampled these tokens gave them -0.5.
GROUPS = [
    Group(prompt, tuple(make_rollout(prompt, "a", version=1, length=9) for _ in range(4)))
    for prompt in map(make_prompt, range(8))
]
CORRECTED = {"advantage": {"is_correction_enable": True}}


def test_engine_and_trainer_are_compared_on_a_few_responses_that_the_engine_scores_again() -> None:
    sides, recorded = Sides(5e-4), Recorded()
    metrics = checks(sides, recorded, train=AHEAD, algo=CORRECTED).check_responses(3, GROUPS)
    assert metrics["sync/logprob_diff_mean"] == pytest.approx(5e-4, rel=1e-3)
    assert 2 <= sides.num_scored <= 8, "a few"
    assert {float(v) for group in recorded.groups for s in group.segments for v in s.logprobs[s.sampled]} == {-2.0}
    assert recorded.logprobs is not None
    assert len(recorded.logprobs) == sides.num_scored
    assert min(float(row.min()) for row in recorded.logprobs) == pytest.approx(-2.0 + 5e-4)


def test_a_trainer_that_differs_from_the_engine_now_stops_an_asynchronous_run() -> None:
    with pytest.raises(SyncError, match=r"engine and trainer disagree.* 0\.002 on average"):
        checks(Sides(2e-3), Recorded(), train=AHEAD, algo=CORRECTED).check_responses(3, GROUPS)


def test_engine_and_trainer_compute_at_the_same_time() -> None:
    both = threading.Barrier(2, timeout=20)

    class Waiting(Sides):
        def score(self, groups: Sequence[Group]) -> list[Floats]:
            both.wait()
            return super().score(groups)

        def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
            both.wait()
            return super().logprobs(samples)

    metrics = checks(Waiting(0.0), Recorded(), train=AHEAD, algo=CORRECTED).check_responses(3, GROUPS)
    assert metrics["sync/logprob_diff_max"] == 0.0


class RecordedImages(ImageGroundingCheck):
    """The check of images, which is due in every step, and keeps the groups that it gets."""

    def __init__(self) -> None:
        super().__init__(1, paths={}, bound=1e-3, foreign=())

    def check(self, groups: Sequence[Group]) -> dict[str, float]:
        self.groups = groups
        return {}


@pytest.mark.parametrize(("step", "expected"), [(2, -0.5), (3, -2.0)], ids=["current", "older"])
def test_images_are_checked_against_log_probs_of_the_current_weights(step: int, expected: float) -> None:
    """The first step of a resumed run trains on responses of older weights."""
    prompts = [replace(make_prompt(i), media=(flat(i),)) for i in range(8)]
    groups = [Group(prompt, tuple(make_rollout(prompt, "a", version=1) for _ in range(4))) for prompt in prompts]
    images = RecordedImages()
    checks(Sides(0.0), Recorded(), images=images, train=AHEAD, algo=CORRECTED).check_responses(step, groups)
    assert {float(v) for group in images.groups for s in group.segments for v in s.logprobs[s.sampled]} == {expected}
    assert [group.prompt.index for group in images.groups] == [0, 1, 2, 3]


def test_a_synchronous_run_scores_nothing_again() -> None:
    sides, recorded = Sides(2e-3), Recorded()
    assert checks(sides, recorded).check_responses(3, GROUPS) == {}
    assert (sides.num_scored, recorded.groups, recorded.logprobs) == (0, GROUPS, None)
