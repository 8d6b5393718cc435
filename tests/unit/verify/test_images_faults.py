"""The image check on small models with planted faults, which ignore or swap images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import pytest
import torch

from vlmrl.config.data import Columns
from vlmrl.data.media import InlineMedia
from vlmrl.data.packing import make_pack
from vlmrl.data.responses import to_samples
from vlmrl.errors import ConfigError, SyncError, VlmrlError
from vlmrl.learning import forward
from vlmrl.learning.forward import LogprobForward
from vlmrl.models import tiny
from vlmrl.models.attention import implementation
from vlmrl.models.load import load_model
from vlmrl.models.scorer import ImageFeatures, Scorer
from vlmrl.models.vision_cache import VisionCache
from vlmrl.plugins import Processor, processor
from vlmrl.types import Floats, Group, Layout, Pixels, Prompt, Rollout
from vlmrl.verify.images import Path, check

torch.set_num_threads(1)

BOUND = 1e-3
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")


def _with_logprobs(rollout: Rollout, logprobs: Floats) -> Rollout:
    return replace(rollout, segments=(replace(rollout.segments[0], logprobs=logprobs),))


class Model:
    """A micro model, and responses to three prompts with the log-probs of one padded pass per response."""

    def __init__(self, folder: FilePath, attention: str, cache_bytes: int) -> None:
        where = torch.device("cpu")
        self.tools: Processor = processor(str(folder), min_pixels=3136, max_pixels=100_000)
        kind = implementation("auto", where) if attention == "ours" else attention
        self.net = load_model(str(folder), dtype=torch.float32, attn_implementation=kind)
        self.net.requires_grad_(cache_bytes == 0)
        self.forward = LogprobForward(
            Scorer(self.net).eval(), self.tools, temperature=0.7, bans=True, device=where, cache_bytes=cache_bytes
        )
        bare = [self._group(index, images) for index, images in enumerate((1, 1, 2))]
        values = iter(self.path("padded")(bare))
        self.groups = [
            replace(group, rollouts=tuple(_with_logprobs(rollout, next(values)) for rollout in group.rollouts))
            for group in bare
        ]

    def _group(self, index: int, images: int) -> Group:
        assert self.tools.resize_factor is not None
        rng, side = np.random.default_rng(index), 4 * self.tools.resize_factor
        pixels: list[Pixels] = [rng.integers(0, 256, (side, side, 3), dtype=np.uint8) for _ in range(images)]
        media = tuple(InlineMedia(f"{index}.{i}", (side, side), image) for i, image in enumerate(pixels))
        text = self.tools.render("how many?", num_images=images, columns=Columns())
        tokens, request = self.tools.encode(text, [item.size for item in media])
        rollouts = []
        for length in (5, 9):
            sampled = np.arange(len(tokens) + length) >= len(tokens)
            sequence = np.append(tokens, rng.integers(0, 256, length))
            zeros = np.zeros(len(sequence), np.float32)
            rollouts.append(Rollout.of_response(sequence, sampled, zeros, "", "stop", 0, media))
        return Group(Prompt(index, f"test:{index}", text, tokens, request, None, media), tuple(rollouts))

    def path(self, layout: Layout, *, gradient: bool = False) -> Path:
        def ask(groups: Sequence[Group]) -> list[Floats]:
            samples = to_samples(groups)
            alone = [make_pack([sample], [i], "padded") for i, sample in enumerate(samples)]
            packs = alone if layout == "padded" else [make_pack(samples, range(len(samples)), layout)]
            return [row for _, row in sorted(self.forward.logprobs(packs, gradient=gradient), key=lambda pair: pair[0])]

        return ask

    def check(self, layout: Layout) -> dict[str, float]:
        return check(self.groups, paths={layout: self.path(layout)}, bound=BOUND)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Model]:
    """`model(family, attention, cache_bytes)`, made once. Attention `ours` is what a run takes on CPU; a model with a
    vision cache is frozen.
    """
    made: dict[tuple[str, str, int], Model] = {}

    def make(family: tiny.Family, attention: str = "ours", cache_bytes: int = 0) -> Model:
        folder = tmp_path_factory.getbasetemp() / f"images-{family}"
        if not folder.exists():
            tiny.build(family, folder, size="micro")
        key = (family, attention, cache_bytes)
        if key not in made:
            made[key] = Model(folder, attention, cache_bytes)
        return made[key]

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_of_a_correct_model_passes(family: str, model: Callable[..., Model]) -> None:
    healthy = model(family)
    layouts: tuple[Layout, ...] = ("padded", "packed", "shared")
    paths = {name: healthy.path(name) for name in layouts} | {"update": healthy.path("shared", gradient=True)}
    metrics = check(healthy.groups, paths=paths, bound=BOUND)
    assert all(metrics[f"verify/images/{name}_effect"] > 0.05 for name in paths), metrics
    assert all(metrics[f"verify/images/{name}_gap"] < 1e-5 for name in paths), metrics


def two_dimensional(inputs: dict[str, Any]) -> None:
    inputs["position_ids"] = inputs["position_ids"][0]


def three_rows(inputs: dict[str, Any]) -> None:
    inputs["position_ids"] = inputs["position_ids"][1:]


def no_token_types(inputs: dict[str, Any]) -> None:
    del inputs["mm_token_type_ids"]


def swapped_pixels(inputs: dict[str, Any]) -> None:
    """The first two images, which belong to different prompts. Blank images are one and the same."""
    pixels, (first, *others) = inputs["pixel_values"], inputs["image_grid_thw"].prod(-1).tolist()
    if others:
        second = first + others[0]
        inputs["pixel_values"] = torch.cat([pixels[first:second], pixels[:first], pixels[second:]])


def no_pixels(inputs: dict[str, Any]) -> None:
    inputs["pixel_values"] = torch.zeros_like(inputs["pixel_values"])


Fault = Callable[[dict[str, Any]], None]
Plant = Callable[[Fault], None]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """`plant(fault)` does it to all that models are given from now on."""
    sound = forward.model_inputs

    def planted(fault: Fault) -> None:
        def make(*args: Any, **kwargs: Any) -> dict[str, Any]:
            inputs = sound(*args, **kwargs)
            fault(inputs)
            return inputs

        monkeypatch.setattr(forward, "model_inputs", make)

    return planted


MIXED = "change by .* when the same responses come in another order"
APART = "and the rollouts disagree"
SWAPPED = "other images explain the responses to test:0 better than their own"
BLIND = "ignores the images: its outputs change by 0 on average with other images and by 0 with blank ones"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("fault", "attention", "layout", "message"),
    [
        (two_dimensional, "ours", "padded", APART),
        (two_dimensional, "ours", "packed", APART),
        (two_dimensional, "ours", "shared", APART),
        (two_dimensional, "sdpa", "packed", f"{MIXED}|{APART}"),
        (three_rows, "sdpa", "packed", MIXED),
        (swapped_pixels, "ours", "packed", SWAPPED),
        (swapped_pixels, "ours", "shared", SWAPPED),
        (no_pixels, "ours", "padded", BLIND),
        (no_pixels, "ours", "packed", BLIND),
        (no_pixels, "ours", "shared", BLIND),
    ],
)
def test_a_planted_fault_is_caught(
    family: str,
    fault: Fault,
    attention: str,
    layout: Layout,
    message: str,
    model: Callable[..., Model],
    plant: Plant,
) -> None:
    faulty = model(family, attention)
    plant(fault)
    caught = f"path {layout} ({message})|on path {layout}, {message}|mask of .* lets packed samples attend"
    with pytest.raises((SyncError, ConfigError), match=caught):
        faulty.check(layout)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["packed", "shared"])
@pytest.mark.parametrize("fault", [three_rows, no_token_types])
def test_faults_of_other_trainers_do_not_occur(
    family: str, layout: Layout, fault: Fault, model: Callable[..., Model], plant: Plant
) -> None:
    """Our attention is told where samples end and never reads the first row; with positions given, Transformers finds
    the places of images by their tokens.
    """
    plant(fault)
    assert model(family).check(layout)[f"verify/images/{layout}_gap"] < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_text_positions_for_images_are_detected(
    family: str, model: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drop the token types, for models that compute positions themselves."""
    blinded = model(family)
    sound = blinded.net.base_model.get_rope_index

    def of_text(tokens: torch.Tensor, types: torch.Tensor, **_: Any) -> Any:
        return sound(tokens, torch.zeros_like(types))

    monkeypatch.setattr(blinded.net.base_model, "get_rope_index", of_text)
    with pytest.raises(SyncError, match=f"path shared {APART}"):
        blinded.check("shared")


