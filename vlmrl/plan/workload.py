"""Tokens, pairs and patches of a step, from numbers of prompts and responses and their lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

from vlmrl.config.train import Layout
from vlmrl.plan.costs import Load


def response_lengths(count: int, *, mean: float, longest: float, sigma: float) -> tuple[float, ...]:
    """Return the lengths of `count` responses, rising: quantiles of a log-normal distribution that is cut at `longest`
    and whose mean, with the cut, is `mean`."""
    if mean >= longest:
        return (float(longest),) * count
    normal = NormalDist()
    factors = [math.exp(sigma * normal.inv_cdf((number + 0.5) / count)) for number in range(count)]
    low, high = 0.0, longest / factors[0]
    for _ in range(60):
        middle = (low + high) / 2
        is_short = fmean(min(longest, middle * factor) for factor in factors) < mean
        low, high = (middle, high) if is_short else (low, middle)
    return tuple(max(1.0, min(longest, high * factor)) for factor in factors)


@dataclass(frozen=True, slots=True)
class Workload:
    """The prompts and responses of a step."""

    prompts: int
    responses: int
    """Of a prompt."""
    prompt_tokens: float
    lengths: tuple[float, ...]
    """Tokens of the responses, rising. They need not be as many as the responses."""
    patches: float = 0.0
    """Of a prompt's images together."""

    @property
    def mean_length(self) -> float:
        return fmean(self.lengths)

    @property
    def all_responses(self) -> int:
        return self.prompts * self.responses

    def training_load(self, layout: Layout, *, num_passes: int = 1) -> Load:
        """Return what a forward pass over all samples of the step computes.

        With `shared` the prompt of a group is computed once, and images are in every layout; `padded` rows are as long
        as the longest of their batch, the step's here.
        """
        prompt, count = self.prompt_tokens, self.all_responses
        mean, square = self.mean_length, fmean(length * length for length in self.lengths)
        images = self.prompts * self.patches
        patches = {"patches": images * num_passes, "patch_pairs": images * self.patches * num_passes}
        outputs = count * mean
        if layout == "shared":
            tokens = self.prompts * prompt + count * mean
            pairs = self.prompts * prompt**2 / 2 + count * (mean * prompt + square / 2)
            return Load(tokens, pairs, outputs, **patches)
        if layout == "padded":
            row = prompt + self.lengths[-1]
            return Load(count * row, count * row**2 / 2, outputs, **patches)
        pairs = count * (prompt**2 / 2 + mean * prompt + square / 2)
        return Load(count * (prompt + mean), pairs, outputs, **patches)

    def prefill_load(self, engines: int) -> Load:
        """Return what an engine prefills: each prompt once."""
        prompts = -(-self.prompts // engines)
        prompt = self.prompt_tokens
        return Load(
            prompts * prompt,
            prompts * prompt**2 / 2,
            prompts,
            patches=prompts * self.patches,
            patch_pairs=prompts * self.patches**2,
        )

    def engine_lengths(self, engines: int) -> tuple[float, ...]:
        """Return the lengths of the slowest engine's responses: every so many of the step's, and the longest."""
        count = -(-self.prompts // engines) * self.responses
        step = len(self.lengths) / count
        picked = [self.lengths[min(len(self.lengths) - 1, int((number + 0.5) * step))] for number in range(count)]
        return (*picked[:-1], self.lengths[-1])


def mixed(lengths: Sequence[float]) -> list[float]:
    """Return the lengths in an order in which long and short ones alternate, as they arrive in an engine."""
    stride = max(1, round(len(lengths) * 0.618))
    while math.gcd(stride, len(lengths)) != 1:
        stride += 1
    return [lengths[number * stride % len(lengths)] for number in range(len(lengths))]
