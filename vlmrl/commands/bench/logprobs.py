"""`vlmrl bench logprobs`: time and memory of computing log-probs with and without the [T, V] logits.

`full` is the cheapest computation with logits: one product, its logsumexp, and the logits of the target tokens, without
entropy and temperature. `chunked` is the one used in training (`models.logprobs`), with entropy. They are timed in
alternating calls, and memory is measured in separate calls: the peak above hidden states, weight and targets. It
includes the gradients that a backward pass returns, whose size is also reported by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from vlmrl.commands.bench.memory import peak_bytes
from vlmrl.commands.bench.output import print_json, print_table
from vlmrl.config.bench import OutputLayer
from vlmrl.config.bench_verbs import LogprobsBench
from vlmrl.learning.deepspeed_engine import DTYPES, device
from vlmrl.models.logprobs import token_logprobs
from vlmrl.system.malloc import keep_memory

Method = Callable[[Tensor, Tensor, Tensor], Tensor]
"""hidden [T, D], weight [V, D], targets [T] -> log-probs [T]."""


class Layer(NamedTuple):
    """An output layer with its inputs and targets."""

    hidden: Tensor
    """[T, D]"""
    weight: Tensor
    """[V, D]"""
    targets: Tensor
    """[T]"""


def logprobs(config: LogprobsBench) -> None:
    """Measure both methods; print a line of JSON for each, and a table."""
    where = device()
    layer = make_layer(config.bench, where)
    diffs = differences(layer)
    # The first round warms up, and measures the peaks.
    peaks = {
        (method, passes): peak_bytes(partial(PASSES[passes], METHODS[method], layer), where)
        for method in METHODS
        for passes in PASSES
    }
    keep_memory()
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in peaks}
    for _ in range(config.bench.repeats):
        for (method, passes), repeats in seconds.items():
            started = time.perf_counter()
            PASSES[passes](METHODS[method], layer)
            _synchronize(where)
            repeats.append(time.perf_counter() - started)
    gradients = (layer.hidden.nbytes + layer.weight.nbytes) / 2**20
    rows = []
    for (method, passes), repeats in seconds.items():
        peak, full = peaks[method, passes], peaks["full", passes]
        ratio = round(full / peak, 2) if peak and full else None
        print_json(
            bench="logprobs",
            method=method,
            passes=passes,
            **config.bench.model_dump(),
            seconds=round(median(repeats), 4),
            seconds_each=[round(value, 4) for value in repeats],
            peak_mib=None if peak is None else round(peak / 2**20, 1),
            gradients_mib=round(gradients, 1) if "backward" in passes else 0.0,
            full_over_peak=ratio,
            **diffs,
            device=str(where),
            threads=torch.get_num_threads(),
        )
        peak_cell = "?" if peak is None else f"{peak / 2**20:.0f} MiB"
        ratio_cell = "?" if ratio is None else f"1/{ratio:.1f}"
        rows.append((method, passes, f"{median(repeats):.3f} s", peak_cell, ratio_cell))
    print_table(("method", "passes", "time", "peak", "of full"), rows)
    largest = [f"{name.removesuffix('_diff_max')} {value:.1e}" for name, value in diffs.items() if "diff" in name]
    print_table((f"largest differences: {', '.join(largest)}",), ())


def make_layer(sizes: OutputLayer, where: torch.device) -> Layer:
    """Make a random layer whose logits spread over some nats, like a trained model's."""
    generator = torch.Generator(where).manual_seed(0)
    dtype = DTYPES[sizes.dtype]
    hidden = torch.randn(sizes.tokens, sizes.hidden, generator=generator, device=where).to(dtype)
    weight = torch.randn(sizes.vocabulary, sizes.hidden, generator=generator, device=where)
    weight = weight.mul_(2 / sizes.hidden**0.5).to(dtype)
    targets = torch.randint(sizes.vocabulary, (sizes.tokens,), generator=generator, device=where)
    return Layer(hidden.requires_grad_(), weight.requires_grad_(), targets)


def differences(layer: Layer) -> dict[str, float]:
    """Return the largest differences between the two methods, of log-probs and of the gradients of their sum.

    The largest gradients themselves are included for scale.
    """
    outputs = [PASSES["forward+backward"](method, layer) for method in METHODS.values()]
    names = ("logprob", "hidden_gradient", "weight_gradient")
    diffs = {f"{name}_diff_max": float((a - b).abs().max()) for name, a, b in zip(names, *outputs, strict=True)}
    return diffs | {f"{name}_max": float(a.abs().max()) for name, a in zip(names[1:], outputs[0][1:], strict=True)}


def full_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return log-probs [T] from [T, V] logits in fp32."""
    logits = (hidden @ weight.T).float()
    return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return log-probs [T] as training computes them. The entropy is computed too, and not used."""
    return token_logprobs(hidden, weight, None, targets).logprobs


def _forward(method: Method, layer: Layer) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return (method(*layer),)


def _forward_backward(method: Method, layer: Layer) -> tuple[Tensor, ...]:
    output = method(*layer)
    return (output.detach(), *torch.autograd.grad(output.sum(), [layer.hidden, layer.weight]))


def _synchronize(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)


METHODS: dict[str, Method] = {"full": full_logits, "chunked": chunked}
PASSES: dict[str, Callable[[Method, Layer], tuple[Tensor, ...]]] = {
    "forward": _forward,
    "forward+backward": _forward_backward,
}
