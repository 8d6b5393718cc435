"""Videos of Qwen-VL models: ids, patches and positions equal Transformers', and the layouts of a pass agree."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vlmrl import plugins
from vlmrl.config.data import Columns
from vlmrl.data.image_tokens import collapse, last_image_tokens
from vlmrl.data.media import Blank, InlineMedia, Resized, sheet
from vlmrl.data.packing import make_pack
from vlmrl.errors import DataError
from vlmrl.learning.forward import LogprobForward
from vlmrl.models import tiny
from vlmrl.models.attention import implementation
from vlmrl.models.load import load_model
from vlmrl.models.scorer import Scorer
from vlmrl.types import Layout, Media, Sample
from vlmrl.video_size import VideoSize

COLUMNS = Columns(video_key="videos")
FAMILIES: tuple[tiny.Family, ...] = ("qwen3_vl", "qwen2_5_vl", "qwen2_vl", "qwen3_5")
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(request.param, tmp_path_factory.mktemp(request.param) / "model", size="micro")


@pytest.fixture(scope="module")
def processor(model: Path) -> Any:
    return plugins.processor_of(str(model), COLUMNS)


def video(factor: int, *, seed: int = 0, frames: int = 12, rows: int = 1, fps: float = 7.0) -> InlineMedia:
    """Every third frame of noise: longer in time than in height and width, where families differ."""
    size = VideoSize(2 * factor, rows * factor, tuple(range(0, 3 * frames, 3)), fps, 3 * frames)
    pixels = np.random.default_rng(seed).integers(0, 255, (frames, rows * factor, 2 * factor, 3), dtype=np.uint8)
    return InlineMedia(f"video{seed}", size, pixels)


def image(factor: int, *, seed: int = 0) -> InlineMedia:
    pixels = np.random.default_rng(seed).integers(0, 255, (2 * factor, 2 * factor, 3), dtype=np.uint8)
    return InlineMedia(f"image{seed}", (2 * factor, 2 * factor), pixels)


def encoded(processor: Any, media: Sequence[Media]) -> tuple[str, Any, Any]:
    parts = [{"type": "video" if isinstance(item.size, VideoSize) else "image"} for item in media]
    question = [{"role": "user", "content": [*parts, {"type": "text", "text": "which way?"}]}]
    text = processor.render(question, num_images=len(media), columns=COLUMNS)
    return (text, *processor.encode(text, [item.size for item in media]))


def transformers_inputs(processor: Any, text: str, item: InlineMedia) -> Any:
    """Return what Transformers' processor makes of a prompt with a video."""
    size = item.size
    assert isinstance(size, VideoSize)
    return processor._processor(
        text=[text],
        videos=[item.pixels],
        video_metadata=[{"fps": size.fps, "frames_indices": list(size.indices), "total_num_frames": size.total}],
        do_resize=False,
        do_sample_frames=False,
        return_tensors="pt",
    )


def test_ids_and_patches_equal_transformers(processor: Any) -> None:
    item = video(processor.resize_factor, rows=2)
    text, tokens, request = encoded(processor, [item])
    inputs = transformers_inputs(processor, text, item)
    assert inputs["input_ids"][0].tolist() == tokens.tolist()
    assert inputs["mm_token_type_ids"][0].tolist() == processor.token_types(tokens).tolist()
    ours = processor.pixel_inputs([item])
    assert torch.equal(ours["pixel_values"], inputs["pixel_values_videos"])
    assert ours["image_grid_thw"].tolist() == inputs["video_grid_thw"].tolist() == [list(processor.grid(item.size))]
    assert collapse(tokens, [item], processor).tolist() == request.tolist()


def test_times_of_qwen3_vl_are_those_of_its_pairs_of_frames(processor: Any) -> None:
    # Frames 0, 3, 6, 9 of 7 per second: the middle of the first pair is 1.5 / 7 s.
    text = processor.tokenizer.decode(processor.expansion(video(processor.resize_factor, frames=4).size))
    assert text.count("seconds") == (2 if processor._shows_times else 0)
    assert not processor._shows_times or text.startswith("<0.2 seconds>")


def test_positions_after_a_video_follow_its_largest(processor: Any, model: Path) -> None:
    item = video(processor.resize_factor)
    _, tokens, _ = encoded(processor, [item])
    ours = processor.video_positions(tokens, [item.size])
    last = int(last_image_tokens(tokens, [item], processor)[0])
    assert ours[:, last + 1].tolist() == [int(ours[:, : last + 1].max()) + 1] * 3
    net: Any = load_model(str(model), dtype=torch.float32, attn_implementation="sdpa")
    more = {"second_per_grid_ts": torch.tensor([2 * 3 / 7.0])} if model.parent.name.startswith("qwen2_5") else {}
    theirs, _ = net.model.get_rope_index(
        torch.from_numpy(tokens)[None],
        torch.from_numpy(processor.token_types(tokens))[None],
        video_grid_thw=torch.tensor([processor.grid(item.size)]),
        **more,
    )
    # Behind a video that is longer than it is high and wide, Transformers goes back in positions (Qwen2, Qwen2.5).
    end = len(tokens) if processor._shows_times else last + 1
    assert np.array_equal(theirs[:, 0, :end].numpy(), ours[:, :end])


def test_positions_of_images_are_transformers_too(processor: Any, model: Path) -> None:
    item = image(processor.resize_factor)
    _, tokens, _ = encoded(processor, [item])
    net: Any = load_model(str(model), dtype=torch.float32, attn_implementation="sdpa")
    theirs, _ = net.model.get_rope_index(
        torch.from_numpy(tokens)[None],
        torch.from_numpy(processor.token_types(tokens))[None],
        image_grid_thw=torch.tensor([processor.grid(item.size)]),
    )
    assert np.array_equal(theirs[:, 0].numpy(), processor.video_positions(tokens, [item.size]))


