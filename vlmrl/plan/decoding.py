"""Work of an engine that decodes responses of different lengths together."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import lru_cache

from vlmrl.plan.costs import ModelCosts
from vlmrl.plan.rates import Unit
from vlmrl.plan.workload import mixed

_TAIL = 0.25
"""The tail is the end in which fewer than this share of the largest batch is decoded."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """Work of one GPU of an engine."""

    bulk: dict[Unit, float]
    tail: dict[Unit, float]
    steps: float
    """Tokens that the engine decodes one after the other."""
    largest: int
    """Largest number of responses that are decoded together."""


@lru_cache(maxsize=1024)  # the search asks for the same engines with many trainers
def decoding(
    costs: ModelCosts, lengths: tuple[float, ...], *, prompt_tokens: float, slots: int, tensor_parallel: int = 1
) -> Decoding:
    """Simulate an engine that decodes up to `slots` responses together, and starts the next one when one ends.

    Each engine step reads the weights, of experts those that a token uses, and the KV cache of all its responses.
    """
    waiting = list(reversed(mixed(lengths)))
    running: list[float] = []
    started = 0.0  # sum of the steps at which the running responses started
    starts: dict[float, list[float]] = {}
    now, largest = 0.0, 0
    bulk: dict[Unit, float] = {}
    tail: dict[Unit, float] = {}
    while waiting or running:
        while waiting and len(running) < slots:
            end = now + waiting.pop()
            heapq.heappush(running, end)
            starts.setdefault(end, []).append(now)
            started += now
        largest = max(largest, len(running))
        end = running[0]
        steps, rows = end - now, len(running)
        context = prompt_tokens + (now + end) / 2 - started / rows
        work = tail if not waiting and rows < _TAIL * largest else bulk
        for unit, amount in _step(costs, rows, context, tensor_parallel).items():
            work[unit] = work.get(unit, 0.0) + steps * amount
        now = end
        while running and running[0] <= now:
            ended = heapq.heappop(running)
            started -= starts[ended].pop()
    return Decoding(bulk, tail, now, largest)


def _step(costs: ModelCosts, rows: int, context: float, tensor_parallel: int) -> dict[Unit, float]:
    """Work of one engine step that decodes a token of each of `rows` responses with this mean context."""
    size = costs.bytes_per_parameter
    weights = costs.dense + costs.output
    if costs.experts is not None:
        weights += costs.experts.parameters * costs.experts.touched(rows)
    flops = rows * (2 * costs.per_token + 2 * costs.output + 4 * costs.attention * context)
    logits = 6 * 4 * rows * costs.vocabulary  # sampling reads them about as often as a training pass
    work: dict[Unit, float] = {
        "flops": flops / tensor_parallel,
        "bytes": (weights * size + rows * context * costs.kv_bytes + logits) / tensor_parallel,
        "calls": 1.0,
        "layers": float(costs.layers),
        "rows": float(rows),
    }
    if tensor_parallel > 1:
        # Two reductions of the hidden states per layer, each of which waits about as long as a layer's launches take.
        work["layers"] *= 3
        work["link"] = 4.0 * costs.layers * costs.hidden * size * rows
    return work
