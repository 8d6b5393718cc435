"""The image check by hand, on simple paths."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from vlmrl.data.media import Blank, InlineMedia, Noise, Resized
from vlmrl.errors import SyncError
from vlmrl.types import Floats, Group, Media, Prompt, Rollout, Segment, Turn
from vlmrl.verify.images import ImageGroundingCheck, Path, check

torch.set_num_threads(1)

BOUND = 1e-3


def flat(grey: int, size: tuple[int, int] = (4, 2)) -> InlineMedia:
    width, height = size
    return InlineMedia(f"grey{grey}:{size}", size, np.full((height, width, 3), grey, dtype=np.uint8))


def brightness(group: Group) -> float:
    return float(np.mean([media.fetch().mean() for media in group.prompt.media]))


def group_of(index: int, media: Sequence[Media], lengths: Sequence[int] = (2, 4)) -> Group:
    """Answers whose tokens have -0.01 times the mean brightness of the images for a log-prob."""
    tokens = np.array([5, 9, 6])
    prompt = Prompt(index, f"toy:{index}", "?", tokens, tokens, label=None, media=tuple(media))
    group = Group(prompt, ())
    value = -0.01 * brightness(group) if media else 0.0
    rollouts = []
    for length in lengths:
        sampled = np.arange(3 + length) >= 3
        logprobs = np.where(sampled, value, 0.0).astype(np.float32)
        whole = np.append(tokens, [7] * length)
        rollouts.append(Rollout.of_response(whole, sampled, logprobs, "", "stop", 0, group.prompt.media))
    return replace(group, rollouts=tuple(rollouts))


def path(value: Callable[[Group], float]) -> Path:
    """Give every token of a response the value of its group."""
    return lambda groups: [np.full(len(s.tokens), value(g), dtype=np.float32) for g in groups for s in g.segments]


def seeing(group: Group) -> float:
    return -0.01 * brightness(group)


PAIR = [group_of(0, [flat(10)]), group_of(1, [flat(20)])]


def test_effect_and_gap_by_hand() -> None:
    # Each other's image changes 0.1; a blank one, of 127, changes 1.17 and 1.07.
    metrics = check(PAIR, paths={"old": path(seeing), "tilted": path(lambda g: seeing(g) - 0.0005)}, bound=BOUND)
    assert metrics == pytest.approx(
        {
            "verify/images/old_effect": 0.1,
            "verify/images/old_gap": 0.0,
            "verify/images/tilted_effect": 0.1,
            "verify/images/tilted_gap": 5e-4,
        },
        abs=1e-6,
    )


@pytest.mark.parametrize(
    "blind",
    [
        lambda group: -0.15,
        lambda group: (
            seeing(group) if "blank" not in group.prompt.media[0].hash else -0.01 * 10 * (1 + group.prompt.index)
        ),
        lambda group: -0.01 * 10 * (1 + group.prompt.index) if "blank" not in group.prompt.media[0].hash else -1.27,
    ],
    ids=["to all", "to blanks", "to others"],
)
def test_a_blind_path_is_named_with_its_numbers(blind: Callable[[Group], float]) -> None:
    with pytest.raises(
        SyncError, match=r"path update ignores the images: its outputs change by .* on average with other images"
    ):
        check(PAIR, paths={"old": path(seeing), "update": path(blind)}, bound=BOUND, foreign={"update"})


def test_rounding_does_not_count_as_an_effect() -> None:
    # Changes by up to 2e-4 whatever is asked, as a kernel may that sums in another order.
    noise = itertools.cycle([-1.5e-4, 0.5e-4, -1e-4])
    with pytest.raises(SyncError, match="path engine ignores the images"):
        check(PAIR, paths={"engine": path(lambda group: -0.15 + next(noise))}, bound=BOUND, foreign={"engine"})


def test_large_rewards_are_rounded_like_large_numbers() -> None:
    noise = itertools.cycle([-0.1, 0.1])
    rounded = path(lambda group: -100 * brightness(group) + next(noise))
    metrics = check(PAIR, paths={"model_reward": rounded}, bound=BOUND, foreign={"model_reward"})
    assert metrics["verify/images/model_reward_effect"] == pytest.approx(1000, abs=1)


def test_samples_that_attend_to_one_another_are_detected_on_foreign_paths_too() -> None:
    def leaking(groups: Sequence[Group]) -> list[Floats]:
        before = np.cumsum([0, *(brightness(group) for group in groups)])
        return [row - 0.01 * before[n] for n, group in enumerate(groups) for row in path(seeing)([group])]

    with pytest.raises(
        SyncError, match=r"change by 0\.15 on average when the same responses come in another order \(bound 0\.001\)"
    ):
        check(PAIR, paths={"reference": leaking}, bound=BOUND, foreign={"reference"})


def test_a_path_with_a_gap_is_an_error_unless_it_is_foreign() -> None:
    paths = {"padded": path(lambda group: seeing(group) + 0.01)}
    with pytest.raises(SyncError, match=r"path padded and the rollouts disagree: .* by 0\.01 on average.*0\.001"):
        check(PAIR, paths=paths, bound=BOUND)
    assert check(PAIR, paths=paths, bound=BOUND, foreign={"padded"}).keys() == {"verify/images/padded_effect"}


def swapped(groups: Sequence[Group]) -> list[Floats]:
    """The first two prompts get each other's pixels."""
    first, second, *rest = groups
    values = [seeing(second), seeing(first), *map(seeing, rest)]
    return [np.full(len(r.tokens), v, np.float32) for g, v in zip(groups, values, strict=True) for r in g.segments]