def test_log_probs_equal_those_of_transformers_own_pass(processor: Any, model: Path) -> None:
    # A video that is shorter in time than it is high, after which families continue alike.
    item = video(processor.resize_factor, frames=4, rows=4)
    text, tokens, _ = encoded(processor, [item])
    inputs = transformers_inputs(processor, text, item)
    net: Any = load_model(str(model), dtype=torch.float32, attn_implementation="sdpa")
    with torch.no_grad():
        theirs = net(**inputs).logits[0, :-1].log_softmax(-1)
    expected = theirs.gather(1, torch.from_numpy(tokens)[1:, None])[:, 0]
    sample = Sample(tokens, np.ones(len(tokens), dtype=np.bool_), (item,))
    forward = LogprobForward(Scorer(net), processor, temperature=1.0, bans=False, device=CPU, cache_bytes=0)
    ours = dict(forward.logprobs([make_pack([sample], [0], "padded")]))[0]
    assert np.abs(ours[1:] - expected.numpy()).max() < 1e-5


def _samples(processor: Any) -> list[Sample]:
    """Two responses each to a video, to an image and a video, and to the same video in another question."""
    first, other = video(processor.resize_factor), video(processor.resize_factor, seed=1, rows=2, fps=4.0)
    rng = np.random.default_rng(0)
    samples = []
    for group, media in enumerate([[first], [image(processor.resize_factor), other], [other, first]]):
        _, prompt, _ = encoded(processor, media)
        for length in (3, 5):
            tokens = np.concatenate([prompt, rng.integers(65, 90, length)])
            sampled = np.arange(len(tokens)) >= len(prompt)
            samples.append(Sample(tokens, sampled, tuple(media), group=group))
    return samples


def _pass(processor: Any, model: Path, layout: Layout, *, cache_bytes: int = 0) -> tuple[Any, dict[str, Any], Any]:
    net = load_model(str(model), dtype=torch.float32, attn_implementation=implementation("auto", CPU))
    if cache_bytes:
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(processor.parameter_group(name) == "language")
    samples = _samples(processor)
    forward = LogprobForward(Scorer(net), processor, temperature=1.0, bans=True, device=CPU, cache_bytes=cache_bytes)
    pack = make_pack(samples, range(len(samples)), layout)
    rows = []
    for _ in range(2 if cache_bytes else 1):
        net.zero_grad()
        output = forward(pack)
        output.logprobs.sum().backward()
        rows = forward.run_packs([pack], lambda _, output=output: output.logprobs)
    gradients = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return dict(rows), gradients, forward.take_counts()


def test_layouts_agree_in_values_and_gradients(processor: Any, model: Path) -> None:
    padded, gradients, _ = _pass(processor, model, "padded")
    for layout in ("packed", "shared"):
        rows, others, counts = _pass(processor, model, layout)  # type: ignore[arg-type]
        assert counts["vision/tower_calls"].value == 3, "an image and two videos, each once"
        for i, row in padded.items():
            assert np.abs(row - rows[i]).max() < 1e-5
        assert others.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert (gradient - others[name]).abs().max() < 2e-4 * max(1.0, float(gradient.abs().max())), name


def test_features_of_videos_are_cached(processor: Any, model: Path) -> None:
    plain, _, _ = _pass(processor, model, "shared")
    cached, _, counts = _pass(processor, model, "shared", cache_bytes=2**24)
    assert (counts["vision/tower_calls"].value, counts["vision/cache_hits"].value) == (3, 3)
    assert all(np.abs(row - cached[i]).max() < 1e-6 for i, row in plain.items())


def test_times_change_the_log_probs(processor: Any, model: Path) -> None:
    if model.parent.name.startswith("qwen2_vl"):
        pytest.skip("Qwen2-VL does not read times")
    fast, slow = video(processor.resize_factor, fps=24.0), video(processor.resize_factor, fps=2.0)
    texts = [encoded(processor, [item])[1] for item in (fast, slow)]
    positions = [processor.video_positions(t, [m.size]) for t, m in zip(texts, (fast, slow), strict=True)]
    assert not np.array_equal(texts[0], texts[1]) or not np.array_equal(*positions)


def test_images_and_videos_in_another_order_are_refused(processor: Any) -> None:
    media = [image(processor.resize_factor), video(processor.resize_factor)]
    text, _, _ = encoded(processor, media)
    with pytest.raises(DataError, match="another order"):
        processor.encode(text, [item.size for item in reversed(media)])
    with pytest.raises(DataError, match="2 placeholders for 1 images"):
        processor.encode(text, [media[0].size])


def test_replacements_of_videos_have_their_shape(processor: Any) -> None:
    item, other = video(processor.resize_factor), video(processor.resize_factor, seed=1, frames=4, rows=2)
    assert Blank("b", item.size).fetch().shape == item.pixels.shape
    assert Resized("r", item.size, other).fetch().shape == item.pixels.shape
    assert Resized("r", item.size, image(processor.resize_factor)).fetch().shape == item.pixels.shape
    assert Resized("r", (64, 32), item).fetch().shape == (32, 64, 3)
    large = sheet(np.zeros((3, 512, 1024, 3), np.uint8))
    assert large.shape == (128, 4 * 256, 3)
    assert sheet(item.pixels).shape == (3 * item.pixels.shape[1], 4 * item.pixels.shape[2], 3)
