"""The adapter check on a small engine with adapters, a prefix cache, and every fault that the check must name."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from vlmrl.config.data import Data
from vlmrl.config.rollout import Rollout as RolloutSettings
from vlmrl.errors import SyncError
from vlmrl.models import tiny
from vlmrl.plugins import processor
from vlmrl.types import Floats, Group, Prompt, Rollout, Sample, Sampling
from vlmrl.verify.adapters import AdapterCheck, LogProbs, fault, format_check, prompt_of, sampling_of

BOUND = 1e-3
Matrix = NDArray[np.float64]

# ---------------------------------------------------------------- one engine's numbers, by hand

OFF = np.array([-1.0, -2.0, -3.0, -1.5])
CHANGE = np.array([0.1, -0.2, 0.1, 0.0])


def seen(times: float, *, shift: float = 0.0) -> LogProbs:
    return LogProbs(engine=OFF + times * CHANGE + shift, on=OFF + CHANGE, off=OFF)


def test_gap_and_change_by_hand() -> None:
    assert seen(1.0, shift=0.5).gap == pytest.approx(0.5)
    assert seen(1.0).change == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("times", "cause"),
    [
        (0.0, "ignores the adapter"),
        (2.0, "applies the adapter twice"),
        (1.41, "applies the adapter 1.41 times: the scaling is wrong"),
        (0.5, "applies the adapter 0.50 times: the scaling is wrong, or tensors were lost"),
        (1.0, None),
    ],
)
def test_the_slope_is_how_often_the_adapter_is_applied(times: float, cause: str | None) -> None:
    assert fault(seen(times), noise=1e-6, bound=1.0) == cause


def test_an_effect_of_another_direction_is_another_adapter() -> None:
    for other in (LogProbs(engine=OFF + CHANGE[::-1], on=OFF + CHANGE, off=OFF), seen(-1.0)):
        cause = fault(other, noise=1e-6, bound=1.0)
        assert cause is not None
        assert "applies another adapter: tensors were lost, or came under other names" in cause


def test_an_effect_below_the_noise_is_only_bounded() -> None:
    # The adapter changes 0.1 on average, which ten times the noise hides.
    assert fault(seen(0.0), noise=0.011, bound=0.2) is None
    assert fault(seen(0.0), noise=0.011, bound=0.05) == "differs by more than the bound of 0.05"
    assert fault(seen(0.0), noise=0.009, bound=0.2) == "ignores the adapter"


def test_a_constant_difference_is_no_multiple_of_the_adapter() -> None:
    assert fault(seen(1.0, shift=0.02), noise=1e-6, bound=1e-3) == "differs by more than the bound of 0.001"
    assert fault(seen(1.0, shift=0.02), noise=1e-6, bound=1.0) is None


def test_nan_is_a_fault() -> None:
    for values in ({"engine": OFF * np.nan}, {"on": OFF * np.nan}):
        assert fault(seen(1.0)._replace(**values), noise=1.0, bound=np.inf) == "gives log-probs that are not numbers"


# ---------------------------------------------------------------- a model with adapters and a prefix cache

V, D = 24, 8
RNG = np.random.default_rng(0)
EMBEDDINGS, MIXING, HEAD = RNG.normal(size=(V, D)), RNG.normal(size=(D, D)), RNG.normal(size=(V, D))


@dataclass(frozen=True)
class Adapter:
    """Additions to the two matrices of the model."""

    mixing: Matrix
    head: Matrix

    def times(self, factor: float) -> Adapter:
        return Adapter(factor * self.mixing, factor * self.head)


NONE = Adapter(np.zeros((D, D)), np.zeros((V, D)))


def drawn(seed: int, size: float = 0.01) -> Adapter:
    rng = np.random.default_rng(seed)
    return Adapter(size * rng.normal(size=(D, D)), size * rng.normal(size=(V, D)))


def memories(tokens: Iterable[int], adapter: Adapter) -> list[Matrix]:
    """Return the state of each token, as in a KV cache."""
    return [np.tanh((MIXING + adapter.mixing) @ EMBEDDINGS[token]) for token in tokens]


def logprobs(kept: Sequence[Matrix], adapter: Adapter, temperature: float) -> Matrix:
    """[V] of the next token."""
    weights = 0.9 ** np.arange(len(kept))[::-1]
    logits = (HEAD + adapter.head) @ (weights @ np.stack(kept)) / temperature
    shifted = logits - logits.max()
    result: Matrix = shifted - np.log(np.exp(shifted).sum())
    return result


@dataclass
class Engine:
    """An engine with the adapter that it was sent, or as a fault changes it. `base` is the error of its base."""

    takes: Callable[[Adapter, Adapter], Adapter] = lambda held, sent: sent
    forgets: bool = True
    base: float = 0.0
    held: Adapter = NONE
    version: int = 0
    cache: dict[bytes, list[Matrix]] = field(default_factory=dict)

    def load(self, sent: Adapter, version: int) -> None:
        self.held, self.version = self.takes(self.held, sent), version
        if self.forgets:
            self.cache.clear()

    def generate(self, prompt: Prompt, sampling: Sampling, *, adapter: bool) -> Group:
        used = self.held if adapter else NONE
        used = Adapter(used.mixing, used.head + self.base * HEAD[::-1])
        key = prompt.tokens.tobytes() + bytes([adapter])
        begun = self.cache.setdefault(key, memories(prompt.tokens[:-1], used))
        rollouts = []
        for answer in range(sampling.n):
            rng = np.random.default_rng([sampling.request_seed(prompt.index), answer])
            kept, tokens, values = [*begun, *memories(prompt.tokens[-1:], used)], [], []
            for _ in range(sampling.max_new_tokens):
                row = logprobs(kept, used, sampling.temperature)
                tokens.append(int(rng.choice(V, p=np.exp(row))))
                values.append(row[tokens[-1]])
                kept += memories(tokens[-1:], used)
            rollouts.append(rollout(prompt, tokens, values, self.version))
        return Group(prompt, tuple(rollouts))


def rollout(prompt: Prompt, tokens: Sequence[int], values: Sequence[float], version: int) -> Rollout:
    length = len(prompt.tokens)
    return Rollout.of_response(
        tokens=np.append(prompt.tokens, tokens),
        sampled=np.arange(length + len(tokens)) >= length,
        logprobs=np.append(np.zeros(length), values).astype(np.float32),
        text="",
        finish_reason="length",
        version=version,
    )


@dataclass
class Trainer:
    """The same model, without a cache."""

    adapter: Adapter = NONE
    off: Adapter = NONE
    """The effect that remains when the adapter is off."""
    temperature: float = 0.7
    num_passes: int = 0

    def logprobs(self, samples: Sequence[Sample], *, adapter: bool = True) -> list[Floats]:
        self.num_passes += 1
        assert len({sample.tokens.tobytes() for sample in samples}) == len(samples), "what is the same is asked once"
        assert {sample.group for sample in samples} == {0}, "one question, whose tokens are shared"
        used = self.adapter if adapter else self.off
        rows = []
        for sample in samples:
            kept = memories(sample.tokens, used)
            row = [0.0, *(logprobs(kept[:t], used, self.temperature)[sample.tokens[t]] for t in range(1, len(kept)))]
            rows.append(np.where(sample.sampled, row, 0.0).astype(np.float32))
        return rows

    def adapter_is_zero(self) -> bool:
        return not (self.adapter.mixing.any() or self.adapter.head.any())


class Run:
    """A trainer, its engines, and the probe after each weight sync."""

    def __init__(self, *engines: Engine, bound: float = BOUND, is_apart: bool = True) -> None:
        self.engines, self.trainer, self.version = engines, Trainer(), -1
        self.check = AdapterCheck(
            engines=self,
            learner=self.trainer,
            prompt=self.prompt,
            sampling=Sampling(n=2, temperature=self.trainer.temperature, top_p=1.0, max_new_tokens=8, seed=0),
            bound=bound,
            floor=1e-6,
            is_apart=is_apart,
        )

    @staticmethod
    def prompt(lead: str) -> Prompt:
        tokens = np.array([*(ord(letter) % V for letter in lead), *range(3, 15)])
        return Prompt(0, "adapter check", lead, tokens, tokens, label=None)

    def respond_each(
        self, prompt: Prompt, sampling: Sampling, *, adapter: Sequence[bool] = (True,)
    ) -> list[list[Group]]:
        return [[engine.generate(prompt, sampling, adapter=each) for engine in self.engines] for each in adapter]

    def sync(self, adapter: Adapter) -> dict[str, float]:
        self.trainer.adapter, self.version = adapter, self.version + 1
        for engine in self.engines:
            engine.load(adapter, self.version)
        return self.check.check(self.version)


def keeps(held: Adapter, sent: Adapter) -> Adapter:
    """Takes the first two and none after."""
    return held if held.head.any() else sent


def mixed_up(sent: Adapter) -> Adapter:
    """The right numbers in the wrong places."""
    return Adapter(sent.mixing.T, sent.head[::-1])


def test_correct_engines_pass_with_metrics() -> None:
    run = Run(Engine(), Engine())
    for version in range(4):
        metrics = run.sync(NONE if version == 0 else drawn(version))
        assert metrics["verify/adapters/gap"] < 1e-6
        assert metrics["verify/adapters/base_gap"] < 1e-6
        assert (metrics["verify/adapters/effect"] > 1e-2) == (version > 0)
    assert run.trainer.num_passes == 4 * 2, "one pass with the adapter and one without, however many engines"


@pytest.mark.parametrize(
    ("engine", "cause"),
    [
        (Engine(takes=lambda held, sent: NONE), "engine 1 ignores the adapter"),
        (Engine(takes=keeps), "engine 1 keeps the adapter of version 1"),
        (Engine(takes=lambda held, sent: sent.times(2)), "engine 1 applies the adapter twice"),
        (
            Engine(takes=lambda held, sent: sent.times(2**0.5)),
            "engine 1 applies the adapter 1.[34]. times: the",
        ),
        (Engine(takes=lambda held, sent: replace(sent, head=NONE.head)), "engine 1 applies another adapter: tensors"),
        (
            Engine(takes=lambda held, sent: mixed_up(sent)),
            "engine 1 applies another adapter: .* or came under other names",
        ),
        (Engine(forgets=False), "engine 1 responds from a stale prefix cache"),
    ],
)
def test_a_faulty_engine_is_named_with_its_fault(engine: Engine, cause: str) -> None:
    run = Run(Engine(), engine)
    with pytest.raises(SyncError, match=rf"adapter check: {cause}.*restart the run with --ckpt.load_enable"):
        deque(run.sync(NONE if version == 0 else drawn(version)) for version in range(4))


@pytest.mark.parametrize("cause", ["keeps the adapter of version 1", "responds from a stale prefix cache"])
def test_an_old_adapter_is_detected_although_the_new_one_is_similar(cause: str) -> None:
    # One step moves the log-probs by a hundredth of what the whole adapter does: inside of the bound.
    run, first, step = Run(Engine()), drawn(1), drawn(2, size=1e-4)
    run.sync(NONE)
    run.sync(first)
    if cause.startswith("keeps"):
        run.engines[0].takes = keeps
    else:
        run.engines[0].forgets = False
    with pytest.raises(SyncError, match=cause):
        run.sync(Adapter(first.mixing + step.mixing, first.head + step.head))


def test_an_adapter_that_did_not_move_is_not_an_old_one() -> None:
    # A hundred roundings off, as an engine in another precision is, and the same twice: nothing to complain about.
    run = Run(Engine(takes=lambda held, sent: sent.times(1.001)))
    for adapter in (NONE, drawn(1), drawn(1), drawn(1)):
        metrics = run.sync(adapter)
    assert 1e-5 < metrics["verify/adapters/gap"] < BOUND


def test_another_base_is_distinguished_from_another_adapter() -> None:
    with pytest.raises(SyncError, match=r"engine 0 and the trainer differ by .* with adapters off, the bound is 0.001"):
        Run(Engine(base=0.1)).sync(NONE)


def test_the_base_gap_is_the_noise_where_the_base_may_differ() -> None:
    run = Run(Engine(base=0.01), bound=np.inf)
    gap = run.sync(NONE)["verify/adapters/base_gap"]
    assert gap > 1e-2
    assert run.sync(drawn(1, size=1e-3))["verify/adapters/effect"] < 10 * gap
    assert run.sync(drawn(1, size=0.2))["verify/adapters/effect"] > 10 * gap
    deaf = Run(Engine(base=0.01, takes=lambda held, sent: NONE), bound=np.inf)
    deaf.sync(drawn(1, size=1e-3))
    with pytest.raises(SyncError, match="ignores the adapter"):
        deaf.sync(drawn(1, size=0.2))


def test_a_trainer_whose_adapter_stays_on_has_no_base_to_compare_with() -> None:
    run = Run(Engine())
    run.trainer.off = drawn(1)
    with pytest.raises(SyncError, match=r"change by .* when its adapter, which is all zeros, is switched off"):
        run.sync(NONE)


def test_merged_weights_are_checked_without_a_base() -> None:
    metrics = Run(Engine(), is_apart=False).sync(drawn(1))
    assert "verify/adapters/base_gap" not in metrics
    with pytest.raises(SyncError, match="ignores the adapter"):
        Run(Engine(takes=lambda held, sent: NONE), is_apart=False).sync(drawn(1))


def test_a_response_of_another_version_is_refused() -> None:
    run = Run(Engine())
    run.sync(NONE)
    with pytest.raises(SyncError, match="a response to adapter check comes from weights of version 0"):
        run.check.check(1)


@dataclass
class Hiccup(Engine):
    """Answers without the adapter the first time that it is asked, and never again."""

    num_asked: int = 0

    def generate(self, prompt: Prompt, sampling: Sampling, *, adapter: bool) -> Group:
        self.num_asked += 1
        sound = Engine(held=self.held if self.num_asked > 1 else NONE, version=self.version)
        return sound.generate(prompt, sampling, adapter=adapter)


def test_one_odd_mean_is_measured_again_before_it_is_an_error() -> None:
    run = Run(Engine(), Hiccup())
    metrics = run.sync(drawn(1))
    assert metrics["verify/adapters/doubts"] == 1.0
    assert metrics["verify/adapters/gap"] > BOUND
    assert run.sync(drawn(2))["verify/adapters/doubts"] == 0.0


def test_the_result_is_formatted_in_one_line() -> None:
    metrics = {"verify/adapters/gap": 1e-6, "verify/adapters/base_gap": 2e-6, "verify/adapters/effect": 0.0}
    assert format_check(metrics) == (
        "adapter check: log-probs of engines and trainer differ by 1e-06 on average with adapters on, 2e-06 with "
        "adapters off; the adapters change them by 0"
    )
    del metrics["verify/adapters/base_gap"]
    assert "off" not in format_check(metrics)


# ---------------------------------------------------------------- the questions themselves


@pytest.mark.parametrize("family", ["qwen3", "qwen2_5_vl"])
def test_the_prompt_is_long_enough_for_the_prefix_cache_and_fits_the_run(family: Any, tmp_path: Path) -> None:
    model = str(tiny.build(family, tmp_path / family, size="micro"))
    tools = processor(model, min_pixels=3136, max_pixels=12544)

    def ask(lead: str, max_len: int) -> Prompt:
        return prompt_of(lead, processor=tools, data=Data(prompt_dataset="none", max_len=max_len))

    fixed, fresh = ask("", 4096), ask("7. ", 4096)
    assert len(fixed.tokens) == len(fresh.tokens) > 2 * 128
    assert fixed.tokens[0] != fresh.tokens[0], "nothing of the other question's prefix helps with it"
    assert len(ask("", 40).tokens) == 40
    assert fixed.request is fixed.tokens
    assert not set(fixed.tokens.tolist()) & {*tools.banned_tokens, *tools.eos_token_ids}


def test_sampling_follows_the_run() -> None:
    sampling = sampling_of(RolloutSettings(max_new_tokens=2, temperature=0.7), seed=5)
    assert (sampling.n, sampling.temperature, sampling.max_new_tokens, sampling.seed) == (32, 0.7, 2, 5)
    usual = sampling_of(RolloutSettings(), seed=5)
    assert usual.n * usual.max_new_tokens == 128
