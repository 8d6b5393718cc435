"""Check that every model's outputs depend on the images and on the videos, by every path that computes them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vlmrl.data.media import Blank, Noise, Resized
from vlmrl.data.responses import shortened
from vlmrl.errors import SyncError
from vlmrl.types import Floats, Group, Media, Metrics
from vlmrl.video_size import VideoSize

Path = Callable[[Sequence[Group]], list[Floats]]
"""Computes the log-probs of every response's tokens, or another output of a model: [T] each, group by group."""

Rescore = Callable[[Sequence[Group]], Sequence[Group]]

_NUM_PROMPTS = 4
_NUM_RESPONSES = 2
_NUM_TOKENS = 256
"""Tokens of a response: enough to detect a fault, and a bound on the cost of the check."""

_ROUNDING = 1e-6
"""A path that ignores the images returns the same values twice, up to rounding in fp32."""
_NOISE_FACTOR = 3
"""Another image must change the output by this many times the effect of reordering the responses."""
_SLACK = 0.25
"""Share of the bound below which a gap is rounding, so that any image may explain the responses best."""

_OFF = "--train.image_check_steps -1 turns this check off"

_KINDS = ("images", "videos")
"""Each is checked by itself: a model that sees the images of a step may ignore its videos."""

Values = list[NDArray[np.float64]]
"""One array per prompt: a number for each sampled token of its responses."""


class ImageGroundingCheck:
    """Runs `check` on the first step with images and the first with videos, and every `train.image_check_steps`
    steps."""

    def __init__(self, steps: int, *, paths: Mapping[str, Path], bound: float, foreign: Collection[str]) -> None:
        """`steps` is the setting `train.image_check_steps`; the rest is for `check`."""
        self._steps = steps
        self._paths, self._bound, self._foreign = paths, bound, foreign
        self._waiting = set(_KINDS if steps >= 0 else ())

    def is_due(self, step: int, groups: Sequence[Group]) -> bool:
        """Whether a check is due of images or videos that these groups have. A step without any leaves it to the next
        step."""
        if self._steps > 0 and step % self._steps == 0:
            self._waiting = set(_KINDS)
        return any(_choose(groups, kind) for kind in self._waiting)

    def check(self, groups: Sequence[Group], scored: Rescore = list) -> Metrics:
        """Run the function `check` on a step's groups, for what is due."""
        due = [kind for kind in _KINDS if kind in self._waiting and _choose(groups, kind)]
        self._waiting -= set(due)
        return check(groups, paths=self._paths, bound=self._bound, foreign=self._foreign, kinds=due, scored=scored)


def check(
    groups: Sequence[Group],
    *,
    paths: Mapping[str, Path],
    bound: float,
    foreign: Collection[str] = (),
    kinds: Sequence[str] = _KINDS,
    scored: Rescore = list,
) -> Metrics:
    """Run a few responses through every path with their own images, with other images and with blank ones; then
    likewise with videos.

    `scored` returns groups with log-probs of the weights that the paths have. `bound` is the largest mean difference,
    over tokens, between a path's log-probs and those of the rollouts. The paths in `foreign` compute another
    distribution than the responses were sampled from, or another output, such as a reward: they must depend on the
    images, and are not compared with the rollouts.

    Returns `verify/images/<path>_effect`, the mean change of a log-prob under the image that changes it less, and
    `verify/images/<path>_gap`, the mean difference from the rollouts, for each path: of images and videos the smaller
    effect and the larger gap. Nothing when no group has either.

    Raises SyncError, naming the path, when

    * other images explain the rollouts better than the true ones: images are swapped between samples. This compares
      one gap with another, so it works far below `bound`;
    * the same responses in another order get other log-probs: samples of one pass attend to one another;
    * other or blank images change the output no more than rounding does: the path ignores the images;
    * the log-probs with the true images differ from the rollouts' by more than `bound`.
    """
    metrics: Metrics = {}
    for kind in kinds:
        chosen = scored(_choose(groups, kind))
        for name, path in paths.items() if chosen else ():
            figures = _check_path(name, path, chosen, kind, bound=bound, is_foreign=name in foreign)
            for metric, value in figures.items():
                worse = min if metric.endswith("_effect") else max
                metrics[metric] = worse(value, metrics.get(metric, value))
    return metrics


