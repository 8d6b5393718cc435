"""Makes sure that adapters work in the engines: after each publish they must answer as the trainer does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from vlmrl.config.data import Data
from vlmrl.config.rollout import Rollout
from vlmrl.data.responses import to_samples
from vlmrl.errors import SyncError
from vlmrl.plugins import Processor
from vlmrl.rollout.sampling import Sampling
from vlmrl.types import Floats, Group, Metrics, Prompt, Sample
from vlmrl.verify.logprobs import check_versions

_NUM_PROMPT_TOKENS = 272
"""More than two blocks of vLLM's prefix cache on CPU, which are the largest: a stale one is read."""
_NUM_SAMPLED = 128
"""Tokens of all answers to a question together: enough for their mean to say something in half precision."""
_NUM_ANSWER_TOKENS = 16
_MOST_ANSWERS = 32

_VISIBLE = 10
"""An effect of so many times the noise can be told from it."""
_NEARER = 5
"""An explanation is better when what it leaves unexplained is smaller by this factor."""
_MERGED_NOISE = 0.25
"""Share of the bound that is taken for noise where no base is there to measure it on."""
_SLOPE_SLACK = 0.1
"""How far from once the trainer's effect an engine's may be, where it is visible."""
_REST_SLACK = 0.3
"""How much of an engine's effect may be something else than a multiple of the trainer's."""
_FEW = 0.15
"""The same for an effect that is too small: tensors that are lacking leave more of that than a small factor does."""

_WORDS = (
    "apple bridge candle desert engine flower garden hammer island jacket kettle ladder mirror needle orange paper",
    "quiet river silver table under valley window yellow zebra above below north south blue green seven twelve often",
    "never maybe slow quick old new bright heavy light early late inside outside once twice again",
)
"""In any order: what comes next is anybody's guess, so that no log-prob is near 0, where nothing would show."""

_IGNORED = "ignores the adapter"

Vector = NDArray[np.float64]


class Engines(Protocol):
    """Where the adapters should be."""

    def answer_each(
        self, prompt: Prompt, sampling: Sampling, *, adapter: Sequence[bool] = (True,)
    ) -> list[list[Group]]:
        """For each of `adapter` what every engine answers: with the adapter, or as the base would."""


class Learner(Protocol):
    """Where they come from."""

    def logprobs(self, samples: Sequence[Sample], *, adapter: bool = True) -> list[Floats]:
        """One array of [T] per sample; without `adapter`, by the base."""

    def adapter_is_zero(self) -> bool:
        """Whether the adapter changes nothing yet."""


