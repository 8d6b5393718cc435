"""The image check on prompts with videos: a path that ignores them, or swaps them, is found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from vlmrl.data.media import InlineMedia
from vlmrl.errors import SyncError
from vlmrl.types import Floats, Group, Media, Prompt, Rollout
from vlmrl.verify.images import ImageGroundingCheck, Path, check
from vlmrl.video_size import VideoSize

BOUND = 1e-3


def clip(levels: list[int], fps: float = 2.0) -> InlineMedia:
    """A grey video of 4x2 pixels; `levels` are those of its frames."""
    pixels = np.broadcast_to(np.array(levels, dtype=np.uint8)[:, None, None, None], (len(levels), 2, 4, 3)).copy()
    size = VideoSize(4, 2, tuple(range(len(levels))), fps, len(levels))
    return InlineMedia(f"clip{levels}{size.timing}", size, pixels)


def picture(grey: int) -> InlineMedia:
    return InlineMedia(f"grey{grey}", (4, 2), np.full((2, 4, 3), grey, dtype=np.uint8))


def rise(media: Media) -> float:
    """What a seeing path computes: how much brighter the last frame is than the first; of an image its brightness."""
    pixels = media.fetch().astype(float)
    return float(pixels[-1].mean() - 0.5 * pixels[0].mean()) if pixels.ndim == 4 else float(pixels.mean())


def value(group: Group) -> float:
    return -0.01 * sum(rise(media) for media in group.prompt.media)


def group_of(index: int, *media: Media) -> Group:
    tokens = np.array([5, 9, 6])
    group = Group(Prompt(index, f"toy:{index}", "?", tokens, tokens, label=None, media=media), ())
    rollouts = []
    for length in (2, 4):
        sampled = np.arange(3 + length) >= 3
        logprobs = np.where(sampled, value(group), 0.0).astype(np.float32)
        whole = np.append(tokens, [7] * length)
        rollouts.append(Rollout.of_response(whole, sampled, logprobs, "", "stop", 0, media))
    return replace(group, rollouts=tuple(rollouts))


def path(values: dict[int, float] | None = None) -> Path:
    def compute(groups: list[Group]) -> list[Floats]:
        return [
            np.full(len(s.tokens), value(g) if values is None else values[g.prompt.index], dtype=np.float32)
            for g in groups
            for s in g.segments
        ]

    return compute  # type: ignore[return-value]


GROUPS = [
    group_of(0, clip([10, 40, 70, 100])),
    group_of(1, clip([100, 70], fps=4.0)),
    group_of(2, picture(30), clip([5, 5, 200, 200])),
]


def test_a_path_that_sees_videos_passes() -> None:
    metrics = check(GROUPS, paths={"old": path()}, bound=BOUND)
    assert metrics["verify/images/old_effect"] > 0.1
    assert metrics["verify/images/old_gap"] < 1e-6


def test_a_path_that_was_computed_blind_is_found() -> None:
    blind = {group.prompt.index: value(group) for group in GROUPS}
    with pytest.raises(SyncError, match="path old ignores the images"):
        check(GROUPS, paths={"old": path(blind)}, bound=BOUND)


def test_swapped_videos_are_found() -> None:
    pair = [group_of(0, clip([10, 40])), group_of(1, clip([200, 10]))]

    def swapped(groups: list[Group]) -> list[Floats]:
        """Each group gets the value of the other's video."""
        return [
            np.full(len(s.tokens), value(groups[number ^ 1]), dtype=np.float32)
            for number, g in enumerate(groups)
            for s in g.segments
        ]

    with pytest.raises(SyncError, match="explain the responses"):
        check(pair, paths={"old": swapped}, bound=BOUND)  # type: ignore[dict-item]


_SORTED = [*(group_of(i, picture(30 + 20 * i)) for i in range(5)), *(group_of(5 + i, clip([i, 40])) for i in range(3))]
_ONE_IMAGE = [*GROUPS[:2], group_of(2, picture(200))]
_TOGETHER = [GROUPS[0], group_of(1, picture(30), clip([5, 5, 200, 200]))]


@pytest.mark.parametrize("blind", ["images", "videos"])
@pytest.mark.parametrize("groups", [_SORTED, _ONE_IMAGE, _TOGETHER], ids=["sorted", "one image", "in one prompt"])
def test_a_path_that_sees_only_the_other_kind_is_found(groups: list[Group], blind: str) -> None:
    own = {group.prompt.index: group.prompt.media for group in groups}

    def seen(group: Group) -> list[Media]:
        """The media of the kind that is seen, and those that the path has learned by heart of the other one."""
        pairs = zip(group.prompt.media, own[group.prompt.index], strict=True)
        return [old if isinstance(old.size, VideoSize) == (blind == "videos") else new for new, old in pairs]

    def partly(part: list[Group]) -> list[Floats]:
        return [
            np.full(len(s.tokens), -0.01 * sum(map(rise, seen(g))), dtype=np.float32) for g in part for s in g.segments
        ]

    with pytest.raises(SyncError, match=f"path old ignores the {blind}: .* with other {blind}"):
        check(groups, paths={"old": partly}, bound=BOUND, foreign={"old"})  # type: ignore[dict-item]


def test_videos_are_checked_on_the_first_step_that_has_any() -> None:
    images = [group_of(0, picture(30)), group_of(1, picture(90))]
    due = ImageGroundingCheck(0, paths={"old": path()}, bound=BOUND, foreign=())
    steps = []
    for groups in (images, images, GROUPS, images, GROUPS):
        steps.append(due.is_due(len(steps) + 1, groups))
        if steps[-1]:
            assert due.check(groups)["verify/images/old_effect"] > 0.1
    assert steps == [True, False, True, False, False]