def test_swapped_images_are_detected_far_below_the_bound() -> None:
    four = [*PAIR, group_of(2, [flat(60)]), group_of(3, [flat(80)])]
    # Off by 0.1 on half of the prompts.
    with pytest.raises(
        SyncError, match=r"path old, other images explain the responses to toy:0 better.* by 0 with .* by 0\.1"
    ):
        check(four, paths={"old": swapped}, bound=0.3, foreign=())


def test_images_that_explain_responses_worse_than_blanks_are_detected() -> None:
    # Off by 0.12. Blanks are off by 0.09 and 0.11, nowhere twice as near, but nearer on the whole.
    bright = [group_of(0, [flat(130)]), group_of(1, [flat(150)])]
    with pytest.raises(SyncError, match=r"blank images explain the responses as a whole better .* by 0\.1 "):
        check(bright, paths={"old": path(lambda group: seeing(group) - 0.12)}, bound=0.4)


def test_log_probs_that_are_not_finite_are_an_error() -> None:
    with pytest.raises(SyncError, match="outputs of path old are not finite"):
        check(PAIR, paths={"old": path(lambda group: float("nan"))}, bound=BOUND)


class Witness:
    """A path that sees, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[Group]] = []

    def __call__(self, groups: Sequence[Group]) -> list[Floats]:
        self.asked.append(list(groups))
        return path(seeing)(groups)


def test_text_only_groups_run_no_path() -> None:
    witness = Witness()
    assert check([group_of(0, [])], paths={"old": witness}, bound=BOUND) == {}
    assert witness.asked == []


def test_a_few_responses_to_prompts_with_different_images_are_chosen() -> None:
    greys = [10, 10, 20, 10, 30]
    groups = [group_of(9, []), *(group_of(i, [flat(grey)], lengths=(0, 1, 4, 300, 2)) for i, grey in enumerate(greys))]
    witness = Witness()
    check(groups, paths={"old": witness}, bound=BOUND)
    asked = witness.asked[0]
    assert [group.prompt.source for group in asked] == ["toy:0", "toy:2", "toy:4", "toy:1"]
    # Neither a response without tokens, nor the last of several tokens.
    assert [[len(r.tokens) for r in group.segments] for group in asked] == [[4, 6]] * 4
    long = Witness()
    check([group_of(0, [flat(10)], lengths=(300,))], paths={"old": long}, bound=BOUND)
    assert long.asked[0][0].rollouts[0].num_sampled == 256


def conversation(images: Sequence[Media]) -> Rollout:
    """Two responses after a prompt without images; the images come with the feedback between them."""
    value = -0.01 * float(np.mean([media.fetch().mean() for media in images])) if images else 0.0
    sampled = np.array([False] * 3 + [True] * 2 + [False] * len(images) + [True] * 3)
    turns = (Turn(3, 5), Turn(len(sampled) - 3, len(sampled))) if images else (Turn(3, 8),)
    logprobs = np.where(sampled & (np.arange(len(sampled)) >= 5), value, 0.0).astype(np.float32)
    segment = Segment(np.full(len(sampled), 7), sampled, logprobs, np.where(sampled, 0, -1), turns, tuple(images))
    return Rollout((segment,), "", "stop")


def test_only_responses_that_saw_an_image_are_chosen() -> None:
    tokens = np.array([5, 9, 6])

    def group(index: int, *rollouts: Rollout) -> Group:
        return Group(Prompt(index, f"toy:{index}", "?", tokens, tokens, label=None), rollouts)

    blind, ten, twenty = conversation(()), conversation([flat(10)]), conversation([flat(20)])

    def path(groups: Sequence[Group]) -> list[Floats]:
        rows = []
        for segment in (segment for group in groups for segment in group.segments):
            value = -0.01 * float(np.mean([media.fetch().mean() for media in segment.media]))
            rows.append(np.where(np.arange(len(segment.tokens)) >= 5, value, 0.0).astype(np.float32))
        return rows

    groups = [group(0, blind, blind, ten), group(1, twenty, blind, blind), group(2, blind, blind)]
    metrics = check(groups, paths={"old": path}, bound=BOUND)
    assert metrics["verify/images/old_effect"] > 0.05
    assert metrics["verify/images/old_gap"] == 0.0


def test_other_images_get_the_size_of_the_true_ones() -> None:
    tall, wide = flat(10, (2, 6)), flat(20, (8, 2))
    witness = Witness()
    check(
        [group_of(0, [tall, flat(30), wide]), group_of(1, [wide]), group_of(2, [flat(90)])],
        paths={"old": witness},
        bound=1,
    )
    true, turned, other, blank = witness.asked
    assert [g.prompt.source for g in turned] == [g.prompt.source for g in true[::-1]]
    first, second, third = (group.prompt.media for group in other)
    assert [type(media) for media in first] == [Resized, Resized, Noise], "no image stands in for itself"
    assert [media.size for media in first] == [(2, 6), (4, 2), (8, 2)]
    assert second[0].size == (8, 2)
    assert third[0].size == (4, 2)
    assert {type(media) for group in blank for media in group.prompt.media} == {Blank}
    for variant in (other, blank):
        for group, original in zip(variant, true, strict=True):
            for media, theirs in zip(group.prompt.media, original.prompt.media, strict=True):
                assert (media.size, media.fetch().shape) == (theirs.size, theirs.fetch().shape)
                assert media.hash != theirs.hash


def test_one_image_for_all_prompts_is_compared_with_noise() -> None:
    witness = Witness()
    metrics = check([group_of(0, [flat(10)]), group_of(1, [flat(10)])], paths={"old": witness}, bound=BOUND)
    assert metrics["verify/images/old_effect"] > 0.5
    assert [group.prompt.media[0].hash for group in witness.asked[2]] == ["noise:4x2"] * 2


@pytest.mark.parametrize(
    ("steps", "checked"), [(0, [4]), (-1, []), (1, [4, 5, 6, 7, 8]), (2, [4, 6, 8]), (3, [4, 6])], ids=str
)
def test_the_check_is_due_first_and_then_at_the_interval(steps: int, checked: list[int]) -> None:
    check_images = ImageGroundingCheck(steps, paths={"old": path(seeing)}, bound=BOUND, foreign=())
    seen = []
    for step in range(4, 9):  # a run that goes on after three steps
        if check_images.is_due(step, PAIR):
            assert check_images.check(PAIR).keys() == {"verify/images/old_effect", "verify/images/old_gap"}
            seen.append(step)
    assert seen == checked


def test_a_text_only_step_leaves_the_check_to_the_next() -> None:
    check_images = ImageGroundingCheck(0, paths={}, bound=BOUND, foreign=())
    assert [check_images.is_due(step, groups) for step, groups in [(1, [group_of(0, [])]), (2, PAIR)]] == [False, True]