class Probe:
    """Asks every engine the same question after each publish, and other ones where the answers look wrong.

    A question is answered with the adapter and, where the engines hold it apart from the base, without. The trainer
    then says of the same tokens what it would have said, with and without. Everything is compared in the distribution
    that is sampled from. The first question is always the same, so that a stale prefix cache would be read.

    One mean of noisy log-probs proves nothing: an engine is at fault when the answers to two other questions look wrong
    too, or, where a stale cache is the cause, other answers to the same question.

    An effect that drowns in rounding, as that of the first steps at a small learning rate does, tells nothing of what
    the engines do with it: that they hold the right adapter is then known from what they read back at the publish.
    """

    def __init__(
        self,
        *,
        engines: Engines,
        learner: Learner,
        question: Callable[[str], Prompt],
        sampling: Sampling,
        bound: float,
        floor: float,
        is_apart: bool,
    ) -> None:
        """`question` makes a prompt that begins with a given text. `bound` is how far log-probs of engine and trainer
        may be apart, on average over tokens, and `floor` what rounding alone may make of it in the run's type.
        `is_apart`: the engines hold the adapter apart from the base.
        """
        self._engines, self._learner = engines, learner
        self._question, self._sampling = question, sampling
        self._bound, self._floor, self._is_apart = bound, floor, is_apart
        self._last: tuple[int, list[Group], list[Seen]] | None = None
        """The version before, what the engines answered, and what the trainer said of that."""

    def check(self, version: int) -> Metrics:
        """Returns, of the engine where it is largest, `sync/probe_gap`, the mean difference between engine and trainer;
        `sync/base_gap`, the same with adapters off; `sync/probe_change`, how much the adapter changes; and in how many
        engines something looked wrong at first, `sync/probe_doubts`.

        Raises SyncError, naming engine and cause, when

        * the trainer's own log-probs change when an adapter of zeros is switched off;
        * the base differs by more than `bound`;
        * the engine's answers with the adapter differ from the trainer's by more than `bound`, or differ visibly in a
          way that has a name: adapter ignored, that of the version before, applied twice, wrongly scaled, another one,
          or a stale prefix cache.
        """
        first = self._ask("", version=version)
        if self._learner.adapter_is_zero():
            self._check_zero([one.seen for one in first])
        doubts = [engine for engine, one in enumerate(first) if self._is_odd(one)]
        if doubts:
            # What no cache has seen tells a wrong adapter from wrong memories of the right one.
            others = [self._ask(lead, version=version) for lead in (f"{version}. ", f"{version}, once more: ")]
            for engine in doubts:
                self._check_engine(engine, first[engine], [asked[engine] for asked in others], version=version)
        self._last = version, [one.group for one in first], [one.seen for one in first]
        metrics = {
            "sync/probe_gap": max(one.seen.gap for one in first),
            "sync/probe_change": max(one.seen.change for one in first),
            "sync/probe_doubts": float(len(doubts)),
        }
        gaps = [one.base_gap for one in first if one.base_gap is not None]
        return metrics | ({"sync/base_gap": max(gaps)} if gaps else {})

    def _ask(self, lead: str, *, version: int, draw: int = 0) -> list[Asked]:
        """What every engine answers to the question that begins with `lead`; with another `draw`, other answers."""
        question, sampling = self._question(lead), replace(self._sampling, seed=self._sampling.seed + draw)
        both = self._engines.answer_each(question, sampling, adapter=(True, False) if self._is_apart else (True,))
        answers, plain = both if self._is_apart else (*both, [])
        check_versions([*answers, *plain], version=version)
        seen, bases = self._compare(answers, plain)
        gaps: list[float | None] = [_gap(base.engine, base.off) for base in bases] or [None] * len(seen)
        return [Asked(group, one, gap) for group, one, gap in zip(answers, seen, gaps, strict=True)]

    def _check_engine(self, engine: int, first: Asked, others: Sequence[Asked], *, version: int) -> None:
        every = (first, *others)
        if all(self._has_other_base(asked) for asked in every):
            raise SyncError(
                f"probe: engine {engine} and the trainer differ by {first.base_gap:.2g} on average with adapters off, "
                f"the bound is {self._bound:g}: their base weights are not the same model; look at "
                "--actor.model_name_or_path and --vllm.qlora_base, or raise --vllm.max_logprob_diff"
            )
        cause = self._cause(engine, first, others, version=version)
        if cause is not None:
            gap, change, noise = first.seen.gap, first.seen.change, self._noise(first)
            raise SyncError(
                f"probe: engine {engine} {cause}: its log-probs with the adapter of version {version} are {gap:.2g} "
                f"from the trainer's on average, where the adapter changes {change:.2g} and rounding {noise:.2g}; "
                "restart the run with --ckpt.load_enable"
            )

    def _noise(self, asked: Asked) -> float:
        gap = _MERGED_NOISE * self._bound if asked.base_gap is None else asked.base_gap
        return max(gap, self._floor)

    def _fault(self, asked: Asked) -> str | None:
        return fault(asked.seen, noise=self._noise(asked), bound=self._bound)

    def _has_other_base(self, asked: Asked) -> bool:
        return asked.base_gap is not None and not asked.base_gap <= self._bound

    def _is_odd(self, asked: Asked) -> bool:
        """Whether anything looks wrong; chance may have done it."""
        is_far = asked.seen.gap > _VISIBLE * self._noise(asked)
        return is_far or self._has_other_base(asked) or self._fault(asked) is not None

    def _compare(self, answers: Sequence[Group], plain: Sequence[Group]) -> tuple[list[Seen], list[Seen]]:
        """What both sides say of the answers, engine by engine: of those with the adapter, and of those without."""
        groups = [*answers, *plain]
        # All answer one question, so that its tokens are computed once where the layout shares prompts; and engines
        # that hold the same model answer the same.
        samples = {sample.tokens.tobytes(): replace(sample, group=0) for sample in to_samples(groups)}
        asked = list(samples.values())
        on = dict(zip(samples, self._learner.logprobs(asked), strict=True))
        off = dict(zip(samples, self._learner.logprobs(asked, adapter=False), strict=True))
        seen = []
        for group in groups:
            columns = [
                np.concatenate([row[rollout.sampled] for row, rollout in zip(rows, group.rollouts, strict=True)])
                for rows in (
                    [rollout.logprobs for rollout in group.rollouts],
                    *([values[rollout.tokens.tobytes()] for rollout in group.rollouts] for values in (on, off)),
                )
            ]
            seen.append(Seen(*(column.astype(np.float64) for column in columns)))
        return seen[: len(answers)], seen[len(answers) :]

    def _check_zero(self, seen: Sequence[Seen]) -> None:
        change = max(one.change for one in seen)
        if not change <= self._bound:
            raise SyncError(
                f"probe: the trainer's log-probs change by {change:.2g} on average when its adapter is switched off, "
                f"and the adapter is all zeros (bound {self._bound:g}): what answers without it is not the base"
            )

    def _cause(self, engine: int, first: Asked, others: Sequence[Asked], *, version: int) -> str | None:
        """What is wrong with an engine whose `first` answers are odd; None when nothing is, or nothing can be seen."""
        found, gap = self._fault(first), first.seen.gap
        faults = [self._fault(asked) for asked in others]
        if not any(faults) and max(asked.seen.gap for asked in others) < gap / _NEARER:
            again = self._ask("", version=version, draw=1)
            return "answers from a stale prefix cache" if self._is_odd(again[engine]) else None
        if found is not None and None in faults:
            return None
        if found == _IGNORED:
            return found
        if self._last is not None:
            before, groups, then = self._last
            if _is_repeated(first.group, groups[engine]) and _gap(first.seen.engine, then[engine].on) < gap / _NEARER:
                return f"keeps the adapter of version {before}"
        return found


