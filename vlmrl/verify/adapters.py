"""Check after each weight sync that the engines compute what the trainer computes, with the adapter on and off."""

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
from vlmrl.types import Floats, Group, Metrics, Prompt, Sample, Sampling
from vlmrl.verify.logprobs import check_versions

_NUM_PROMPT_TOKENS = 272
"""More than two blocks of vLLM's prefix cache on CPU, where blocks are largest, so that a stale one is used."""
_NUM_SAMPLED = 128
"""Tokens of all responses to a prompt together: enough for a meaningful mean in half precision."""
_NUM_RESPONSE_TOKENS = 16
_MAX_RESPONSES = 32

_VISIBLE = 10
"""An effect this many times the noise is visible."""
_NEARER = 5
"""An explanation counts as better when it leaves a gap smaller by this factor."""
_MERGED_NOISE = 0.25
"""Share of the bound taken as noise where the engine holds no base to measure it on."""
_SLOPE_SLACK = 0.1
"""Tolerance of the slope between the effects in engine and trainer, which is 1 for a correct engine."""
_REST_SLACK = 0.3
"""Share of an engine's effect that need not be a multiple of the trainer's."""
_REST_SLACK_SMALL = 0.15
"""The same for an effect that is too small: missing tensors leave more of it than a small factor does."""

_WORDS = (
    "apple bridge candle desert engine flower garden hammer island jacket kettle ladder mirror needle orange paper",
    "quiet river silver table under valley window yellow zebra above below north south blue green seven twelve often",
    "never maybe slow quick old new bright heavy light early late inside outside once twice again",
)
"""In random order, so that no token is predictable: log-probs near 0 would hide differences."""

_IGNORED = "ignores the adapter"

Vector = NDArray[np.float64]


class Engines(Protocol):
    """The engines, which hold copies of the adapter."""

    def respond_each(
        self, prompt: Prompt, sampling: Sampling, *, adapter: Sequence[bool] = (True,)
    ) -> list[list[Group]]:
        """Return one response group per engine for each of `adapter`: with the adapter, or by the base only."""


class Learner(Protocol):
    """The policy, which trains the adapter."""

    def logprobs(self, samples: Sequence[Sample], *, adapter: bool = True) -> list[Floats]:
        """Return one array of [T] per sample; without `adapter`, by the base."""

    def adapter_is_zero(self) -> bool:
        """Whether the adapter changes nothing yet."""


