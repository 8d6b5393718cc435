"""Fixtures of micro models and samples, shared by several folders of tests."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from vlmrl.models import tiny
from vlmrl.models.load import load_model
from vlmrl.plugins import Processor, processor
from vlmrl.types import Pixels, Sample
from vlmrl.video_size import Size, VideoSize, pixel_shape

torch.set_num_threads(1)


@dataclass(frozen=True)
class Picture:
    """An image or video of random pixels."""

    seed: int
    size: Size

    @property
    def hash(self) -> str:
        return f"{self.seed}:{self.size}"

    def fetch(self) -> Pixels:
        return np.random.default_rng(self.seed).integers(0, 256, pixel_shape(self.size), dtype=np.uint8)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`folder(family, tied=...)`: a micro model of the family, built once."""

    def make(family: tiny.Family, *, tied: bool = False) -> Path:
        out = Path(tmp_path_factory.getbasetemp()) / f"{family}_{tied}"
        return out if out.exists() else tiny.build(family, out, tied=tied, size="micro")

    return make


@pytest.fixture(scope="session")
def net(folder: Callable[..., Path]) -> Callable[..., PreTrainedModel]:
    """`net(family, tied=..., attention=...)`: a new fp32 model with larger weights, so that attention matters."""

    made: dict[tuple[str, bool, str], PreTrainedModel] = {}

    def load(family: tiny.Family, tied: bool, attention: str | dict[str, str]) -> PreTrainedModel:
        model = load_model(str(folder(family, tied=tied)), dtype=torch.float32, attn_implementation=attention)
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        return model.eval()

    def make(family: tiny.Family, *, tied: bool = False, attention: str | dict[str, str] = "sdpa") -> PreTrainedModel:
        key = (family, tied, str(attention))
        if key not in made:
            made[key] = load(family, tied, attention)
        return copy.deepcopy(made[key])

    return make


@pytest.fixture(scope="session")
def reader(folder: Callable[..., Path]) -> Callable[..., Processor]:
    """`reader(family)`: the processor of a family's micro model, read once."""

    @cache
    def make(family: tiny.Family) -> Processor:
        return processor(str(folder(family)), min_pixels=3136, max_pixels=100_000)

    return make


@pytest.fixture(scope="session")
def group(reader: Callable[..., Processor]) -> Callable[..., list[Sample]]:
    """`group(family, images, seed, lengths, videos=...)`: a prompt with images, then videos, of different sizes, and
    random responses to it."""

    def make(family: tiny.Family, images: int, seed: int, lengths: Sequence[int], *, videos: int = 0) -> list[Sample]:
        read = reader(family)
        rng = np.random.default_rng(seed)
        side = read.resize_factor or 1
        drawn = [(side * int(rng.integers(2, 5)), side * int(rng.integers(2, 5))) for _ in range(images)]
        sizes: list[Size] = [read.target_size(size) for size in drawn]
        sizes += [VideoSize(side * 3, side * (2 + i), tuple(range(8)), 4.0, 8) for i in range(videos)]
        media = tuple(Picture(seed * 10 + i, size) for i, size in enumerate(sizes))
        shown = f"{read.image_text()} and " * images if images else ""
        shown += f"{read.image_text('video')} and " * videos if videos else ""
        prompt, _ = read.encode(
            f"<|im_start|>user\n{seed}: {shown}how many?<|im_end|>\n", [item.size for item in media]
        )
        samples = []
        for length in lengths:
            tokens = np.concatenate([prompt, rng.integers(0, 256, length)])
            samples.append(Sample(tokens, np.arange(len(tokens)) >= len(prompt), media, seed, f"test:{seed}"))
        return samples

    return make


@pytest.fixture(scope="session")
def sample(group: Callable[..., list[Sample]]) -> Callable[..., Sample]:
    """`sample(family, images, seed)`: the only response to a prompt."""

    def make(family: tiny.Family, images: int, seed: int) -> Sample:
        (only,) = group(family, images, seed, [3 + seed * 5 % 9])
        return only

    return make
