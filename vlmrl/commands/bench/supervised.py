"""`vlmrl bench sft`: an optimizer step of supervised training, packed against padded, on rows of chat-like lengths.

Both layouts take turns on the same model and rows, in one process: packs up to `train.max_tokens_per_gpu` tokens, and
padded passes of `bench.padded_rows` rows in the order of the data. The largest possible speed-up is the ratio of the
tokens that they compute, if all tokens cost the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import median

import numpy as np
import torch

from vlmrl.cluster.models import loss_totals
from vlmrl.commands.bench.output import print_json, print_table
from vlmrl.config.bench import ChatRows
from vlmrl.config.bench_verbs import SftBench
from vlmrl.config.data import Columns
from vlmrl.config.train import Layout
from vlmrl.config.vision import Vision
from vlmrl.data.balance import spread
from vlmrl.data.packing import Pack
from vlmrl.learning.policy import Policy
from vlmrl.learning.settings import PolicySettings
from vlmrl.models.adapter_plan import plan_adapter
from vlmrl.plugins import Processor, processor_of
from vlmrl.system.malloc import keep_memory
from vlmrl.types import Sample

_LAYOUTS: tuple[Layout, ...] = ("padded", "packed")
_SHARE_OF_PROMPT = 1 / 3


def supervised(config: SftBench) -> None:
    """Measure both layouts; print a line of JSON for each, and a table."""
    policy, processor = make_policy(config)
    vocabulary = int(policy._net.config.get_text_config().vocab_size)
    samples = chat_samples(processor, vocabulary, config.bench, seed=config.train.seed)
    packs = {layout: pack(samples, layout, config) for layout in _LAYOUTS}
    keep_memory()
    seconds: dict[Layout, list[float]] = {layout: [] for layout in _LAYOUTS}
    for number in range(config.bench.repeats + 1):
        for layout in _LAYOUTS[:: 1 if number % 2 else -1]:
            started = time.perf_counter()
            step(policy, packs[layout], samples)
            if number:
                seconds[layout].append(time.perf_counter() - started)
    _print(config, packs, seconds)


def step(policy: Policy, packs: Sequence[Pack], samples: Sequence[Sample]) -> None:
    """Make one optimizer step."""
    policy.fit(packs, loss_totals(samples))
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def make_policy(config: SftBench) -> tuple[Policy, Processor]:
    """Load the model of `vlmrl sft` in this process."""
    columns, actor = Columns(), config.actor
    processor = processor_of(actor.model_name_or_path, columns, trust_remote_code=actor.trust_remote_code)
    settings = PolicySettings(
        actor=actor.model_copy(update={"lr_scheduler": "constant"}),
        ds=config.ds,
        loop=config.train,
        columns=columns,
        vision=Vision(),
        total_steps=2 * (config.bench.repeats + 1),
        loss=None,
        temperature=1.0,
        bans=False,
        adapter=plan_adapter(actor, config.ds.lora, processor),
    )
    return Policy(settings), processor


def chat_lengths(sizes: ChatRows, *, seed: int) -> list[int]:
    """Return lengths of rows in random order: quantiles of a log-normal distribution with the mean of `sizes`, of which
    the largest is `max_tokens`."""
    rng = np.random.default_rng(seed)
    quantiles = np.quantile(rng.lognormal(0.0, sizes.sigma, 100_000), (np.arange(sizes.rows) + 0.5) / sizes.rows)
    scale = sizes.mean_tokens
    for _ in range(50):  # the cut at the largest lowers the mean
        lengths = np.clip(quantiles * scale, 8, sizes.max_tokens)
        lengths[-1] = sizes.max_tokens
        scale *= sizes.mean_tokens / lengths.mean()
    return [int(length) for length in rng.permutation(lengths.round())]


def chat_samples(processor: Processor, vocabulary: int, sizes: ChatRows, *, seed: int) -> list[Sample]:
    """Make rows of random tokens, a third of which is the prompt."""
    rng = np.random.default_rng(seed)
    text_tokens = np.setdiff1d(np.arange(vocabulary), processor.banned_tokens)
    samples = []
    for row, length in enumerate(chat_lengths(sizes, seed=seed)):
        sampled = np.arange(length) >= max(1, round(length * _SHARE_OF_PROMPT))
        samples.append(Sample(tokens=rng.choice(text_tokens, length), sampled=sampled, group=row))
    return samples


def pack(samples: Sequence[Sample], layout: Layout, config: SftBench) -> list[Pack]:
    """Pack the rows of one step as `vlmrl sft` does; padded ones `bench.padded_rows` at a time."""
    is_padded = layout == "padded"
    return spread(
        samples,
        num_ranks=1,
        layout=layout,
        max_tokens=10**9 if is_padded else config.train.max_tokens_per_gpu,
        max_samples=config.bench.padded_rows if is_padded else None,
        image_cost=lambda image: 0.0,
        filler=None,
    )[0]


def _print(config: SftBench, packs: dict[Layout, list[Pack]], seconds: dict[Layout, list[float]]) -> None:
    computed = {layout: sum(math.prod(pack.shape) for pack in of_layout) for layout, of_layout in packs.items()}
    ratio = computed["padded"] / computed["packed"]
    rows = []
    for layout, repeats in seconds.items():
        speedup = median(seconds["padded"]) / median(repeats)
        print_json(
            bench="sft",
            model=config.actor.model_name_or_path,
            layout=layout,
            **config.bench.model_dump(),
            passes=len(packs[layout]),
            tokens_computed=computed[layout],
            seconds=round(median(repeats), 4),
            seconds_each=[round(value, 4) for value in repeats],
            speedup=round(speedup, 3),
            padding_ratio=round(ratio, 3),
            reached=round(speedup / ratio, 3) if layout == "packed" else None,
            threads=torch.get_num_threads(),
        )
        share = f"{speedup / ratio:.0%}" if layout == "packed" else ""
        rows.append((layout, str(computed[layout]), f"{median(repeats):.3f} s", f"{speedup:.2f}", share))
    print_table(("layout", "tokens", "step", "speed-up", "of the padding ratio"), rows)
