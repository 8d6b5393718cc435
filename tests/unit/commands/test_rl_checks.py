"""Checks of an asynchronous run's responses, which older weights have sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from vlmrl.verify.images import ImageGroundingCheck, Rescore


def flat(grey: int) -> InlineMedia:
    """An image of one colour."""
    return InlineMedia(f"grey{grey}", (28, 28), np.full((28, 28, 3), grey, dtype=np.uint8))


AHEAD = {"batch_size": 4, "async_enable": True}


class Sides:
    """Engine and trainer, both with the current weights: -2 for each sampled token, the trainer's with an error."""

    def __init__(self, error: float, *, is_dead: bool = False) -> None:
        """`is_dead`: the engine dies while it scores."""
        self.error, self.is_dead = error, is_dead
        self.num_scored = 0
        self.events: list[str] = []

    def score(self, groups: Sequence[Group]) -> list[Floats]:
        segments = [segment for group in groups for segment in group.segments]
        self.num_scored += len(segments)
        return [np.where(segment.sampled, -2.0, 0.0).astype(np.float32) for segment in segments]

    def begin_scoring(self, groups: Sequence[Group]) -> Callable[[], list[Floats] | None]:
        self.events.append("engine begins")
        return lambda: (self.events.append("engine's scores"), None if self.is_dead else self.score(groups))[1]

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        self.events.append("trainer's pass")
        return [np.where(sample.sampled, -2.0 + self.error, 0.0).astype(np.float32) for sample in samples]

    def uncounted(self) -> Any:
        return nullcontext()


class Recorded:
    """Stands for the checks of images and noise, and keeps the groups that they get."""

    def __init__(self, *, measures: bool = False) -> None:
        """`measures`: noise is measured in this step."""
        self.groups: list[Group] = []
        self.logprobs: Sequence[Floats] = ()
        """The trainer's, where it has computed them before."""
        self._measures = measures

    def is_due(self, step: int, groups: Sequence[Group] | None = None) -> bool:
        return groups is None and self._measures

    def check(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        self.groups += groups
        return {"verify/noise/level": 1e-3}

    def compare(self, groups: Sequence[Group], logprobs: Sequence[Floats]) -> dict[str, float]:
        self.groups += groups
        self.logprobs = logprobs
        return {"verify/noise/gap": 2e-3}


def checks(sides: Sides, recorded: Recorded, *, images: ImageGroundingCheck | None = None, **changes: Any) -> Checks:
    parts: list[Any] = [config(**changes), Notebook(), sides, sides, images or recorded, recorded]
    return Checks(*parts, adapters=None, first_step=1)


# The weights that sampled these tokens gave them -0.5.
def groups_of(length: int) -> list[Group]:
    prompts = map(make_prompt, range(8))
    return [Group(p, tuple(make_rollout(p, "a", version=1, length=length) for _ in range(4))) for p in prompts]


GROUPS = groups_of(16)
CORRECTED = {"advantage": {"is_correction_enable": True}}


def test_engine_and_trainer_are_compared_on_a_few_responses_that_the_engine_scores_again() -> None:
    sides, recorded = Sides(5e-4), Recorded()
    finish = checks(sides, recorded, train=AHEAD, algo=CORRECTED).check_responses(3, GROUPS)
    assert sides.events == ["engine begins", "trainer's pass"], "the update does not wait for the engine"
    metrics = finish()
    assert sides.events == ["engine begins", "trainer's pass", "engine's scores"]
    assert metrics["sync/logprob_diff_mean"] == pytest.approx(5e-4, rel=1e-3)
    assert metrics["verify/noise/gap"] == 2e-3
    assert "verify/noise/level" not in metrics
    assert sides.num_scored == 2
    assert {float(v) for group in recorded.groups for s in group.segments for v in s.logprobs[s.sampled]} == {-2.0}
    assert len(recorded.logprobs) == sides.num_scored
    assert min(float(row.min()) for row in recorded.logprobs) == pytest.approx(-2.0 + 5e-4)


@pytest.mark.parametrize(("length", "num_scored"), [(2, 8), (9, 4), (16, 2), (400, 2)])
def test_short_responses_are_compared_together(length: int, num_scored: int) -> None:
    """A mean over four tokens is mostly that of one of them. Two responses of a group; four groups at most."""
    sides = Sides(5e-4)
    checks(sides, Recorded(), train=AHEAD, algo=CORRECTED).check_responses(3, groups_of(length))()
    assert sides.num_scored == num_scored


def test_noise_is_measured_while_engine_and_trainer_hold_the_same_weights() -> None:
    sides, recorded = Sides(5e-4), Recorded(measures=True)
    finish = checks(sides, recorded, train=AHEAD, algo=CORRECTED).check_responses(3, GROUPS)
    assert sides.events == ["engine begins", "trainer's pass", "engine's scores"]
    assert {float(v) for group in recorded.groups for s in group.segments for v in s.logprobs[s.sampled]} == {-2.0}
    assert finish()["verify/noise/level"] == 1e-3


def test_an_engine_that_dies_while_it_scores_leaves_a_step_without_the_comparison() -> None:
    sides, recorded = Sides(5e-4, is_dead=True), Recorded()
    assert checks(sides, recorded, train=AHEAD, algo=CORRECTED).check_responses(3, GROUPS)() == {}
    assert recorded.groups == []


def test_a_trainer_that_differs_from_the_engine_now_stops_an_asynchronous_run() -> None:
    finish = checks(Sides(2e-3), Recorded(), train=AHEAD, algo=CORRECTED).check_responses(3, GROUPS)
    with pytest.raises(SyncError, match=r"engine and trainer disagree.* 0\.002 on average"):
        finish()


class RecordedImages(ImageGroundingCheck):
    """The check of images, which is due in every step, and keeps the groups that it gets."""

    def __init__(self) -> None:
        super().__init__(1, paths={}, bound=1e-3, foreign=())

    def check(self, groups: Sequence[Group], scored: Rescore = list) -> dict[str, float]:
        def keep(few: Sequence[Group]) -> Sequence[Group]:
            self.groups = scored(few)
            return self.groups

        return super().check(groups, keep)


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
    assert checks(sides, recorded).check_responses(3, GROUPS)() == {"verify/noise/level": 1e-3}
    assert (sides.events, recorded.groups) == ([], GROUPS)