def _check_path(
    name: str, path: Path, groups: Sequence[Group], media: str, *, bound: float, is_foreign: bool
) -> Metrics:
    outputs = _compute(name, path, groups, media)
    rollouts = _sampled(groups, [segment.logprobs for group in groups for segment in group.segments])
    if not is_foreign:
        # First, because swapped images look like other faults too: in another order, other images are swapped.
        _check_each(name, outputs, rollouts, groups, media, slack=_SLACK * bound)
    # Values and rewards may be large numbers, and are rounded like them.
    scale = max(1.0, _gap(outputs.true, [np.zeros_like(row) for row in outputs.true])) if is_foreign else 1.0
    metrics = {f"verify/images/{name}_effect": _check_effect(name, outputs, media, bound=scale * bound)}
    if not is_foreign:
        metrics[f"verify/images/{name}_gap"] = _check_gap(name, outputs, rollouts, media, bound=bound)
    return metrics


def _check_each(
    name: str, outputs: _Outputs, rollouts: Values, groups: Sequence[Group], media: str, *, slack: float
) -> None:
    """Raise SyncError if other images explain the responses of any prompt better."""
    for i, group in enumerate(groups):
        gap = _gap(outputs.true[i : i + 1], rollouts[i : i + 1])
        for kind, values in outputs.wrong.items():
            other_gap = _gap(values[i : i + 1], rollouts[i : i + 1])
            # One prompt has few tokens: only a gap half as large is more than chance.
            if gap > slack and other_gap < gap / 2:
                subject = f"to {group.prompt.source}"
                raise SyncError(_format_swap(name, f"{kind} {media}", subject, gap=gap, other_gap=other_gap))


def _check_effect(name: str, outputs: _Outputs, media: str, *, bound: float) -> float:
    """Return the mean effect of an image on the path's output. Raises SyncError when it is no more than rounding."""
    noise = _gap(outputs.reordered, outputs.true)
    effects = {kind: _gap(values, outputs.true) for kind, values in outputs.wrong.items()}
    if not noise <= bound:
        raise SyncError(
            f"image check: the outputs of path {name} change by {noise:.2g} on average when the same responses come in "
            f"another order (bound {bound:g}): samples of one pass attend to one another; check its position ids and "
            f"attention masks, --train.layout padded keeps samples apart ({_OFF})"
        )
    least = min(effects.values())
    if not least > max(_ROUNDING, _NOISE_FACTOR * noise):
        raise SyncError(
            f"image check: path {name} ignores the {media}: its outputs change by {effects['other']:.2g} on average "
            f"with other {media} and by {effects['blank']:.2g} with blank ones, and by {noise:.2g} when only the order "
            f"of responses changes; check how pixels and their tokens reach the model on this path ({_OFF})"
        )
    return least


def _check_gap(name: str, outputs: _Outputs, rollouts: Values, media: str, *, bound: float) -> float:
    """Return the mean difference between path and rollouts, with the true images. Raises SyncError above the bound."""
    gap = _gap(outputs.true, rollouts)
    if not gap <= bound:
        raise SyncError(
            f"image check: path {name} and the rollouts disagree: with the true {media} their log-probs differ by "
            f"{gap:.2g} on average, the bound is {bound:g}; look for different pixels, positions or precision on this "
            f"path, or raise --vllm.max_logprob_diff ({_OFF})"
        )
    for kind, values in outputs.wrong.items():
        other_gap = _gap(values, rollouts)
        if gap > _SLACK * bound and other_gap <= gap:
            raise SyncError(_format_swap(name, f"{kind} {media}", "as a whole", gap=gap, other_gap=other_gap))
    return gap


def _format_swap(name: str, kind: str, subject: str, *, gap: float, other_gap: float) -> str:
    return (
        f"image check: on path {name}, {kind} explain the responses {subject} better than their own: log-probs "
        f"differ from the rollouts' by {other_gap:.2g} with them and by {gap:.2g} with their own; check the order in "
        f"which pixels are matched to tokens, on this path and in the engine ({_OFF})"
    )


# ---- the passes


class _Outputs(NamedTuple):
    """Outputs of one path, each in the order of the groups."""

    true: Values
    reordered: Values
    """With the true images, computed with the groups in reverse order."""
    wrong: dict[str, Values]
    """With `other` images, and with `blank` ones."""


