"""The measured bound: correct runs never stop, and planted faults are detected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scripted_loop import config, make_prompt, make_rollout

from vlmrl.commands.rl_checks import noise_check
from vlmrl.errors import SyncError
from vlmrl.types import Floats, Group, Rollout, Sample
from vlmrl.verify.logprobs import are_alike, noise_floor
from vlmrl.verify.noise import NoiseCheck, Paths, choose

FP32, BF16 = 2e-6, 1e-3
Values = NDArray[np.float64]


def responses(*lengths: int, number: int = 2) -> list[Group]:
    """Groups of `number` responses of these lengths."""
    groups = []
    for index, length in enumerate(lengths):
        prompt = make_prompt(index)
        groups.append(
            Group(prompt, tuple(make_rollout(prompt, "?", version=0, length=length + k) for k in range(number)))
        )
    return groups


class Sides:
    """Engine and trainer with given errors, which record how many tokens they score."""

    def __init__(self, *, floor: float = FP32, half: bool = False, stops: bool = True, **off: float) -> None:
        """`off`: path (prefill, padded, exact, layout) -> error of its log-probs."""
        self.asked: list[int] = []
        self.passes: list[str] = []
        self.said: list[str] = []
        self.off = off
        paths = Paths(
            prefill=lambda groups: self.say(groups, "prefill"),
            padded=lambda groups: self.say(groups, "padded"),
            exact=(lambda groups: self.say(groups, "exact")) if half else None,
            layout=lambda groups: self.say(groups, "layout"),
        )
        noise = NoiseCheck(paths, floor=floor, stops=stops, in_turn=True, seed=0, say=self.said.append)
        self.check, self.compare, self.is_due = noise.check, noise.compare, noise.is_due

    def say(self, groups: Sequence[Group], name: str) -> list[Floats]:
        segments = [segment for group in groups for segment in group.segments]
        self.passes.append(name)
        if name == "padded":
            self.asked.append(sum(segment.num_sampled for segment in segments))
        return [segment.logprobs + np.float32(self.off.get(name, 0.0)) for segment in segments]


def test_the_figures_by_hand() -> None:
    metrics = Sides(half=True, floor=BF16, prefill=0.03, padded=0.02, exact=0.04, layout=0.01).check(
        1, responses(40, 40)
    )
    # Rounding is 0.04 - 0.02 = 0.02; the engine's own 0.03 is more, and within four times that.
    assert metrics == pytest.approx(
        {
            "verify/noise/level": 0.03,
            "verify/noise/gap": 0.01,
            "verify/noise/decode_gap": 0.03,
            "verify/noise/layout_gap": 0.01,
        },
        rel=1e-4,
    )


@pytest.mark.parametrize(
    ("off", "message"),
    [
        # A layer that was scaled by 1.01 after its digest was taken; the engine decodes and reads with it alike.
        ({"padded": 1.4e-4, "layout": 1.4e-4}, "engine and trainer disagree.*70 times the rounding measured"),
        # Positions of responses off by one in the shared layout, which the padded pass knows nothing of.
        ({"layout": 3.8e-4}, "the trainer disagrees with itself: its log-probs in this train.layout"),
        # A stale prefix cache is no noise: what was read without it agrees with the trainer.
        ({"prefill": 3e-4, "padded": 3e-4, "layout": 3e-4}, "the engine disagrees with itself.*stale prefix cache"),
        ({"padded": np.nan}, "engine and trainer disagree|the trainer disagrees"),
    ],
)
def test_faults_below_a_bound_of_a_thousandth_are_found_in_fp32(off: dict[str, float], message: str) -> None:
    with pytest.raises(SyncError, match=message):
        Sides(**off).check(1, responses(40, 40))
    sides = Sides(stops=False, **off)
    sides.check(1, responses(40, 40))
    assert len(sides.said) == 1, "with the user's own bound it is only reported"


def test_a_gap_of_a_few_times_the_noise_is_reported_once() -> None:
    sides = Sides(padded=2e-5, layout=2e-5)
    for step in range(1, 4):
        sides.check(step, responses(40, 40))
    assert len(sides.said) == 1
    assert sides.said[0].startswith("step 1: engine and trainer disagree: their log-probs differ by 2e-05 on average")


def test_noise_is_measured_again_every_tenth_step_and_when_the_gap_outgrows_it() -> None:
    sides = Sides(half=True, floor=BF16, exact=4e-3, layout=8e-3)
    assert sides.check(1, responses(40, 40))["verify/noise/level"] == pytest.approx(4e-3, rel=1e-3)
    measured = len(sides.asked)
    for step in range(2, 10):
        # The run's layout alone is asked: neither the engine nor `padded`.
        assert sides.check(step, responses(40, 40)) == pytest.approx({"verify/noise/gap": 8e-3}, rel=1e-3)
    assert len(sides.asked) == measured
    assert "verify/noise/level" in sides.check(10, responses(40, 40))
    sides.off["layout"] = 2.1e-2  # more than five times the noise
    assert "verify/noise/level" in sides.check(11, responses(40, 40))
    sides.off["layout"] = 8.1e-2  # more than twenty times
    with pytest.raises(SyncError, match="the trainer disagrees with itself"):
        sides.check(12, responses(40, 40))


def test_log_probs_that_are_known_take_no_pass_and_a_gap_that_noise_does_not_explain_is_measured_next() -> None:
    sides = Sides(half=True, floor=BF16, exact=4e-3, layout=8e-3)
    groups = responses(40, 40)

    def known(off: float) -> list[Floats]:
        return [segment.logprobs + np.float32(off) for group in groups for segment in group.segments]

    assert sides.is_due(1)
    assert sides.compare(groups, known(6e-3)) == {}, "the first noise has not been measured"
    assert "verify/noise/level" in sides.check(1, groups)
    sides.passes.clear()
    assert sides.compare(groups, known(6e-3)) == pytest.approx({"verify/noise/gap": 6e-3}, rel=1e-3)
    assert not sides.is_due(3)
    assert sides.is_due(10)
    sides.compare(groups, known(2.1e-2))  # more than five times the noise
    assert sides.passes == []
    assert sides.is_due(3)
    assert "verify/noise/level" in sides.check(3, groups)
    assert sorted(sides.passes) == ["exact", "layout", "padded", "prefill"]
    assert not sides.is_due(4)
    sides.compare(groups, known(float("nan")))
    assert sides.is_due(4)


@pytest.mark.parametrize("off", [{"padded": 1.4e-4, "layout": 1.4e-4}, {"layout": 3.8e-4}, {"layout": np.nan}])
def test_a_fault_of_any_later_step_is_found_in_that_step(off: dict[str, float]) -> None:
    sides = Sides()
    for step in (1, 2, 3):
        sides.check(step, responses(40, 40))
    sides.off.update(off)
    with pytest.raises(SyncError):
        sides.check(4, responses(40, 40))


def test_a_fault_is_measured_again_on_other_responses_to_the_same_prompts() -> None:
    sides = Sides()
    sides.check(1, responses(*[400] * 5, number=8))
    assert sides.asked == [4 * 256]
    sides = Sides()
    sides.check(1, responses(*[4] * 20))
    # Two responses of 3 and 4 tokens each (the last is left out) from as many groups as are allowed.
    assert sides.asked == [4 * 7]
    sides = Sides(layout=1.0)
    with pytest.raises(SyncError):
        sides.check(1, responses(*[100] * 3, number=8))
    assert 4 * 99 <= sides.asked[0] <= 4 * 106
    assert len(sides.asked) == 4
    assert all(4 * 99 <= asked <= 4 * 106 for asked in sides.asked[1:])


def test_a_fault_of_all_groups_is_measured_again_on_other_prompts_where_each_has_one_response() -> None:
    sides = Sides(layout=1.0)
    with pytest.raises(SyncError, match="the trainer disagrees with itself"):
        sides.check(1, responses(*range(40, 80), number=1))
    assert len(set(sides.asked)) == 4, "each measurement reads responses of other lengths"


def test_without_long_enough_responses_there_is_no_metric() -> None:
    prompt = make_prompt(0)
    short = make_rollout(prompt, "?", version=0, length=1)
    nothing = np.zeros(3, dtype=np.bool_)
    empty = Rollout.of_response(short.segments[0].tokens, nothing, short.segments[0].logprobs, "", "stop", 0)
    assert Sides().check(1, [Group(prompt, (empty, short))]) == {}


def test_responses_of_a_single_token_are_compared_where_an_engine_has_room_to_score_them() -> None:
    prompt = make_prompt(0)
    short, longer = (make_rollout(prompt, "?", version=0, length=length) for length in (1, 2))
    assert choose([Group(prompt, (short, short))], np.random.default_rng(0))[0] == []
    (group,), _ = choose([Group(prompt, (short, longer))], np.random.default_rng(0))
    assert [rollout.num_sampled for rollout in group.rollouts] == [1, 1], "the longer one is cut by a token"


class Rounding:
    """Sides that are sound but for rounding in bf16, which follows the policy.

    A pass is off by a log-normal mixture whose scale grows with a token's uncertainty 1 - exp(l), where l is its
    log-prob: most tokens hardly differ, one of a thousand by twenty times the mean. That mean, from 0.001 to 0.02, is
    drawn for each step; the engine's is that of the trainer, up to twice as much. A pass over the same responses gives
    the same rounding again.
    """

    def __init__(
        self, seed: int, *, length: int, number: int = 3, spread: float = 0.0, apart: int = 10, num_groups: int = 2
    ) -> None:
        """`spread` is the standard deviation of the logarithm of what some tokens are more off by than others. Of steps
        that are ten `apart` the noise is always measured.
        """
        self.apart = apart
        self.rng = np.random.default_rng(seed)
        self.spread = spread
        self.groups = responses(*[length] * num_groups, number=number)
        self.passes: dict[tuple[str, tuple[int, ...]], Values] = {}
        self.names = {id(r.sampled): i for i, r in enumerate(r for group in self.groups for r in group.segments)}
        self.exact = self.factor = np.zeros((len(self.names), 64))
        self.scale = self.engine = 0.0
        paths = Paths(
            prefill=lambda groups: self.say(groups, "prefill", self.engine),
            padded=lambda groups: self.say(groups, "padded", 1.0),
            exact=lambda groups: self.say(groups, "exact", 0.0),
            layout=lambda groups: self.say(groups, "layout", 1.0),
        )
        self.said: list[str] = []
        self.check = NoiseCheck(paths, floor=BF16, stops=True, in_turn=True, seed=0, say=self.said.append)

    def step(self, number: int, *, sharpness: float) -> dict[str, float]:
        """One step of a policy whose log-probs are `1 / sharpness` on average."""
        self.scale, self.engine = float(np.exp(self.rng.uniform(*np.log([0.001, 0.02])))), self.rng.uniform(1.0, 2.0)
        self.passes.clear()
        self.exact = -self.rng.exponential(1 / sharpness, self.exact.shape)
        self.factor = np.exp(self.rng.normal(0.0, self.spread, self.exact.shape))
        logprobs = self.rounded(list(range(len(self.exact))), self.engine)
        groups, rows = [], iter(logprobs)
        for group in self.groups:
            rollouts = [self.named(rollout, next(rows)) for rollout in group.rollouts]
            groups.append(Group(group.prompt, tuple(rollouts)))
        return self.check.check(self.apart * number, groups)

    def named(self, rollout: Rollout, row: Values) -> Rollout:
        """The response with these log-probs, and with its number for a first token."""
        (segment,) = rollout.segments
        tokens = segment.tokens.copy()
        tokens[0] = self.names[id(segment.sampled)]
        named = replace(segment, tokens=tokens, logprobs=row[: len(tokens)].astype(np.float32))
        return replace(rollout, segments=(named,))

    def say(self, groups: Sequence[Group], name: str, times: float) -> list[Floats]:
        segments = [segment for group in groups for segment in group.segments]
        numbers = [int(segment.tokens[0]) for segment in segments]
        rows = self.passes.setdefault((name, tuple(numbers)), self.rounded(numbers, times))
        return [row[: len(s.tokens)].astype(np.float32) for row, s in zip(rows, segments, strict=True)]

    def rounded(self, numbers: list[int], times: float) -> Values:
        values = self.exact[numbers]
        if not times:
            return values
        size = (
            times
            * self.scale
            * self.factor[numbers]
            * np.exp(self.rng.normal(size=values.shape))
            * (1 - np.exp(values))
        )
        noisy: Values = values + size * self.rng.normal(size=values.shape)
        return noisy


STEPS = pytest.mark.parametrize("steps", [1_000, pytest.param(10_000, marks=pytest.mark.prove)])


@STEPS
@pytest.mark.parametrize(("length", "most"), [(30, 10.0), (5, 20.0)])
def test_sound_runs_in_half_precision_never_stop_in_thousands_of_steps(length: int, most: float, steps: int) -> None:
    run = Rounding(0, length=length)
    ratios = []
    for step, sharpness in enumerate(np.geomspace(0.5, 100.0, steps), start=1):
        metrics = run.step(step, sharpness=sharpness)
        ratios.append(
            [
                metrics[f"verify/noise/{name}"] / metrics["verify/noise/level"]
                for name in ("gap", "layout_gap", "decode_gap")
            ]
        )
    usual, worst = np.median(ratios, axis=0), np.max(ratios, axis=0)
    assert usual.max() < 2
    assert worst.max() < most, "20 times the noise stops a run, and only where other responses say so too"


@STEPS
def test_noise_of_earlier_steps_stops_no_correct_run(steps: int) -> None:
    run = Rounding(0, length=30, apart=1)
    all_metrics = [
        run.step(step, sharpness=sharpness) for step, sharpness in enumerate(np.geomspace(0.5, 100.0, steps), start=1)
    ]
    measured = sum("verify/noise/level" in metrics for metrics in all_metrics)
    # Twice as often as every tenth step: here the noise of one step may be twenty times that of another.
    assert 0.1 <= measured / steps < 0.4


@STEPS
@pytest.mark.parametrize(("number", "num_groups"), [(8, 2), (2, 16), (1, 16)])
def test_one_token_that_holds_most_of_the_rounding_does_not_stop_short_responses(
    number: int, num_groups: int, steps: int
) -> None:
    run = Rounding(0, length=8, number=number, spread=3.0, num_groups=num_groups)
    all_metrics = [run.step(step, sharpness=1.0) for step in range(1, steps + 1)]
    gaps = ("verify/noise/gap", "verify/noise/layout_gap", "verify/noise/decode_gap")
    ratios = [max(metrics[name] for name in gaps) / metrics["verify/noise/level"] for metrics in all_metrics]
    assert np.mean(np.array(ratios) > 20) > 1e-3, "one question alone would stop it"


@pytest.mark.parametrize(
    ("dtype", "on_gpu", "is_measured"),
    [("bf16", False, True), ("bf16", True, True), ("fp32", False, True), ("fp32", True, False)],
)
def test_rounding_is_measured_where_a_wider_type_exists(dtype: str, on_gpu: bool, is_measured: bool) -> None:
    asked: list[dict[str, Any]] = []

    def logprobs(samples: Sequence[Sample], **options: Any) -> list[Floats]:
        asked.append(options)
        return [np.zeros(len(sample.tokens), dtype=np.float32) for sample in samples]

    engines = SimpleNamespace(score=lambda groups: [r.logprobs for group in groups for r in group.segments])
    policy = SimpleNamespace(layout="shared", logprobs=logprobs)
    messages: list[str] = []
    check = noise_check(config(ds={"param_dtype": dtype}), engines, policy, on_gpu=on_gpu, say=messages.append)  # type: ignore[arg-type]
    assert check is not None
    check._stops = False
    check.check(1, responses(40, 40))
    exact = [{"layout": "padded", "exact": True}] * is_measured
    assert asked == [{"layout": "padded"}, *exact, {"undivided": True}]


def test_floors_follow_type_and_device() -> None:
    half = config(ds={"param_dtype": "bf16"})
    assert (noise_floor(config(), on_gpu=False), noise_floor(half, on_gpu=True)) == (FP32, BF16)
    # Twenty times that is more than the ceiling, which then holds alone.
    assert 20 * noise_floor(config(), on_gpu=True) > 1e-3
    assert are_alike(config())
    original = {"param_dtype": "fp32", "load_in_4bit": True, "lora": {"rank": 4}}
    assert not are_alike(config(ds=original, vllm={"qlora_base": "original"}))