class Seen(NamedTuple):
    """Log-probs of one engine's answers: one number per token."""

    engine: Vector
    on: Vector
    """By the trainer, with the adapter."""
    off: Vector
    """By the trainer, without."""

    @property
    def gap(self) -> float:
        """Between engine and trainer, adapter on; not a number where either is."""
        return _gap(self.engine, self.on)

    @property
    def change(self) -> float:
        """What the adapter does, by the trainer."""
        return _gap(self.on, self.off)


class Asked(NamedTuple):
    """One engine's answers to one question."""

    group: Group
    seen: Seen
    base_gap: float | None
    """Mean difference between engine and trainer with adapters off; None where the engines hold no base by itself."""


def fault(seen: Seen, *, noise: float, bound: float) -> str | None:
    """What is wrong with what an engine said with the adapter; None when nothing is, or nothing can be seen.

    Both sides' effects, e of the engine and t of the trainer, are measured from the trainer's base. An engine that
    applies the adapter c times has e = c t as long as c t is small, so the least-squares slope <e, t> / <t, t> is c.
    """
    excess = f"differs by more than the bound of {bound:g}"
    if not np.isfinite(seen.gap):
        return "gives log-probs that are not numbers"
    if not seen.change > _VISIBLE * noise:
        return None if seen.gap <= bound else excess
    wanted, effect = seen.on - seen.off, seen.engine - seen.off
    slope = float(effect @ wanted / (wanted @ wanted))
    rest = float(np.linalg.norm(effect - slope * wanted) / np.linalg.norm(wanted))
    if np.linalg.norm(effect) <= _REST_SLACK * np.linalg.norm(wanted):
        return _IGNORED
    if abs(slope - 1) <= _SLOPE_SLACK and rest <= _REST_SLACK:
        return None if seen.gap <= bound else excess
    if slope < 0 or rest > (_FEW if slope < 1 else _REST_SLACK):
        return "applies another adapter: tensors were lost, or came under other names, or are scaled wrongly"
    if abs(slope - 2) <= _REST_SLACK:
        return "applies the adapter twice"
    return f"applies the adapter {slope:.2f} times: the scaling is wrong{', or tensors were lost' if slope < 1 else ''}"


def sampling_of(rollout: Rollout, *, seed: int) -> Sampling:
    """How the questions are answered: as the run's own are, in short."""
    length = min(_NUM_ANSWER_TOKENS, rollout.max_new_tokens)
    return Sampling(
        n=min(_MOST_ANSWERS, -(-_NUM_SAMPLED // length)),
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        max_new_tokens=length,
        seed=seed,
    )


def question(lead: str, *, processor: Processor, data: Data) -> Prompt:
    """Words without a sense that begin with `lead`, as long as a prompt may be, without images."""
    length = min(_NUM_PROMPT_TOKENS, data.max_len)
    words = np.random.default_rng([1, *lead.encode()]).choice(" ".join(_WORDS).split(), size=length)
    text = lead + " ".join(words)
    tokens, _ = processor.encode(text, ())
    tokens = tokens[:length]
    return Prompt(index=0, source="probe", text=processor.decode(tokens), tokens=tokens, request=tokens, label=None)


def told(metrics: Metrics) -> str:
    """What a probe found, for people."""
    bases = f", {metrics['sync/base_gap']:.2g} with adapters off" if "sync/base_gap" in metrics else ""
    return (
        f"probe: log-probs of engines and trainer differ by {metrics['sync/probe_gap']:.2g} on average with adapters on"
        f"{bases}; the adapters change {metrics['sync/probe_change']:.2g}"
    )


def _gap(one: Vector, two: Vector) -> float:
    """Mean absolute difference over tokens."""
    return float(np.abs(one - two).mean())


def _is_repeated(now: Group, then: Group) -> bool:
    """Whether an engine says word for word what it said before."""
    pairs = zip(now.rollouts, then.rollouts, strict=True)
    return all(np.array_equal(one.tokens, other.tokens) for one, other in pairs)
