"""Makes sure that a run sees: what its models say of answers must follow the images, by every path that asks them."""

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

Path = Callable[[Sequence[Group]], list[Floats]]
"""Log-probs of every answer's tokens, [T] each, group by group; or what else a model says of them."""

_NUM_PROMPTS = 4
_NUM_ANSWERS = 2
_NUM_TOKENS = 256
"""Of an answer: enough to tell, and a bound on what the check costs."""

_ROUNDING = 1e-6
"""A path that ignores the images gives the same bits twice, or bits that fp32 rounds otherwise."""
_NOISE_FACTOR = 3
"""Another image must change more than another order of the same answers does, by this factor."""
_SLACK = 0.25
"""Share of the bound below which a gap is rounding, and which image explains it best is chance."""

_OFF = "--train.sight_check_steps -1 turns this check off"

Values = list[NDArray[np.float64]]
"""One array per prompt: something of each sampled token of its answers."""


class SightCheck:
    """`check`, now and then."""

    def __init__(self, steps: int, *, paths: Mapping[str, Path], bound: float, foreign: Collection[str]) -> None:
        """`steps` is the setting `train.sight_check_steps`; the rest is for `check`."""
        self._steps = steps
        self._paths, self._bound, self._foreign = paths, bound, foreign
        self._is_waiting = steps >= 0

    def is_due(self, step: int, groups: Sequence[Group]) -> bool:
        """Whether it is time, and these groups have images. Groups without any leave it to those of the next step."""
        self._is_waiting |= self._steps > 0 and step % self._steps == 0
        return self._is_waiting and bool(_choose(groups))

    def check(self, groups: Sequence[Group]) -> Metrics:
        """See the function `check`."""
        self._is_waiting = False
        return check(groups, paths=self._paths, bound=self._bound, foreign=self._foreign)


def check(
    groups: Sequence[Group], *, paths: Mapping[str, Path], bound: float, foreign: Collection[str] = ()
) -> Metrics:
    """Ask every path about a few of the answers: with their own images, with other images and with blank ones.

    `bound` is how far a path's log-probs may be from those of the rollouts, on average over tokens. Paths named in
    `foreign` answer for another distribution than the one the answers were drawn from, or say something else than
    log-probs, such as a reward: they have to care about the images, and no more.

    Returns for each path `sight/<path>_care`, the mean change of a log-prob under the image that changes less, and
    `sight/<path>_gap`, the mean difference from the rollouts; nothing when no group has images.

    Raises SyncError, naming the path, when

    * other images explain the rollouts better than the true ones: images are swapped between samples. This compares
      one gap with another, so that it tells far below `bound`;
    * the same answers in another order get other log-probs: samples of one pass see one another;
    * other images or blank ones change no more than rounding does: the path is blind;
    * with the true images it is further than `bound` from the rollouts.
    """
    chosen = _choose(groups)
    metrics: Metrics = {}
    for name, path in paths.items() if chosen else ():
        metrics |= _check_path(name, path, chosen, bound=bound, is_foreign=name in foreign)
    return metrics


def _check_path(name: str, path: Path, groups: Sequence[Group], *, bound: float, is_foreign: bool) -> Metrics:
    seen = _look(name, path, groups)
    rollouts = _sampled(groups, [rollout.logprobs for group in groups for rollout in group.rollouts])
    if not is_foreign:
        # First, for swapped images look like other faults too: in another order other images are swapped.
        _check_each(name, seen, rollouts, groups, slack=_SLACK * bound)
    # Values and rewards may be large numbers, and are rounded like them.
    scale = max(1.0, _gap(seen.true, [np.zeros_like(row) for row in seen.true])) if is_foreign else 1.0
    metrics = {f"sight/{name}_care": _check_care(name, seen, bound=scale * bound)}
    if not is_foreign:
        metrics[f"sight/{name}_gap"] = _check_gap(name, seen, rollouts, bound=bound)
    return metrics


def _check_each(name: str, seen: _Seen, rollouts: Values, groups: Sequence[Group], *, slack: float) -> None:
    """No prompt whose answers other images explain better."""
    for i, group in enumerate(groups):
        own = _gap(seen.true[i : i + 1], rollouts[i : i + 1])
        for what, values in seen.wrong.items():
            theirs = _gap(values[i : i + 1], rollouts[i : i + 1])
            # Few tokens have a say within one prompt: twice as near is no chance.
            if own > slack and theirs < own / 2:
                raise SyncError(_explained(name, what, f"to {group.prompt.source}", own=own, theirs=theirs))


def _check_care(name: str, seen: _Seen, *, bound: float) -> float:
    """How much the path cares about images."""
    noise = _gap(seen.reordered, seen.true)
    care = {what: _gap(values, seen.true) for what, values in seen.wrong.items()}
    if not noise <= bound:
        raise SyncError(
            f"sight check: path {name} says something else of the same answers in another order, by {noise:.2g} on "
            f"average (bound {bound:g}): samples of one pass see one another; look at its position ids and attention, "
            f"--train.layout padded keeps them apart ({_OFF})"
        )
    least = min(care.values())
    if not least > max(_ROUNDING, _NOISE_FACTOR * noise):
        raise SyncError(
            f"sight check: path {name} is blind: what it says changes by {care['other']:.2g} on average with other "
            f"images and by {care['blank']:.2g} with blank ones, where another order of the same changes {noise:.2g}; "
            f"look at how pixels and the tokens that stand for them reach the model on this path ({_OFF})"
        )
    return least


