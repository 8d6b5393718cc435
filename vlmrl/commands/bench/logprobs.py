"""`vlmrl bench logprobs`: what scoring tokens costs with and without the [T, V] logits.

`full` is the leanest way with them: one product, its logsumexp, and the logits of the tokens; no entropy, no
temperature. `chunked` is what training uses (`models.logprobs`), entropy included. Seconds come from calls in turn,
memory from calls of their own: the most above hidden states, weight and targets. The gradients, which each way has to
hand out after a backward pass, are part of it, and are told beside it.
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
from vlmrl.commands.bench.output import say, table
from vlmrl.config.bench import Head
from vlmrl.config.run import LogprobsBench
from vlmrl.learning.deepspeed_engine import DTYPES, device
from vlmrl.models.logprobs import token_logprobs
from vlmrl.system.memory import keep_memory

Way = Callable[[Tensor, Tensor, Tensor], Tensor]
"""hidden [T, D], weight [V, D], targets [T] -> log-probs [T]."""


class Layer(NamedTuple):
    """An output layer, and what it is asked."""

    hidden: Tensor
    """[T, D]"""
    weight: Tensor
    """[V, D]"""
    targets: Tensor
    """[T]"""


def logprobs(config: LogprobsBench) -> None:
    """`vlmrl bench logprobs`."""
    where = device()
    layer = make_layer(config.bench, where)
    diffs = differences(layer)
    # The first round warms up, and finds the peaks.
    peaks = {(way, what): peak_bytes(partial(PASSES[what], WAYS[way], layer), where) for way in WAYS for what in PASSES}
    keep_memory()
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in peaks}
    for _ in range(config.bench.repeats):
        for (way, what), each in seconds.items():
            started = time.perf_counter()
            PASSES[what](WAYS[way], layer)
            _wait(where)
            each.append(time.perf_counter() - started)
    gradients = (layer.hidden.nbytes + layer.weight.nbytes) / 2**20
    rows = []
    for (way, what), each in seconds.items():
        peak, full = peaks[way, what], peaks["full", what]
        ratio = round(full / peak, 2) if peak and full else None
        say(
            bench="logprobs",
            way=way,
            passes=what,
            **config.bench.model_dump(),
            seconds=round(median(each), 4),
            seconds_each=[round(value, 4) for value in each],
            peak_mib=None if peak is None else round(peak / 2**20, 1),
            gradients_mib=round(gradients, 1) if "backward" in what else 0.0,
            full_over_peak=ratio,
            **diffs,
            device=str(where),
            threads=torch.get_num_threads(),
        )
        shown = "?" if peak is None else f"{peak / 2**20:.0f} MiB"
        rows.append((way, what, f"{median(each):.3f} s", shown, "?" if ratio is None else f"1/{ratio:.1f}"))
    table(("way", "passes", "time", "peak", "of full"), rows)
    worst = [f"{name.removesuffix('_diff_max')} {value:.1e}" for name, value in diffs.items() if "diff" in name]
    table((f"largest differences: {', '.join(worst)}",), ())


def make_layer(sizes: Head, where: torch.device) -> Layer:
    """Random numbers of the size that a trained model has: logits spread over some nats."""
    generator = torch.Generator(where).manual_seed(0)
    dtype = DTYPES[sizes.dtype]
    hidden = torch.randn(sizes.tokens, sizes.hidden, generator=generator, device=where).to(dtype)
    weight = torch.randn(sizes.vocabulary, sizes.hidden, generator=generator, device=where)
    weight = weight.mul_(2 / sizes.hidden**0.5).to(dtype)
    targets = torch.randint(sizes.vocabulary, (sizes.tokens,), generator=generator, device=where)
    return Layer(hidden.requires_grad_(), weight.requires_grad_(), targets)


def differences(layer: Layer) -> dict[str, float]:
    """The largest differences between the two ways: of log-probs, and of the gradients of their sum, whose largest
    numbers are told too."""
    found = [PASSES["forward+backward"](way, layer) for way in WAYS.values()]
    names = ("logprob", "hidden_gradient", "weight_gradient")
    diffs = {f"{name}_diff_max": float((a - b).abs().max()) for name, a, b in zip(names, *found, strict=True)}
    return diffs | {f"{name}_max": float(a.abs().max()) for name, a in zip(names[1:], found[0][1:], strict=True)}


def full_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Log-probs [T] by way of [T, V] logits in fp32."""
    logits = (hidden @ weight.T).float()
    return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Log-probs [T] as training computes them; the entropy is computed, and dropped here."""
    return token_logprobs(hidden, weight, None, targets).logprobs


def _forward(way: Way, layer: Layer) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return (way(*layer),)


def _forward_backward(way: Way, layer: Layer) -> tuple[Tensor, ...]:
    found = way(*layer)
    return (found.detach(), *torch.autograd.grad(found.sum(), [layer.hidden, layer.weight]))


def _wait(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)


WAYS: dict[str, Way] = {"full": full_logits, "chunked": chunked}
PASSES: dict[str, Callable[[Way, Layer], tuple[Tensor, ...]]] = {
    "forward": _forward,
    "forward+backward": _forward_backward,
}