def _compute(name: str, path: Path, groups: Sequence[Group], media: str) -> _Outputs:
    """Run all passes of a path. Raises SyncError when an output is not finite."""
    reverse = list(groups)[::-1]
    outputs = _Outputs(
        true=_sampled(groups, path(groups)),
        reordered=_sampled(reverse, path(reverse))[::-1],
        wrong={
            "other": _sampled(groups, path(_with_others(groups, media))),
            "blank": _sampled(groups, path([_with_media(group, _blank, media) for group in groups])),
        },
    )
    variants = (outputs.true, outputs.reordered, *outputs.wrong.values())
    if not all(np.isfinite(values).all() for variant in variants for values in variant):
        raise SyncError(f"image check: the outputs of path {name} are not finite ({_OFF})")
    return outputs


def _sampled(groups: Sequence[Group], rows: Sequence[Floats]) -> Values:
    """Return the values at sampled tokens, one array per group; `rows` holds one [T] per segment, group by group."""
    flags = [segment.sampled for group in groups for segment in group.segments]
    kept = [row[flag].astype(np.float64) for row, flag in zip(rows, flags, strict=True)]
    ends = np.cumsum([len(group.segments) for group in groups]).tolist()
    return [np.concatenate(kept[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def _gap(first: Values, second: Values) -> float:
    """Mean absolute difference over tokens."""
    return float(np.abs(np.concatenate(first) - np.concatenate(second)).mean())


def _choose(groups: Sequence[Group], kind: str) -> list[Group]:
    """Return the groups that `check` uses: a few with images (or videos), different ones as far as possible, each with
    a few responses that saw any.

    Where images come with feedback, other responses to the same prompt may have seen none.
    """
    distinct: dict[tuple[str, ...], Group] = {}
    repeated: list[Group] = []
    for group in groups:
        if not _media(group, kind):
            continue
        rollouts = [shortened(rollout, _NUM_TOKENS) for rollout in group.rollouts if rollout.num_sampled]
        sighted = [rollout for rollout in rollouts if _media(Group(group.prompt, (rollout,)), kind)]
        if not sighted:
            continue
        short = Group(group.prompt, tuple(sighted[:_NUM_RESPONSES]))
        hashes = tuple(media.hash for media in _media(short, kind))
        if distinct.setdefault(hashes, short) is not short:
            repeated.append(short)
    return [*distinct.values(), *repeated][:_NUM_PROMPTS]


def _media(group: Group, kind: str) -> list[Media]:
    """The distinct images (or videos) of a group's prompt and feedback, in the order of their first tokens."""
    media = (item for segment in group.segments for item in segment.media if _kind(item) == kind)
    return list({item.hash: item for item in media}.values())


def _kind(media: Media) -> str:
    return "videos" if isinstance(media.size, VideoSize) else "images"


def _with_media(group: Group, replacement: Callable[[Media, int], Media], kind: str) -> Group:
    """Replace each image (or video) of each segment, given the image and its number in the segment."""

    def replaced(media: Sequence[Media]) -> tuple[Media, ...]:
        return tuple(replacement(item, n) if _kind(item) == kind else item for n, item in enumerate(media))

    rollouts = tuple(
        replace(rollout, segments=tuple(replace(part, media=replaced(part.media)) for part in rollout.segments))
        for rollout in group.rollouts
    )
    return Group(replace(group.prompt, media=replaced(group.prompt.media)), rollouts)


def _with_others(groups: Sequence[Group], kind: str) -> list[Group]:
    """Swap the images (or videos) of neighbouring groups, so that a path that swaps them too is detected."""
    partners = [i ^ 1 if i ^ 1 < len(groups) else 0 for i in range(len(groups))]
    media = [_media(group, kind) for group in groups]

    def swapped(group: Group, others: Sequence[Media]) -> Group:
        return _with_media(group, lambda image, number: _replacement(image, others[number % len(others)]), kind)

    return [swapped(group, media[partner]) for group, partner in zip(groups, partners, strict=True)]


def _replacement(image: Media, other: Media) -> Media:
    """Return the other image, resized so that it has as many tokens as this one; noise if both are the same image."""
    name = _size_name(image)
    if other.hash == image.hash:
        return Noise(f"noise:{name}", image.size)
    return other if other.size == image.size else Resized(f"{other.hash}:{name}", image.size, other)


def _blank(image: Media, number: int) -> Media:
    del number
    return Blank(f"blank:{_size_name(image)}", image.size)


def _size_name(image: Media) -> str:
    """Name a size in the hash of a replacement. That of a video has its frames and times."""
    size = image.size
    return f"{size[0]}x{size[1]}" + (f":{size.timing}" if isinstance(size, VideoSize) else "")
