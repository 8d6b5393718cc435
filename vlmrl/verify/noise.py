"""Compare engine and trainer on a few responses of a step, by a bound that is measured in the run.

Two sound implementations differ by rounding, which depends on data type, model and policy. So rounding is measured
within one side, where no fault of the other can hide in it: the trainer's `padded` pass against the same in a wider
type, and the engine's log-probs of tokens when it sampled them (decode) against those when it reads them (prefill).
What is checked never enters the measurement: engine against trainer, and the run's layout against `padded`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vlmrl.data.responses import truncate
from vlmrl.errors import SyncError
from vlmrl.parallel import together
from vlmrl.types import Floats, Group, Metrics

Path = Callable[[Sequence[Group]], list[Floats]]
"""Log-probs of every response's tokens, [T] each, group by group, in the distribution that was sampled from."""

_NUM_GROUPS = 2
_NUM_RESPONSES = 2
"""Of a group, so that they share a prompt where the layout shares any."""
_NUM_TOKENS = 256
"""Of a response, at most."""
_FEWEST_TOKENS = 64
_MOST_GROUPS = 4
"""Short responses come from more groups, until they have so many tokens."""
_NUM_AGAIN = 3
"""How often a suspicion is measured again, with other responses each time. One token may hold most of the difference of
a few responses, and by chance be hardly rounded in the pass that measures rounding. Several small measurements in a row
are hardly ever all that unlucky; one large measurement may be.
"""

_WARN, _STOP = 5.0, 20.0
"""Multiples of the noise."""
_REFRESH = 10
"""Steps between two measurements of the noise: it follows a policy that sharpens, but slowly."""
_TRUST = 4.0
"""The engine's own noise counts up to this many times the trainer's: else a stale prefix cache would pass for noise."""


class Paths(NamedTuple):
    """The computations that are compared."""

    prefill: Path
    """The engine, reading tokens that are given."""
    padded: Path
    """The trainer, one sample to a row."""
    exact: Path | None
    """The same in a wider type; None where there is none."""
    layout: Path | None
    """The trainer in the run's layout; None where that is `padded`."""


class Measured(NamedTuple):
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
    """Engine's decode against the trainer in the run's layout: any fault shows in it."""


