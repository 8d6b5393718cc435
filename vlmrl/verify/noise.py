"""Compare engine and trainer on a few responses of a step, with a bound that is measured in the run.

Correct implementations differ by rounding, which depends on data type, model and policy. Rounding is measured within
one side, where a fault of the other side has no effect: the trainer's `padded` pass against the same in a wider type,
and the engine's decode against its prefill of the same tokens. The comparisons that are checked are others: engine
against trainer, and the run's layout against `padded`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vlmrl.data.responses import shortened
from vlmrl.errors import SyncError
from vlmrl.parallel import run_parallel
from vlmrl.types import Floats, Group, Metrics

Path = Callable[[Sequence[Group]], list[Floats]]
"""Log-probs of every response's tokens, [T] each, group by group, in the distribution that was sampled from."""

_NUM_GROUPS = 2
_NUM_RESPONSES = 2
"""Responses of a group. Two share a prompt, in layouts that share prompts."""
_NUM_TOKENS = 256
"""Tokens of a response, at most."""
_MIN_TOKENS = 64
_FEWEST_TOKENS = 24
"""The mean over fewer is mostly that of one token, which in bf16 may differ by more than the bound on means."""
_MAX_GROUPS = 4
"""If responses are short, more groups are used, until they have `_MIN_TOKENS` together."""
_NUM_RETRIES = 3
"""Repeated measurements of a suspected fault, each with other responses. A single token may cause most of a difference,
and by chance have little rounding in the pass that measures it. That is unlikely to happen in several small
measurements in a row, but may happen in one large measurement.
"""

_WARN, _STOP = 5.0, 20.0
"""Multiples of the noise."""
_REFRESH = 10
"""Steps between measurements of the noise, which changes slowly as the policy's distribution sharpens."""
_MAX_DECODE_NOISE = 4.0
"""The engine's noise counts up to this multiple of the trainer's: else a stale prefix cache would count as noise."""


class Paths(NamedTuple):
    """The computations that are compared."""

    prefill: Path
    """The engine, on given tokens."""
    padded: Path
    """The trainer, one sample per row."""
    exact: Path | None
    """The same in a wider type; None where there is none."""
    layout: Path | None
    """The trainer in the run's layout; None where that is `padded`."""


class Gaps(NamedTuple):
    """Mean absolute differences of log-probs over the same tokens."""

    num_tokens: int
    rounding: float
    """Trainer: `padded` against a wider type; 0 where there is none."""
    decode: float
    """Engine: decode against prefill."""
    engine: float
    """Engine's decode against trainer's `padded`."""
    layout: float
    """Trainer: the run's layout against `padded`."""
    run: float
    """Engine's decode against the trainer in the run's layout, which shows every fault."""


