"""Samples with and without images, and their packs, for tests of passes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vlmrl.data.media import InlineMedia
from vlmrl.data.packing import Pack, make_packs
from vlmrl.plugins import Processor
from vlmrl.types import Layout, Sample


def batch(read: Processor, seed: int = 0) -> list[Sample]:
    """Two responses each to prompts with one image, no image, two images, and the first image again."""
    rng = np.random.default_rng(seed)
    side = read.resize_factor or 1
    sizes = [(w * side, h * side) for w, h in [(2, 2), (3, 2), (1, 2)]]
    if read.resize_factor is not None:
        sizes = [read.target_size(size) for size in sizes]
    media = [
        InlineMedia(f"{seed}.{i}", (w, h), rng.integers(0, 256, (h, w, 3), dtype=np.uint8))
        for i, (w, h) in enumerate(sizes)
    ]
    samples = []
    for group, shown in enumerate([media[:1], [], media[1:], media[:1]]):
        text = f"{group}: {read.image_text() * len(shown) if shown else ''}?"
        prompt, _ = read.encode(text, [item.size for item in shown])
        for length in (2 + group, 5):
            tokens = np.concatenate([prompt, rng.integers(97, 122, length)])
            samples.append(Sample(tokens, np.arange(len(tokens)) >= len(prompt), tuple(shown), group, f"test:{group}"))
    return samples


def packs(samples: Sequence[Sample], layout: Layout = "shared", max_tokens: int = 10_000) -> list[Pack]:
    return make_packs(
        samples,
        range(len(samples)),
        layout=layout,
        max_tokens=max_tokens,
        max_samples=None,
        image_cost=lambda image: 0.0,
    )