def _check_gap(name: str, seen: _Seen, rollouts: Values, *, bound: float) -> float:
    """How far the path is from the rollouts, with the true images."""
    gap = _gap(seen.true, rollouts)
    if not gap <= bound:
        raise SyncError(
            f"sight check: path {name} and the rollouts disagree: with the true images their log-probs differ by "
            f"{gap:.2g} on average, the bound is {bound:g}; look for other pixels, positions or precision on this "
            f"path, or raise --vllm.max_logprob_diff ({_OFF})"
        )
    for what, values in seen.wrong.items():
        theirs = _gap(values, rollouts)
        if gap > _SLACK * bound and theirs <= gap:
            raise SyncError(_explained(name, what, "as a whole", own=gap, theirs=theirs))
    return gap


def _explained(name: str, what: str, where: str, *, own: float, theirs: float) -> str:
    return (
        f"sight check: on path {name}, {what} images explain the answers {where} better than their own "
        f"do: log-probs are {theirs:.2g} from the rollouts' with them and {own:.2g} with their own; look at the order "
        f"in which pixels meet their places, on this path and in the engine ({_OFF})"
    )


# ---- what is asked


class _Seen(NamedTuple):
    """Log-probs by one path, in the order of the groups."""

    true: Values
    reordered: Values
    """The true images again, the groups last to first."""
    wrong: dict[str, Values]
    """`other` images, and `blank` ones."""


def _look(name: str, path: Path, groups: Sequence[Group]) -> _Seen:
    """Raises SyncError when a log-prob is not a number."""
    turned = list(groups)[::-1]
    seen = _Seen(
        true=_sampled(groups, path(groups)),
        reordered=_sampled(turned, path(turned))[::-1],
        wrong={
            "other": _sampled(groups, path(_with_others(groups))),
            "blank": _sampled(groups, path([_with_media(group, _blanks(group)) for group in groups])),
        },
    )
    every = (seen.true, seen.reordered, *seen.wrong.values())
    if not all(np.isfinite(values).all() for variant in every for values in variant):
        raise SyncError(f"sight check: path {name} says what is no number ({_OFF})")
    return seen


def _sampled(groups: Sequence[Group], rows: Sequence[Floats]) -> Values:
    """Of one [T] per answer, group by group, what concerns sampled tokens; one array per group."""
    flags = [rollout.sampled for group in groups for rollout in group.rollouts]
    kept = [row[flag].astype(np.float64) for row, flag in zip(rows, flags, strict=True)]
    ends = np.cumsum([len(group.rollouts) for group in groups]).tolist()
    return [np.concatenate(kept[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def _gap(one: Values, two: Values) -> float:
    """Mean absolute difference over tokens."""
    return float(np.abs(np.concatenate(one) - np.concatenate(two)).mean())


def _choose(groups: Sequence[Group]) -> list[Group]:
    """A few groups with images, if possible none with the images of another, each with a few answers."""
    new: dict[tuple[str, ...], Group] = {}
    old: list[Group] = []
    for group in groups:
        rollouts = [rollout for rollout in group.rollouts if rollout.num_sampled] if group.prompt.media else []
        if not rollouts:
            continue
        hashes = tuple(media.hash for media in group.prompt.media)
        short = Group(group.prompt, tuple(shortened(rollout, _NUM_TOKENS) for rollout in rollouts[:_NUM_ANSWERS]))
        if new.setdefault(hashes, short) is not short:
            old.append(short)
    return [*new.values(), *old][:_NUM_PROMPTS]


def _with_media(group: Group, media: Sequence[Media]) -> Group:
    return replace(group, prompt=replace(group.prompt, media=tuple(media)))


def _with_others(groups: Sequence[Group]) -> list[Group]:
    """Neighbours swap their images, so that a path that swaps them too is found out."""
    partners = [i ^ 1 if i ^ 1 < len(groups) else 0 for i in range(len(groups))]
    media = [group.prompt.media for group in groups]
    return [
        _with_media(group, [_stand_in(own, media[partner][j % len(media[partner])]) for j, own in enumerate(media[i])])
        for i, (group, partner) in enumerate(zip(groups, partners, strict=True))
    ]


def _stand_in(own: Media, other: Media) -> Media:
    """The other image at the size of this one, so that it stands for as many tokens. For itself nothing stands in but
    noise.
    """
    width, height = own.size
    if other.hash == own.hash:
        return Noise(f"noise:{width}x{height}", own.size)
    return other if other.size == own.size else Resized(f"{other.hash}:{width}x{height}", own.size, other)


def _blanks(group: Group) -> list[Media]:
    return [Blank(f"blank:{width}x{height}", (width, height)) for width, height in (m.size for m in group.prompt.media)]