class NoiseCheck:
    """Compares engine and trainer on a few responses of each step.

    In most steps only the trainer computes, in the run's layout, and is compared with the engine's log-probs from
    sampling. Noise is measured in the first step, in every tenth, and when that gap is larger than the last noise
    explains. Only then do sleeping engines have to wake.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        floor: float,
        stops: bool,
        in_turn: bool,
        seed: int,
        say: Callable[[str], None],
    ) -> None:
        """Create the check.

        Args:
            floor: the smallest noise to assume.
            stops: raise SyncError on a fault; otherwise only warn.
            in_turn: engine and trainer cannot compute at the same time.
            seed: for the choice of responses.
            say: shows a warning.
        """
        self._paths, self._floor, self._stops = paths, floor, stops
        self._in_turn, self._seed, self._say = in_turn, seed, say
        self._largest_ratio = _WARN
        self._last_noise: float | None = None
        self._is_suspected = False

    def is_due(self, step: int) -> bool:
        """Whether noise is measured in this step, in passes of an engine and a trainer that hold the same weights."""
        return self._last_noise is None or step % _REFRESH == 0 or self._is_suspected

    def compare(self, groups: Sequence[Group], logprobs: Sequence[Floats]) -> Metrics:
        """Compare the groups' log-probs, the engine's, with the trainer's in the run's layout, [T] per segment.

        Returns `verify/noise/gap`. If the last noise does not explain it, `check` measures in the next step.
        """
        if self._last_noise is None or not groups:
            return {}
        gap = _gap(_decoded(groups), _sampled(groups, logprobs))
        self._is_suspected = not gap <= _WARN * self._last_noise
        return {"verify/noise/gap": gap}

    def check(self, step: int, groups: Sequence[Group]) -> Metrics:
        """Compare engine and trainer on a few responses.

        Returns `verify/noise/gap`, the mean difference between engine and trainer over the sampled tokens. Where noise
        is measured, also `verify/noise/level`, the effect of rounding on a log-prob, and over the same tokens
        `verify/noise/layout_gap`, between the run's layout and `padded`, and `verify/noise/decode_gap`, between the
        engine's decode and prefill.

        Raises SyncError when one of these is more than 20 times the noise, for these responses and for others.
        """
        rng = np.random.default_rng([self._seed % 2**63, step])
        first, others = choose(groups, rng)
        if not first:
            return {}
        if self._last_noise is not None and not self.is_due(step):
            gap = self._gap_of_run(first)
            if gap <= _WARN * self._last_noise:
                return {"verify/noise/gap": gap}
        gaps = self._measure(first)
        self._last_noise, self._is_suspected = self._noise(gaps), False
        name, ratio = self._largest(gaps)
        if not ratio <= _STOP and self._stops:
            self._measure_again(others)
        if not ratio <= self._largest_ratio:
            self._largest_ratio = ratio
            self._say(f"step {step}: {self._disagreement(name, gaps)}")
        return {
            "verify/noise/level": self._noise(gaps),
            "verify/noise/gap": gaps.run,
            "verify/noise/decode_gap": gaps.decode,
        } | ({} if self._paths.layout is None else {"verify/noise/layout_gap": gaps.layout})

    def _measure_again(self, others: Sequence[Sequence[Group]]) -> None:
        """Raise SyncError if the fault shows in each of these lists of groups."""
        for groups in others:
            gaps = self._measure(groups)
            name, ratio = self._largest(gaps)
            if ratio <= _STOP:
                return
        raise SyncError(self._disagreement(name, gaps))

    def _gap_of_run(self, groups: Sequence[Group]) -> float:
        trainer = self._paths.layout or self._paths.padded
        return _gap(_decoded(groups), _sampled(groups, trainer(groups)))

    def _measure(self, groups: Sequence[Group]) -> Gaps:
        calls: list[Callable[[], Any]] = [partial(self._paths.prefill, groups), partial(self._trainer, groups)]
        prefill, (padded, exact, layout) = [call() for call in calls] if self._in_turn else run_parallel(*calls)
        decode = _decoded(groups)
        return Gaps(
            num_tokens=len(decode),
            rounding=_gap(padded, exact),
            decode=_gap(decode, _sampled(groups, prefill)),
            engine=_gap(decode, padded),
            layout=_gap(layout, padded),
            run=_gap(decode, layout),
        )

    def _trainer(self, groups: Sequence[Group]) -> tuple[_Values, _Values, _Values]:
        padded = _sampled(groups, self._paths.padded(groups))
        exact, layout = (
            padded if path is None else _sampled(groups, path(groups))
            for path in (self._paths.exact, self._paths.layout)
        )
        return padded, exact, layout

    def _trainer_noise(self, gaps: Gaps) -> float:
        return max(gaps.rounding, self._floor)

    def _noise(self, gaps: Gaps) -> float:
        trainer = self._trainer_noise(gaps)
        return max(trainer, min(gaps.decode, _MAX_DECODE_NOISE * trainer))

    def _largest(self, gaps: Gaps) -> tuple[str, float]:
        """Return the name of the gap that is the largest multiple of its noise, and that multiple."""
        noise = self._noise(gaps)
        ratios = {
            "layout": gaps.layout / noise,
            "decode": gaps.decode / self._trainer_noise(gaps),
            "engine": gaps.engine / noise,
        }
        if not all(np.isfinite(ratio) for ratio in ratios.values()):
            return next(name for name, ratio in ratios.items() if not np.isfinite(ratio)), np.inf
        # A fault in one gap shows in others too, above all in `engine`: prefer the more specific ones.
        largest = max(ratios.values())
        return next((name, ratio) for name, ratio in ratios.items() if ratio >= largest / 2)

    def _disagreement(self, name: str, gaps: Gaps) -> str:
        subject, hint = _MEANING[name]
        gap, noise = getattr(gaps, name), self._noise(gaps)
        if name == "decode":
            noise = self._trainer_noise(gaps)
        return (
            f"{subject} differ by {gap:.2g} on average over {gaps.num_tokens} sampled tokens, {gap / noise:.3g} "
            f"times the rounding measured here ({noise:.2g}; a run stops at {_STOP:g} times): {hint}; "
            "--vllm.max_logprob_diff sets a fixed bound instead"
        )


_MEANING = {
    "engine": (
        "engine and trainer disagree: their log-probs",
        "the responses come from another model than the one that is trained, look for different weights or pixels",
    ),
    "layout": (
        "the trainer disagrees with itself: its log-probs in this train.layout and in padded",
        "check position ids and attention masks, --train.layout padded needs neither",
    ),
    "decode": (
        "the engine disagrees with itself: its log-probs of tokens when it sampled them and when it reads them",
        "look for a stale prefix cache (--vllm.enable_prefix_caching false) or another kernel",
    ),
}

_Values = NDArray[np.float64]


def choose(groups: Sequence[Group], rng: np.random.Generator) -> tuple[list[Group], list[list[Group]]]:
    """Choose a few responses, and for each repeated measurement others of the same groups.

    A group without further responses is replaced by another group, as long as there are any: the same responses would
    repeat the first measurement with the same rounding.
    """
    candidates = _shuffled(groups, rng)
    chosen: list[Group] = []
    num_tokens = 0
    for group in candidates:
        chosen.append(group)
        num_tokens += sum(rollout.num_sampled for rollout in group.rollouts[:_NUM_RESPONSES])
        if len(chosen) >= _NUM_GROUPS and (num_tokens >= _MIN_TOKENS or len(chosen) == _MAX_GROUPS):
            break
    others: list[list[Group]] = [[] for _ in range(_NUM_RETRIES)]
    for number, others_of_all in enumerate(others):
        for group in chosen:
            rest = group.rollouts[_NUM_RESPONSES:]
            unused = rest[number::_NUM_RETRIES] or rest
            others_of_all.append(Group(group.prompt, unused) if unused else next(candidates, group))
    return [_shortened(group) for group in chosen], [list(map(_shortened, retry)) for retry in others]


def fewest(chosen: Sequence[Group]) -> list[Group]:
    """Return the first of the chosen groups: no more than a mean over their tokens needs."""
    groups: list[Group] = []
    num_tokens = 0
    for group in chosen:
        if num_tokens >= _FEWEST_TOKENS:
            break
        groups.append(group)
        num_tokens += sum(rollout.num_sampled for rollout in group.rollouts)
    return groups


def _shuffled(groups: Sequence[Group], rng: np.random.Generator) -> Iterator[Group]:
    """Yield the groups in random order, with their responses in random order, as far as an engine can score them.

    It needs room for one more token: a response of two tokens or more is shortened; one of a single token has it if
    another sequence is longer.
    """
    longest = max((len(segment.tokens) for group in groups for segment in group.segments), default=0)
    for place in rng.permutation(len(groups)):
        group = groups[int(place)]
        order = [group.rollouts[int(i)] for i in rng.permutation(len(group.rollouts))]
        rollouts = tuple(
            shortened(rollout, _NUM_TOKENS)
            for rollout in order
            if rollout.num_sampled > 1 or (rollout.num_sampled and len(rollout.segments[-1].tokens) < longest)
        )
        if rollouts:
            yield Group(group.prompt, rollouts)


def _shortened(group: Group) -> Group:
    return Group(group.prompt, group.rollouts[:_NUM_RESPONSES])


def _decoded(groups: Sequence[Group]) -> _Values:
    """Return the engine's log-probs of the tokens when it sampled them, concatenated."""
    return _sampled(groups, [segment.logprobs for group in groups for segment in group.segments])


def _sampled(groups: Sequence[Group], rows: Sequence[Floats]) -> _Values:
    """Return the values at sampled tokens, concatenated; `rows` holds one [T] per segment."""
    flags = [segment.sampled for group in groups for segment in group.segments]
    values: _Values = np.concatenate([row[flag] for row, flag in zip(rows, flags, strict=True)]).astype(np.float64)
    return values


def _gap(first: _Values, second: _Values) -> float:
    return float(np.abs(first - second).mean())