class NoiseCheck:
    """Compares engine and trainer on a few responses of each step.

    In most steps the trainer alone computes, in the run's layout, and is compared with the engine's log-probs at
    sampling. Noise is measured in the first step, in every tenth, and as soon as that gap is more than the last noise
    explains: only then do engines that sleep have to wake.
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
        """`floor` is the least noise that is assumed. Unless it `stops`, the check only warns. `in_turn`: engine and
        trainer cannot compute at the same time. `seed` is that of the choice of responses.
        """
        self._paths, self._floor, self._stops = paths, floor, stops
        self._in_turn, self._seed, self._say = in_turn, seed, say
        self._worst = _WARN
        self._noise_before: float | None = None

    def check(self, step: int, groups: Sequence[Group]) -> Metrics:
        """Compare engine and trainer on a few responses.

        Returns `verify/noise/gap`, the mean difference between engine and trainer over the sampled tokens. Where noise
        is measured, also `verify/noise/level`, the effect of rounding on a log-prob, and over the same tokens
        `verify/noise/layout_gap`, between the run's layout and `padded`, and `verify/noise/decode_gap`, between the
        engine's decode and prefill.

        Raises SyncError when one of these is more than 20 times the noise, for these responses and for others.
        """
        rng = np.random.default_rng([self._seed % 2**63, step])
        first, others = _choose(groups, rng)
        if not first:
            return {}
        if self._noise_before is not None and step % _REFRESH:
            gap = self._gap_of_run(first)
            if gap <= _WARN * self._noise_before:
                return {"verify/noise/gap": gap}
        measured = self._measure(first)
        self._noise_before = self._noise(measured)
        name, ratio = self._largest(measured)
        if not ratio <= _STOP and self._stops:
            self._measure_again(others)
        if not ratio <= self._worst:
            self._worst = ratio
            self._say(f"step {step}: {self._disagreement(name, measured)}")
        return {
            "verify/noise/level": self._noise(measured),
            "verify/noise/gap": measured.run,
            "verify/noise/decode_gap": measured.decode,
        } | ({} if self._paths.layout is None else {"verify/noise/layout_gap": measured.layout})

    def _measure_again(self, others: Sequence[Sequence[Group]]) -> None:
        """Raise SyncError if every one of these looks wrong."""
        for groups in others:
            measured = self._measure(groups)
            name, ratio = self._largest(measured)
            if ratio <= _STOP:
                return
        raise SyncError(self._disagreement(name, measured))

    def _gap_of_run(self, groups: Sequence[Group]) -> float:
        trainer = self._paths.layout or self._paths.padded
        return _gap(_decoded(groups), _sampled(groups, trainer(groups)))

    def _measure(self, groups: Sequence[Group]) -> Measured:
        calls: list[Callable[[], Any]] = [partial(self._paths.prefill, groups), partial(self._trainer, groups)]
        prefill, (padded, exact, layout) = [call() for call in calls] if self._in_turn else together(*calls)
        decode = _decoded(groups)
        return Measured(
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

    def _trainer_noise(self, measured: Measured) -> float:
        return max(measured.rounding, self._floor)

    def _noise(self, measured: Measured) -> float:
        trainer = self._trainer_noise(measured)
        return max(trainer, min(measured.decode, _TRUST * trainer))

    def _largest(self, measured: Measured) -> tuple[str, float]:
        """The difference that is the largest multiple of its noise, and that multiple."""
        noise = self._noise(measured)
        ratios = {
            "layout": measured.layout / noise,
            "decode": measured.decode / self._trainer_noise(measured),
            "engine": measured.engine / noise,
        }
        if not all(np.isfinite(ratio) for ratio in ratios.values()):
            return next(name for name, ratio in ratios.items() if not np.isfinite(ratio)), np.inf
        # A fault in one place shows in others, above all in `engine`.
        largest = max(ratios.values())
        return next((name, ratio) for name, ratio in ratios.items() if ratio >= largest / 2)

    def _disagreement(self, name: str, measured: Measured) -> str:
        subject, hint = _MEANING[name]
        gap, noise = getattr(measured, name), self._noise(measured)
        if name == "decode":
            noise = self._trainer_noise(measured)
        return (
            f"{subject} differ by {gap:.2g} on average over {measured.num_tokens} sampled tokens, {gap / noise:.3g} "
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


def _choose(groups: Sequence[Group], rng: np.random.Generator) -> tuple[list[Group], list[list[Group]]]:
    """A few responses, and for each repeated measurement others of the same groups and engines, where there are any."""
    first: list[Group] = []
    others: list[list[Group]] = [[] for _ in range(_NUM_AGAIN)]
    num_tokens = 0
    for place in rng.permutation(len(groups)):
        group = groups[int(place)]
        order = [group.rollouts[int(i)] for i in rng.permutation(len(group.rollouts))]
        # A single token cannot be shortened, and behind a prompt of the greatest length no engine has room to read it.
        rollouts = [truncate(rollout, _NUM_TOKENS) for rollout in order if rollout.num_sampled > 1]
        if not rollouts:
            continue
        chosen, rest = rollouts[:_NUM_RESPONSES], rollouts[_NUM_RESPONSES:]
        first.append(Group(group.prompt, tuple(chosen)))
        for number, others_of_group in enumerate(others):
            unused = rest[number::_NUM_AGAIN][:_NUM_RESPONSES]
            others_of_group.append(Group(group.prompt, tuple(unused or rest[:_NUM_RESPONSES] or chosen)))
        num_tokens += sum(rollout.num_sampled for rollout in chosen)
        if len(first) >= _NUM_GROUPS and (num_tokens >= _FEWEST_TOKENS or len(first) == _MOST_GROUPS):
            break
    return first, others


def _decoded(groups: Sequence[Group]) -> _Values:
    """The engine's log-probs of the tokens when it sampled them, end to end."""
    return _sampled(groups, [rollout.logprobs for group in groups for rollout in group.rollouts])


def _sampled(groups: Sequence[Group], rows: Sequence[Floats]) -> _Values:
    """The values at sampled tokens, end to end; `rows` holds one [T] per response."""
    flags = [rollout.sampled for group in groups for rollout in group.rollouts]
    values: _Values = np.concatenate([row[flag] for row, flag in zip(rows, flags, strict=True)]).astype(np.float64)
    return values


def _gap(one: _Values, two: _Values) -> float:
    return float(np.abs(one - two).mean())