class AdapterCheck:
    """Sends every engine the same prompt after each weight sync, and further prompts where the responses look wrong.

    The engines respond with the adapter and, where they hold it apart from the base, without it. The trainer scores the
    same tokens, with and without. Both sides use the distribution that responses are sampled from. The first prompt is
    always the same, so that a stale prefix cache is used and detected.

    One mean of noisy log-probs is not a proof: an engine is at fault only when its responses to two other prompts look
    wrong too, or, for a stale cache, other responses to the same prompt.

    An adapter whose effect is below rounding, as in the first steps at a small learning rate, cannot be checked this
    way. Then the layers that are read back at the sync prove that the engines hold it.
    """

    def __init__(
        self,
        *,
        engines: Engines,
        learner: Learner,
        prompt: Callable[[str], Prompt],
        sampling: Sampling,
        bound: float,
        floor: float,
        is_apart: bool,
    ) -> None:
        """Create the check.

        Args:
            prompt: makes a prompt that begins with a given text.
            bound: on the mean difference between log-probs of engine and trainer.
            floor: the mean difference that rounding may cause in the run's data type.
            is_apart: the engines hold the adapter separately from the base.
        """
        self._engines, self._learner = engines, learner
        self._prompt, self._sampling = prompt, sampling
        self._bound, self._floor, self._is_apart = bound, floor, is_apart
        self._last: tuple[int, list[Group], list[LogProbs]] | None = None
        """The previous version, the engines' responses, and both sides' log-probs of them."""

    def check(self, version: int) -> Metrics:
        """Compare all engines with the trainer at this version.

        Returns, for the engine where it is largest, `verify/adapters/gap`, the mean difference between engine and
        trainer; `verify/adapters/base_gap`, the same with adapters off; `verify/adapters/effect`, how much the adapter
        changes a log-prob; and `verify/adapters/doubts`, the number of engines whose first responses looked wrong.

        Raises SyncError, naming engine and cause, when

        * the trainer's own log-probs change when an adapter of zeros is switched off;
        * the base differs by more than `bound`;
        * the engine's log-probs with the adapter differ from the trainer's by more than `bound`, or differ visibly in a
          known way: adapter ignored, previous version, applied twice, wrongly scaled, another adapter, or a stale
          prefix cache.
        """
        first = self._sample("", version=version)
        if self._learner.adapter_is_zero():
            self._check_zero([responses.logprobs for responses in first])
        doubts = [engine for engine, responses in enumerate(first) if self._looks_wrong(responses)]
        if doubts:
            # Prompts that are in no cache distinguish a wrong adapter from a stale cache.
            others = [self._sample(lead, version=version) for lead in (f"{version}. ", f"{version}, once more: ")]
            for engine in doubts:
                self._check_engine(engine, first[engine], [responses[engine] for responses in others], version=version)
        self._last = version, [responses.group for responses in first], [responses.logprobs for responses in first]
        metrics = {
            "verify/adapters/gap": max(responses.logprobs.gap for responses in first),
            "verify/adapters/effect": max(responses.logprobs.change for responses in first),
            "verify/adapters/doubts": float(len(doubts)),
        }
        gaps = [responses.base_gap for responses in first if responses.base_gap is not None]
        return metrics | ({"verify/adapters/base_gap": max(gaps)} if gaps else {})

    def _sample(self, lead: str, *, version: int, draw: int = 0) -> list[Responses]:
        """Sample every engine's responses to the prompt that begins with `lead`; each `draw` gives different ones."""
        prompt, sampling = self._prompt(lead), replace(self._sampling, seed=self._sampling.seed + draw)
        both = self._engines.respond_each(prompt, sampling, adapter=(True, False) if self._is_apart else (True,))
        groups, base_groups = both if self._is_apart else (*both, [])
        check_versions([*groups, *base_groups], version=version)
        adapted, bases = self._compare(groups, base_groups)
        gaps: list[float | None] = [_gap(base.engine, base.off) for base in bases] or [None] * len(adapted)
        return [Responses(group, logprobs, gap) for group, logprobs, gap in zip(groups, adapted, gaps, strict=True)]

    def _check_engine(self, engine: int, first: Responses, others: Sequence[Responses], *, version: int) -> None:
        if all(self._has_other_base(responses) for responses in (first, *others)):
            raise SyncError(
                f"adapter check: engine {engine} and the trainer differ by {first.base_gap:.2g} on average with "
                f"adapters off, the bound is {self._bound:g}: their base weights are not the same model; check "
                "--actor.model_name_or_path and --vllm.qlora_base, or raise --vllm.max_logprob_diff"
            )
        cause = self._cause(engine, first, others, version=version)
        if cause is not None:
            gap, change, noise = first.logprobs.gap, first.logprobs.change, self._noise(first)
            raise SyncError(
                f"adapter check: engine {engine} {cause}: its log-probs with the adapter of version {version} differ "
                f"from the trainer's by {gap:.2g} on average, the adapter's effect is {change:.2g} and rounding "
                f"{noise:.2g}; restart the run with --ckpt.load_enable"
            )

    def _noise(self, responses: Responses) -> float:
        gap = _MERGED_NOISE * self._bound if responses.base_gap is None else responses.base_gap
        return max(gap, self._floor)

    def _fault(self, responses: Responses) -> str | None:
        return fault(responses.logprobs, noise=self._noise(responses), bound=self._bound)

    def _has_other_base(self, responses: Responses) -> bool:
        return responses.base_gap is not None and not responses.base_gap <= self._bound

    def _looks_wrong(self, responses: Responses) -> bool:
        """Whether anything looks wrong, even if by chance."""
        is_far = responses.logprobs.gap > _VISIBLE * self._noise(responses)
        return is_far or self._has_other_base(responses) or self._fault(responses) is not None

    def _compare(self, adapted: Sequence[Group], bases: Sequence[Group]) -> tuple[list[LogProbs], list[LogProbs]]:
        """Both sides' log-probs, engine by engine: of the responses with the adapter, and of those without."""
        groups = [*adapted, *bases]
        # One group, so that a layout that shares prompts computes the prompt once. Engines that hold the same model
        # sample equal responses, which are computed once too.
        samples = {sample.tokens.tobytes(): replace(sample, group=0, response=None) for sample in to_samples(groups)}
        distinct = list(samples.values())
        on = dict(zip(samples, self._learner.logprobs(distinct), strict=True))
        off = dict(zip(samples, self._learner.logprobs(distinct, adapter=False), strict=True))
        compared = []
        for group in groups:
            columns = [
                np.concatenate([row[segment.sampled] for row, segment in zip(rows, group.segments, strict=True)])
                for rows in (
                    [segment.logprobs for segment in group.segments],
                    *([values[segment.tokens.tobytes()] for segment in group.segments] for values in (on, off)),
                )
            ]
            compared.append(LogProbs(*(column.astype(np.float64) for column in columns)))
        return compared[: len(adapted)], compared[len(adapted) :]

    def _check_zero(self, logprobs: Sequence[LogProbs]) -> None:
        change = max(columns.change for columns in logprobs)
        if not change <= self._bound:
            raise SyncError(
                f"adapter check: the trainer's log-probs change by {change:.2g} on average when its adapter, which is "
                f"all zeros, is switched off (bound {self._bound:g}): the model without the adapter is not the base"
            )

    def _cause(self, engine: int, first: Responses, others: Sequence[Responses], *, version: int) -> str | None:
        """Return the fault of an engine whose `first` responses look wrong; None when there is none, or none is
        visible."""
        first_fault, gap = self._fault(first), first.logprobs.gap
        faults = [self._fault(responses) for responses in others]
        if not any(faults) and max(responses.logprobs.gap for responses in others) < gap / _NEARER:
            again = self._sample("", version=version, draw=1)
            return "responds from a stale prefix cache" if self._looks_wrong(again[engine]) else None
        if first_fault is not None and None in faults:
            return None
        if first_fault == _IGNORED:
            return first_fault
        if self._last is not None:
            last_version, groups, logprobs = self._last
            if (
                _is_repeated(first.group, groups[engine])
                and _gap(first.logprobs.engine, logprobs[engine].on) < gap / _NEARER
            ):
                return f"keeps the adapter of version {last_version}"
        return first_fault


