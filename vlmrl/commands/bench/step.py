"""`vlmrl bench step`: time, FLOPs and memory of one optimizer step in each layout, on the same model and samples.

* **Seconds** are those of a training update, optimizer step included. The layouts take turns in one process, and every
  round starts with another one. The forward pass includes packing the samples and processing their pixels.
* **FLOPs** are those of the forward and backward pass. PyTorch's FlopCounterMode counts matrix products and
  convolutions while a pass runs, padding included. Attention is derived from the lengths: 4 H d per layer and pair of a
  token and one that it attends to, three times that with the backward pass. The attention of the vision tower, which is
  the same in all layouts, is left out.
* **Memory** is measured in separate steps, which are not timed: see `bench.memory`. The rank's is its peak from before
  the model is loaded to the end of a first step with the first layout.
* **Differences** are those of log-probs and gradients from the first layout's, after those steps. The gradients are of
  the sum over tokens of log-prob times advantage, plus entropy, over the number of tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vlmrl.cluster.models import loss_totals, pack_experience
from vlmrl.commands.bench.memory import peak_bytes
from vlmrl.commands.bench.output import print_json, print_table
from vlmrl.commands.bench.ranks import other_ranks
from vlmrl.commands.bench.samples import make_samples, random_experience
from vlmrl.config.bench_verbs import StepBench
from vlmrl.config.data import Columns
from vlmrl.config.train import Layout
from vlmrl.config.vision import Vision
from vlmrl.data.balance import spread
from vlmrl.data.experience import Experience
from vlmrl.data.packing import Pack, place
from vlmrl.learning.deepspeed_engine import device
from vlmrl.learning.forward import LogprobForward
from vlmrl.learning.policy import Policy, PolicyLoss
from vlmrl.learning.settings import PolicySettings
from vlmrl.models.adapter_plan import plan_adapter
from vlmrl.models.patch_cost import patch_cost
from vlmrl.observe.metrics import Metric, reduce
from vlmrl.plugins import processor_of
from vlmrl.system.malloc import keep_memory
from vlmrl.types import Floats, Totals

PARTS = ("forward", "backward", "optimizer")

_TIMEOUT_S = 600
"""Longest wait of a rank for the others."""

_COUNTED = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.convolution, torch.ops.aten.convolution_backward)
"""Not `bmm`: it belongs to attention, whose FLOPs are derived."""


@dataclass(slots=True)
class Measurement:
    """The measurements of one layout."""

    packs: list[Pack]
    flops: float = 0.0
    logprobs: dict[int, Floats] = field(default_factory=dict)
    gradients: list[Tensor] = field(default_factory=list)
    """On CPU; kept for the first layout only."""
    gradient_diff: float = 0.0
    gradient_max: float = 0.0
    seconds: list[dict[str, float]] = field(default_factory=list)
    """Part -> seconds, for each repeat."""
    peak_bytes: int | None = None
    tower_calls: int = 0

    @property
    def tokens_computed(self) -> int:
        """Tokens of the forward pass, padding included."""
        return sum(rows * columns for rows, columns in (pack.shape for pack in self.packs))

    def median(self, *parts: str) -> float:
        """Median over repeats of the seconds of these parts together."""
        return median(sum(repeat[part] for part in parts) for repeat in self.seconds)


class Comparison(NamedTuple):
    """A layout compared with the first one."""

    flop_ratio: float
    speedup: float
    """Of forward and backward pass."""
    step_speedup: float
    logprob_diff: float


def step(config: StepBench, kind: type[TimedPolicy] | None = None) -> None:
    """Measure every layout; print a line of JSON for each, and a table. `kind` makes the steps: the policy of `rl`.

    With `ds.sequence_parallel_size`, all measurements are of this process, the first of the ranks.
    """
    measure = partial(_measure, kind=kind or TimedPolicy)
    with other_ranks(config.ds.sequence_parallel_size, measure, config):
        measure(config)


def _measure(config: StepBench, kind: type[TimedPolicy]) -> None:
    setups: list[Setup] = []
    # From before the model is loaded to after its first step: the peak of a rank.
    rank_peak = peak_bytes(lambda: setups.append(_set_up(config, kind)), device())
    policy, experience, measurements = setups[0]
    first = measurements[config.bench.layouts[0]]
    for measurement in measurements.values():
        measurement.peak_bytes = peak_bytes(partial(policy.step, measurement, experience), policy.device)
    keep_memory()
    for measurement in measurements.values():
        policy.compare(measurement, experience, first)
    for number in range(config.bench.repeats + 1):
        for layout in _rotated(config.bench.layouts, number):
            policy.time(measurements[layout], experience, warms_up=number == 0)
    if torch.distributed.get_rank() == 0:
        _print(config, measurements, policy, rank_peak)


class Setup(NamedTuple):
    """A policy with its data, and a measurement for each layout."""

    policy: TimedPolicy
    experience: Experience
    measurements: dict[Layout, Measurement]


def _set_up(config: StepBench, kind: type[TimedPolicy]) -> Setup:
    """Load the policy, and make its first step, with the first layout."""
    policy = kind(config)
    samples = make_samples(policy.processor, policy.vocabulary, config.bench, seed=config.train.seed)
    measurements = {layout: Measurement(policy.pack(samples, layout, config)) for layout in config.bench.layouts}
    first = measurements[config.bench.layouts[0]]
    old = policy.logprobs_by_sample(first.packs)
    experience = random_experience(samples, [old[i] for i in range(len(samples))], seed=config.train.seed)
    policy.step(first, experience)
    return Setup(policy, experience, measurements)


class TimedPolicy(Policy):
    """The policy of training, in this process, with its update timed by part."""

    whole_responses = False
    """See `spread`."""

    def __init__(self, config: StepBench) -> None:
        columns = Columns()
        actor = config.actor
        processor = processor_of(actor.model_name_or_path, columns, trust_remote_code=actor.trust_remote_code)
        settings = PolicySettings(
            actor=config.actor.model_copy(update={"lr_scheduler": "constant"}),
            ds=config.ds,
            loop=config.train.model_copy(update={"timeout_s": _TIMEOUT_S}),
            columns=columns,
            # No cache: every pass runs the vision tower.
            vision=Vision(cache_gib=0.0),
            total_steps=len(config.bench.layouts) * (config.bench.repeats + 2) + 1,
            loss=PolicyLoss(aggregation="token", max_tokens=max(config.bench.response_tokens)),
            temperature=1.0,
            bans=True,
            adapter=plan_adapter(config.actor, config.ds.lora, processor),
        )
        super().__init__(settings)
        self.processor = self._processor
        self.device = self._device
        self.vocabulary = int(self._net.config.get_text_config().vocab_size)
        self._seconds = dict.fromkeys(PARTS, 0.0)

    def pack(self, samples: Sequence[Any], layout: Layout, config: StepBench) -> list[Pack]:
        """Pack the samples for one pass."""
        patch = patch_cost(self._net, self._processor)
        return spread(
            samples,
            num_ranks=1,
            layout=layout,
            max_tokens=config.train.max_tokens_per_gpu * config.ds.sequence_parallel_size,
            max_samples=config.train.micro_batch_size,
            # Tokens are shared by the ranks, but each encodes all images of a pack.
            image_cost=lambda image: (
                config.ds.sequence_parallel_size * patch * math.prod(self._processor.grid(image.size))
            ),
            filler=self._processor.dummy_sample(),
            whole_responses=self.whole_responses,
        )[0]

    def logprobs_by_sample(self, packs: Sequence[Pack]) -> dict[int, Floats]:
        """[T] of each sample, by the current weights."""
        return dict(self.logprobs(packs)[0])

    def step(self, measurement: Measurement, experience: Experience) -> dict[str, float]:
        """Make one training update."""
        work = [(pack, pack_experience(pack, experience)) for pack in measurement.packs]
        return reduce(self.update([work], [loss_totals(experience.samples)]))

    def time(self, measurement: Measurement, experience: Experience, *, warms_up: bool) -> None:
        """Make one update, and record the seconds of its parts unless it is a warm-up."""
        self._seconds = dict.fromkeys(PARTS, 0.0)
        metrics = self.step(measurement, experience)
        measurement.tower_calls = int(metrics["vision/tower_calls"])
        if not warms_up:
            measurement.seconds.append(dict(self._seconds))

    def compare(self, measurement: Measurement, experience: Experience, first: Measurement) -> None:
        """Record log-probs, gradients and FLOPs of a layout; compare its gradients with those of `first`."""
        measurement.logprobs = self.logprobs_by_sample(measurement.packs)
        # Not through DeepSpeed's engine, which would count these gradients as a step's.
        forward = LogprobForward(
            self._engine.module, self._processor, temperature=1.0, bans=True, device=self._device, cache_bytes=0
        )
        trainable = [p for p in self._net.parameters() if p.requires_grad]
        total = [torch.zeros_like(p) for p in trainable]
        for pack in measurement.packs:
            part = pack_experience(pack, experience)
            with FlopCounterMode(display=False) as counter:
                output = forward(pack)
                sampled = place(pack, [s.sampled for s in pack.samples], fill=False).to(self._device)
                advantages = place(pack, part.advantages, fill=0.0).to(self._device)
                terms = torch.where(sampled, advantages * output.logprobs + output.entropy, 0.0)
                loss = terms.sum() / loss_totals(experience.samples).num_tokens
                gradients = torch.autograd.grad(loss, trainable, allow_unused=True)
            for accumulated, gradient in zip(total, gradients, strict=True):
                if gradient is not None:
                    accumulated.add_(gradient)
            counts = counter.get_flop_counts()["Global"]
            measurement.flops += sum(counts.get(operator, 0) for operator in _COUNTED)
            num_ranks = torch.distributed.get_world_size()
            measurement.flops += attention_flops(pack, self._net.config.get_text_config()) / num_ranks
        for gradient in total:
            torch.distributed.all_reduce(gradient)
        on_cpu = [gradient.to("cpu", torch.float32) for gradient in total]
        if measurement is first:
            measurement.gradients = on_cpu
        measurement.gradient_max = max(float(gradient.abs().max()) for gradient in on_cpu)
        pairs = zip(on_cpu, first.gradients, strict=True)
        measurement.gradient_diff = max(float((gradient - other).abs().max()) for gradient, other in pairs)

    def _policy_loss(self, pack: Pack, experience: Experience, total: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        with self.clock("forward"):
            return super()._policy_loss(pack, experience, total)

    def _backward(
        self, loss: tuple[Tensor, dict[str, Tensor]], pack: Pack, *, number: int, of: Sequence[Pack]
    ) -> dict[str, Metric]:
        with self.clock("backward"):
            return super()._backward(loss, pack, number=number, of=of)

    def _step(self) -> dict[str, Metric]:
        with self.clock("optimizer"):
            return super()._step()

    @contextmanager
    def clock(self, part: str) -> Iterator[None]:
        """Add the seconds of the context to a part of the step."""
        self._wait()
        started = time.perf_counter()
        yield
        self._wait()
        self._seconds[part] += time.perf_counter() - started

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def attention_flops(pack: Pack, text: Any) -> float:
    """FLOPs of attention, forward and backward, in all layers: 12 H d per pair of a token and one it attends to."""
    heads = text.num_attention_heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return 12.0 * heads * dim * text.num_hidden_layers * attended_pairs(pack)


def attended_pairs(pack: Pack) -> int:
    """Return the number of pairs of a token and one that it attends to, itself included. Padding attends too."""
    if pack.is_one_per_row:
        rows, columns = pack.shape
        return rows * _triangle(columns)
    num_pairs = 0
    for row in pack.rows:
        for members, prefix in row:
            num_pairs += _triangle(prefix)
            for i in members:
                length = len(pack.samples[i].tokens) - prefix
                num_pairs += length * prefix + _triangle(length)
    return num_pairs


def _triangle(length: int) -> int:
    return length * (length + 1) // 2


def compare_layouts(measurement: Measurement, first: Measurement) -> Comparison:
    """Compare a layout with the first one."""
    passes = PARTS[:2]
    return Comparison(
        flop_ratio=first.flops / measurement.flops,
        speedup=first.median(*passes) / measurement.median(*passes),
        step_speedup=first.median(*PARTS) / measurement.median(*PARTS),
        logprob_diff=max(float(abs(row - first.logprobs[i]).max()) for i, row in measurement.logprobs.items()),
    )


def _print(
    config: StepBench, measurements: dict[Layout, Measurement], policy: TimedPolicy, rank_peak: int | None
) -> None:
    first = config.bench.layouts[0]
    rank_mib = None if rank_peak is None else round(rank_peak / 2**20, 1)
    rows = []
    for layout, measured in measurements.items():
        ratios = compare_layouts(measured, measurements[first])
        peak = None if measured.peak_bytes is None else round(measured.peak_bytes / 2**20, 1)
        print_json(
            bench=config.verb.split()[-1],
            model=config.actor.model_name_or_path,
            layout=layout,
            against=first,
            samples=sum(len(pack.samples) for pack in measured.packs),
            packs=len(measured.packs),
            tokens_useful=sum(pack.num_useful for pack in measured.packs),
            tokens_computed=measured.tokens_computed,
            token_ratio=round(measurements[first].tokens_computed / measured.tokens_computed, 3),
            gflop=round(measured.flops / 1e9, 3),
            flop_ratio=round(ratios.flop_ratio, 3),
            speedup=round(ratios.speedup, 3),
            step_speedup=round(ratios.step_speedup, 3),
            **{f"{part}_s": round(measured.median(part), 5) for part in PARTS},
            **{f"{part}_s_each": [round(repeat[part], 5) for repeat in measured.seconds] for part in PARTS},
            peak_mib=peak,
            rank_peak_mib=rank_mib,
            tower_calls=measured.tower_calls,
            logprob_diff_max=ratios.logprob_diff,
            gradient_diff_max=measured.gradient_diff,
            gradient_max=measured.gradient_max,
            device=str(policy.device),
            ranks=torch.distributed.get_world_size(),
            threads=torch.get_num_threads(),
        )
        rows.append(
            (
                *(layout, str(measured.tokens_computed)),
                *(f"{measured.median(part):.3f} s" for part in PARTS),
                *(f"{ratios.speedup:.2f}", f"{ratios.flop_ratio:.2f}", f"{ratios.speedup / ratios.flop_ratio:.0%}"),
                *("?" if peak is None else f"{peak:.0f} MiB", str(measured.tower_calls)),
                *(f"{ratios.logprob_diff:.1e}", f"{measured.gradient_diff / (measured.gradient_max or 1.0):.1e}"),
            )
        )
    header = (
        *("layout", "tokens", *PARTS, "speed-up", "FLOP ratio", "reached", "peak", "tower calls"),
        *("log-prob diff", "gradient diff (relative)"),
    )
    print_table(header, rows)
    if rank_mib is not None:
        print_table((f"peak of the rank, from loading the model to the end of its first step: {rank_mib:.0f} MiB",), ())


def _rotated(layouts: Sequence[Layout], number: int) -> list[Layout]:
    start = number % len(layouts)
    return [*layouts[start:], *layouts[:start]]