def test_token_types_without_images_are_refused(model: Callable[..., Model], monkeypatch: pytest.MonkeyPatch) -> None:
    blinded = model("qwen3_vl")
    monkeypatch.setattr(blinded.tools, "token_types", np.zeros_like)
    with pytest.raises((AssertionError, VlmrlError), match="0 image tokens"):
        blinded.check("shared")


def test_a_blind_update_is_the_path_that_is_named(model: Callable[..., Model], plant: Plant) -> None:
    faulty = model("qwen2_5_vl")

    def without_pixels(inputs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            no_pixels(inputs)

    plant(without_pixels)
    paths = {"old": faulty.path("shared"), "update": faulty.path("shared", gradient=True)}
    with pytest.raises(SyncError, match=f"path update {BLIND}"):
        check(faulty.groups, paths=paths, bound=BOUND)


def test_a_vision_cache_that_swaps_images_is_detected(
    model: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = model("qwen3_vl", cache_bytes=2**24)
    assert frozen.check("shared")["verify/images/shared_gap"] < 1e-5
    sound = VisionCache.get
    frozen.forward.clear_cache()

    def get(self: VisionCache, names: Iterable[str], *, device: torch.device) -> dict[str, ImageFeatures]:
        first = next(iter(sound(self, list(self._features), device=device).values()), None)
        return {} if first is None else dict.fromkeys(names, first)

    monkeypatch.setattr(VisionCache, "get", get)
    with pytest.raises(SyncError, match="path shared"):
        frozen.check("shared")