class LogProbs(NamedTuple):
    """Log-probs of one engine's responses: one number per token."""

    engine: Vector
    on: Vector
    """By the trainer, with the adapter."""
    off: Vector
    """By the trainer, without."""

    @property
    def gap(self) -> float:
        """Mean difference between engine and trainer, adapter on; NaN where either has one."""
        return _gap(self.engine, self.on)

    @property
    def change(self) -> float:
        """Effect of the adapter, by the trainer."""
        return _gap(self.on, self.off)


class Responses(NamedTuple):
    """One engine's responses to one prompt."""

    group: Group
    logprobs: LogProbs
    base_gap: float | None
    """Mean difference between engine and trainer with adapters off; None where the engines hold merged weights."""


def fault(logprobs: LogProbs, *, noise: float, bound: float) -> str | None:
    """Name the fault in an engine's log-probs with the adapter; None when there is none, or none is visible.

    Effects of the adapter, e in the engine and t in the trainer, are relative to the trainer's base. An engine that
    applies the adapter c times has e = c t as long as c t is small, so the least-squares slope <e, t> / <t, t> is c.
    """
    excess = f"differs by more than the bound of {bound:g}"
    if not np.isfinite(logprobs.gap):
        return "gives log-probs that are not numbers"
    if not logprobs.change > _VISIBLE * noise:
        return None if logprobs.gap <= bound else excess
    expected, effect = logprobs.on - logprobs.off, logprobs.engine - logprobs.off
    slope = float(effect @ expected / (expected @ expected))
    rest = float(np.linalg.norm(effect - slope * expected) / np.linalg.norm(expected))
    if np.linalg.norm(effect) <= _REST_SLACK * np.linalg.norm(expected):
        return _IGNORED
    if abs(slope - 1) <= _SLOPE_SLACK and rest <= _REST_SLACK:
        return None if logprobs.gap <= bound else excess
    if slope < 0 or rest > (_REST_SLACK_SMALL if slope < 1 else _REST_SLACK):
        return "applies another adapter: tensors were lost, or came under other names, or are scaled wrongly"
    if abs(slope - 2) <= _REST_SLACK:
        return "applies the adapter twice"
    return f"applies the adapter {slope:.2f} times: the scaling is wrong{', or tensors were lost' if slope < 1 else ''}"


def sampling_of(rollout: Rollout, *, seed: int) -> Sampling:
    """Return the run's sampling settings, for short responses."""
    length = min(_NUM_RESPONSE_TOKENS, rollout.max_new_tokens)
    return Sampling(
        n=min(_MAX_RESPONSES, -(-_NUM_SAMPLED // length)),
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        max_new_tokens=length,
        seed=seed,
    )


def prompt_of(lead: str, *, processor: Processor, data: Data) -> Prompt:
    """Make a prompt of random words after `lead`, of `data.max_len` tokens at most, without images."""
    length = min(_NUM_PROMPT_TOKENS, data.max_len)
    words = np.random.default_rng([1, *lead.encode()]).choice(" ".join(_WORDS).split(), size=length)
    text = lead + " ".join(words)
    tokens, _ = processor.encode(text, ())
    tokens = tokens[:length]
    return Prompt(
        index=0, source="adapter check", text=processor.decode(tokens), tokens=tokens, request=tokens, label=None
    )


def format_check(metrics: Metrics) -> str:
    """Format the result of a check in one line."""
    bases = (
        f", {metrics['verify/adapters/base_gap']:.2g} with adapters off"
        if "verify/adapters/base_gap" in metrics
        else ""
    )
    return (
        f"adapter check: log-probs of engines and trainer differ by {metrics['verify/adapters/gap']:.2g} on average "
        f"with adapters on{bases}; the adapters change them by {metrics['verify/adapters/effect']:.2g}"
    )


def _gap(first: Vector, second: Vector) -> float:
    """Mean absolute difference over tokens."""
    return float(np.abs(first - second).mean())


def _is_repeated(current: Group, previous: Group) -> bool:
    """Whether an engine repeats its previous responses token for token."""
    pairs = zip(current.segments, previous.segments, strict=True)
    return all(np.array_equal(response.tokens, before.tokens) for response, before in pairs)
