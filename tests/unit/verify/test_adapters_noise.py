"""The adapter check in half precision: correct engines always pass, planted faults never do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from vlmrl.config.rollout import Rollout as RolloutSettings
from vlmrl.errors import SyncError
from vlmrl.types import Floats, Group, Prompt, Rollout, Sample, Sampling
from vlmrl.verify.adapters import AdapterCheck, sampling_of

Values = NDArray[np.float64]
BOUND = 0.1
PROMPT = np.arange(3)


def scaled(factor: float) -> Callable[[Values, np.random.Generator], Values]:
    return lambda effect, rng: factor * effect


class HalfPrecision:
    """An engine and a trainer that agree but for rounding. Of each token there is a log-prob of the base and what the
    adapter does to it, `change` on average; each side then rounds in its own way.

    Rounding follows a log-normal mixture: many tokens hardly differ, a few by more than ten times the mean, as engines
    and trainers in bf16 do. Its mean is 0.003 to 0.03, drawn for every response to a question: one text is surer than
    another, and what the base says is another text. It grows with a token's uncertainty.
    """

    def __init__(self, seed: int, *, fault: Callable[[Values, np.random.Generator], Values] | None = None) -> None:
        self.rng = np.random.default_rng(seed)
        self.fault = fault or scaled(1.0)
        self.version = 0
        self.change = 0.0
        self.said: dict[bytes, tuple[Values, Values, float]] = {}
        """For each response: log-probs of the base, effect of the adapter, and size of rounding."""
        self.check = AdapterCheck(
            engines=self,
            learner=self,
            prompt=lambda lead: Prompt(0, "adapter check", lead, PROMPT, PROMPT, label=None),
            sampling=sampling_of(RolloutSettings(), seed=0),
            bound=BOUND,
            floor=BOUND / 4,
            is_apart=True,
        )

    def sync(self, change: float) -> dict[str, float]:
        self.said.clear()
        self.change, self.version = change, self.version + 1
        return self.check.check(self.version)

    def rounded(self, values: Values, noise: float | Values) -> Values:
        spread = np.exp(self.rng.normal(size=values.shape) - 0.5) * noise * np.sqrt(np.pi / 2)
        # One side's share of a difference between two, which an uncertain token has in full.
        uncertain = np.minimum(1.0, 2 * (1 - np.exp(np.minimum(values, 0.0))))
        result: Values = values + spread * uncertain * self.rng.normal(size=values.shape) / np.sqrt(2)
        return result

    def respond_each(
        self, prompt: Prompt, sampling: Sampling, *, adapter: Sequence[bool] = (True,)
    ) -> list[list[Group]]:
        return [[self.answer(prompt, sampling, adapter=each)] for each in adapter]

    def answer(self, prompt: Prompt, sampling: Sampling, *, adapter: bool) -> Group:
        size = (sampling.n, sampling.max_new_tokens)
        tokens = self.rng.integers(0, 50_000, size)
        base = -self.rng.exponential(1.0, size)
        effect = self.rng.laplace(scale=self.change, size=size)
        noise = float(np.exp(self.rng.uniform(*np.log([0.003, 0.03]))))
        engine = self.rounded(base + self.fault(effect, self.rng) if adapter else base, noise)
        rollouts = []
        for row in range(sampling.n):
            whole = np.concatenate([prompt.tokens, tokens[row]])
            self.said[whole.tobytes()] = base[row], effect[row], noise
            logprobs = np.concatenate([np.zeros(len(PROMPT)), engine[row]]).astype(np.float32)
            sampled = np.arange(len(whole)) >= len(PROMPT)
            rollouts.append(Rollout.of_response(whole, sampled, logprobs, "", "length", self.version))
        return Group(prompt, tuple(rollouts))

    def logprobs(self, samples: Sequence[Sample], *, adapter: bool = True) -> list[Floats]:
        known = [self.said[sample.tokens.tobytes()] for sample in samples]
        values = np.stack([base + effect if adapter else base for base, effect, _ in known])
        values = self.rounded(values, np.array([[noise] for *_, noise in known]))
        return list(np.pad(values, ((0, 0), (len(PROMPT), 0))).astype(np.float32))

    def adapter_is_zero(self) -> bool:
        return self.change == 0.0


def changes(count: int) -> Values:
    """Return effects of an adapter over a run: zero at first, then from 1e-5 to 2."""
    sizes: Values = np.geomspace(1e-5, 2.0, count)
    sizes[0] = 0.0
    return sizes


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.prove)])
def test_correct_engines_in_half_precision_pass_thousands_of_syncs(count: int) -> None:
    run = HalfPrecision(0)
    metrics = [run.sync(change) for change in changes(count)]
    assert sum(line["verify/adapters/doubts"] for line in metrics) == 0
    gaps = [line["verify/adapters/gap"] for line in metrics]
    assert max(gaps) > 0.03, "the noise is worth the name"
    assert max(line["verify/adapters/effect"] for line in metrics) > 1


def shuffled(effect: Values, rng: np.random.Generator) -> Values:
    return rng.permuted(effect, axis=1)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (scaled(0.0), "ignores the adapter"),
        (scaled(2.0), "applies the adapter twice|applies another adapter"),
        (scaled(1.5), "applies the adapter 1.[3456]. times|applies another adapter"),
        (scaled(0.5), "applies the adapter 0.[3456]. times|applies another adapter"),
        (shuffled, "applies another adapter"),
    ],
)
def test_a_planted_fault_in_half_precision_is_found_at_every_sync(
    fault: Callable[[Values, np.random.Generator], Values], cause: str
) -> None:
    run = HalfPrecision(1, fault=fault)
    for change in np.geomspace(0.6, 2.0, 50):
        with pytest.raises(SyncError, match=f"adapter check: engine 0 ({cause})"):
            run.sync(change)


def test_a_fault_that_rounding_hides_is_found_when_it_leaves_the_bound() -> None:
    run = HalfPrecision(2, fault=scaled(0.0))
    run.sync(0.02)
    for _ in range(50):
        with pytest.raises(SyncError, match=r"differs by more than the bound of 0\.1"):
            run.sync(0.18)
