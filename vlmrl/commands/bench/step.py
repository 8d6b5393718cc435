"""`vlmrl bench step`: what one optimizer step costs in each layout, on the same model and the same samples.

How its numbers come about:

* **seconds** are those of the update that training makes, optimizer step included. The layouts take turns in one
  process, and every round begins with another one; the forward pass includes laying out the samples and their pixels.
* **FLOPs** are what the layout has to multiply, forward and backward. Matrix products and convolutions are counted by
  PyTorch's FlopCounterMode while a pass runs, so padding counts. Attention is derived from the lengths: 4 H d per layer
  and pair of a token and one that it may look at, three times that with the backward pass. The attention of the vision
  tower, which is the same in all layouts, is left out.
* **memory** is taken in steps of their own, which are not timed: see `bench.memory`. That of the rank is all that it
  takes from before the model is read to the end of a first step with the first layout.
* **differences** are those of log-probs and gradients from the first layout's, after those steps. The gradients are of
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
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vlmrl.cluster.models import count, experience_of
from vlmrl.commands.bench.memory import peak_bytes
from vlmrl.commands.bench.output import say, table
from vlmrl.commands.bench.samples import make_experience, make_samples
from vlmrl.config.data import Columns
from vlmrl.config.run import StepBench
from vlmrl.config.train import Layout
from vlmrl.config.vision import Vision
from vlmrl.data.balance import spread
from vlmrl.data.packing import Pack, place
from vlmrl.learning.deepspeed_engine import device
from vlmrl.learning.forward import Forward
from vlmrl.learning.policy import Policy, PolicyLoss
from vlmrl.learning.settings import PolicySettings
from vlmrl.models.adapter_plan import plan_adapter
from vlmrl.models.cost import patch_cost
from vlmrl.observe.metrics import Metric, reduce
from vlmrl.plugins import processor_of
from vlmrl.system.memory import keep_memory
from vlmrl.types import Experience, Floats, Totals

PARTS = ("forward", "backward", "optimizer")

_COUNTED = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.convolution, torch.ops.aten.convolution_backward)
"""Not `bmm`: where it is attention, it is derived."""


@dataclass(slots=True)
class Measured:
    """What is known of one layout."""

    packs: list[Pack]
    flops: float = 0.0
    logprobs: dict[int, Floats] = field(default_factory=dict)
    gradients: list[Tensor] = field(default_factory=list)
    """On CPU; empty but for the first layout."""
    gradient_diff: float = 0.0
    gradient_max: float = 0.0
    seconds: list[dict[str, float]] = field(default_factory=list)
    """Of each repeat and part."""
    peak_bytes: int | None = None
    tower_calls: int = 0

    @property
    def tokens_computed(self) -> int:
        """Padding included."""
        return sum(rows * columns for rows, columns in (pack.shape for pack in self.packs))

    def median(self, *parts: str) -> float:
        """Seconds of these parts together."""
        return median(sum(repeat[part] for part in parts) for repeat in self.seconds)


class Comparison(NamedTuple):
    """A layout against the first one."""

    flop_ratio: float
    speedup: float
    """Of forward and backward pass."""
    step_speedup: float
    logprob_diff: float


def step(config: StepBench) -> None:
    """`vlmrl bench step`."""
    made: list[Bench] = []
    # From before the model is read to after its first step: all that a rank ever holds.
    rank_peak = peak_bytes(lambda: made.append(_begin(config)), device())
    policy, experience, found = made[0]
    first = found[config.bench.layouts[0]]
    for measured in found.values():
        measured.peak_bytes = peak_bytes(partial(policy.step, measured, experience), policy.device)
    keep_memory()
    for measured in found.values():
        policy.compare(measured, experience, first)
    for number in range(config.bench.repeats + 1):
        for layout in _rotated(config.bench.layouts, number):
            policy.time(found[layout], experience, warms_up=number == 0)
    _tell(config, found, policy, rank_peak)


class Bench(NamedTuple):
    """What is measured."""

    policy: _TimedPolicy
    experience: Experience
    found: dict[Layout, Measured]


def _begin(config: StepBench) -> Bench:
    """The policy, having made its first step, with the first layout."""
    policy = _TimedPolicy(config)
    samples = make_samples(policy.processor, policy.vocabulary, config.bench, seed=config.train.seed)
    found = {layout: Measured(policy.cut(samples, layout, config)) for layout in config.bench.layouts}
    first = found[config.bench.layouts[0]]
    old = policy.own_logprobs(first.packs)
    experience = make_experience(samples, [old[i] for i in range(len(samples))], seed=config.train.seed)
    policy.step(first, experience)
    return Bench(policy, experience, found)


class _TimedPolicy(Policy):
    """The policy that training uses, with a clock in its update, alone in this process."""

    def __init__(self, config: StepBench) -> None:
        columns = Columns()
        actor = config.actor
        tools = processor_of(actor.model_name_or_path, columns, trust_remote_code=actor.trust_remote_code)
        settings = PolicySettings(
            actor=config.actor.model_copy(update={"lr_scheduler": "constant"}),
            ds=config.ds,
            loop=config.train,
            columns=columns,
            # Every pass is to work through its images.
            vision=Vision(cache_gib=0.0),
            total_steps=len(config.bench.layouts) * (config.bench.repeats + 2) + 1,
            loss=PolicyLoss(aggregation="token", max_new_tokens=max(config.bench.response_tokens)),
            temperature=1.0,
            bans=True,
            adapter=plan_adapter(config.actor, config.ds.lora, tools),
        )
        super().__init__(settings)
        self.processor = self._processor
        self.device = self._device
        self.vocabulary = int(self._net.config.get_text_config().vocab_size)
        self._seconds = dict.fromkeys(PARTS, 0.0)

    def cut(self, samples: Sequence[Any], layout: Layout, config: StepBench) -> list[Pack]:
        """The packs of one pass over the samples."""
        patch = patch_cost(self._net, self._processor)
        return spread(
            samples,
            num_ranks=1,
            layout=layout,
            max_tokens=config.train.max_tokens_per_gpu,
            max_samples=config.train.micro_batch_size,
            image_cost=lambda image: patch * math.prod(self._processor.grid(image.size)),
            filler=self._processor.dummy_sample(),
        )[0]

    def own_logprobs(self, packs: Sequence[Pack]) -> dict[int, Floats]:
        """[T] of each sample, under the weights of now."""
        return dict(self.logprobs(packs)[0])

    def step(self, measured: Measured, experience: Experience) -> dict[str, float]:
        """One update, as training makes it."""
        work = [(pack, experience_of(pack, experience)) for pack in measured.packs]
        return reduce(self.update([work], [count(experience.samples)]))

    def time(self, measured: Measured, experience: Experience, *, warms_up: bool) -> None:
        """One update, and the seconds of its parts."""
        self._seconds = dict.fromkeys(PARTS, 0.0)
        metrics = self.step(measured, experience)
        measured.tower_calls = int(metrics["vision/tower_calls"])
        if not warms_up:
            measured.seconds.append(dict(self._seconds))

    def compare(self, measured: Measured, experience: Experience, first: Measured) -> None:
        """Log-probs, gradients and FLOPs of the layout; the gradients of `first` stay to be compared with."""
        measured.logprobs = self.own_logprobs(measured.packs)
        # Outside of DeepSpeed's engine: it would take the gradients for those of a step.
        forward = Forward(
            self._engine.module, self._processor, temperature=1.0, bans=True, device=self._device, cache_bytes=0
        )
        trainable = [p for p in self._net.parameters() if p.requires_grad]
        total = [torch.zeros_like(p) for p in trainable]
        for pack in measured.packs:
            part = experience_of(pack, experience)
            with FlopCounterMode(display=False) as counter:
                output = forward(pack)
                sampled = place(pack, [s.sampled for s in pack.samples], fill=False).to(self._device)
                advantages = place(pack, part.advantages, fill=0.0).to(self._device)
                terms = torch.where(sampled, advantages * output.logprobs + output.entropy, 0.0)
                loss = terms.sum() / count(experience.samples).num_tokens
                gradients = torch.autograd.grad(loss, trainable, allow_unused=True)
            for held, gradient in zip(total, gradients, strict=True):
                if gradient is not None:
                    held.add_(gradient)
            counts = counter.get_flop_counts()["Global"]
            measured.flops += sum(counts.get(operator, 0) for operator in _COUNTED)
            measured.flops += attention_flops(pack, self._net.config.get_text_config())
        on_cpu = [gradient.to("cpu", torch.float32) for gradient in total]
        if measured is first:
            measured.gradients = on_cpu
        measured.gradient_max = max(float(gradient.abs().max()) for gradient in on_cpu)
        pairs = zip(on_cpu, first.gradients, strict=True)
        measured.gradient_diff = max(float((gradient - other).abs().max()) for gradient, other in pairs)

    def _policy_loss(self, pack: Pack, experience: Experience, total: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        with self._clock("forward"):
            return super()._policy_loss(pack, experience, total)

    def _backward(self, loss: tuple[Tensor, dict[str, Tensor]], pack: Pack, *, is_last: bool) -> dict[str, Metric]:
        with self._clock("backward"):
            return super()._backward(loss, pack, is_last=is_last)

    def _step(self) -> dict[str, Metric]:
        with self._clock("optimizer"):
            return super()._step()

    @contextmanager
    def _clock(self, part: str) -> Iterator[None]:
        self._wait()
        started = time.perf_counter()
        yield
        self._wait()
        self._seconds[part] += time.perf_counter() - started

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def attention_flops(pack: Pack, text: Any) -> float:
    """Forward and backward, all layers: 12 H d per pair of a token and one that it may look at."""
    heads = text.num_attention_heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return 12.0 * heads * dim * text.num_hidden_layers * pairs(pack)


def pairs(pack: Pack) -> int:
    """Pairs of a token and one that it may look at, itself included. What pads a row looks back too."""
    if pack.is_one_per_row:
        rows, columns = pack.shape
        return rows * _triangle(columns)
    found = 0
    for row in pack.rows:
        for members, prefix in row:
            found += _triangle(prefix)
            for i in members:
                own = len(pack.samples[i].tokens) - prefix
                found += own * prefix + _triangle(own)
    return found


def _triangle(length: int) -> int:
    return length * (length + 1) // 2


def against(measured: Measured, first: Measured) -> Comparison:
    """How a layout compares with the first one."""
    whole, passes = PARTS, PARTS[:2]
    return Comparison(
        flop_ratio=first.flops / measured.flops,
        speedup=first.median(*passes) / measured.median(*passes),
        step_speedup=first.median(*whole) / measured.median(*whole),
        logprob_diff=max(float(abs(row - first.logprobs[i]).max()) for i, row in measured.logprobs.items()),
    )


def _tell(config: StepBench, found: dict[Layout, Measured], policy: _TimedPolicy, rank_peak: int | None) -> None:
    first = config.bench.layouts[0]
    rank_mib = None if rank_peak is None else round(rank_peak / 2**20, 1)
    rows = []
    for layout, measured in found.items():
        ratios = against(measured, found[first])
        peak = None if measured.peak_bytes is None else round(measured.peak_bytes / 2**20, 1)
        say(
            bench="step",
            model=config.actor.model_name_or_path,
            layout=layout,
            against=first,
            samples=sum(len(pack.samples) for pack in measured.packs),
            packs=len(measured.packs),
            tokens_useful=sum(pack.num_useful for pack in measured.packs),
            tokens_computed=measured.tokens_computed,
            token_ratio=round(found[first].tokens_computed / measured.tokens_computed, 3),
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
    table(header, rows)
    if rank_mib is not None:
        table(
            (f"most that the rank held, from before it read the model to its first step's end: {rank_mib:.0f} MiB",), ()
        )


def _rotated(layouts: Sequence[Layout], number: int) -> list[Layout]:
    start = number % len(layouts)
    return [*layouts[start:], *layouts[:start]]
