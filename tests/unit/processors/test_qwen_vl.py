import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from vlmrl.config.data import Columns
from vlmrl.data.media import InlineMedia, make_media
from vlmrl.errors import ConfigError, DataError
from vlmrl.models.tiny import build
from vlmrl.plugins import Processor, processor

VISION = "<|vision_start|><|image_pad|><|vision_end|>"
MIN_PIXELS, MAX_PIXELS = 28 * 28, 150_000
FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: build(family, root / family, size="micro") for family in FAMILIES}  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=FAMILIES)
def vlm(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Processor:
    return processor(str(folders[request.param]), min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS)


@pytest.fixture(scope="module")
def qwen(folders: dict[str, Path]) -> Processor:
    return processor(str(folders["qwen2_5_vl"]), min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS)


def noise(processor: Processor, width: int, height: int, seed: int = 0) -> InlineMedia:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return make_media(Image.fromarray(pixels), processor=processor, columns=Columns())


def user_text(rendered: str) -> str:
    return rendered.removeprefix("<|im_start|>user\n").removesuffix("<|im_end|>\n<|im_start|>assistant\n")


def test_the_resize_factor_comes_from_the_model(folders: dict[str, Path]) -> None:
    loaded = {
        family: processor(str(folders[family]), min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS) for family in FAMILIES
    }
    assert {family: one.resize_factor for family, one in loaded.items()} == {
        "qwen2_vl": 28,
        "qwen2_5_vl": 28,
        "qwen3_vl": 32,
        "qwen3_5": 32,
    }


@pytest.mark.parametrize(
    ("question", "num_images", "expected"),
    [
        ("Two?", 2, VISION + VISION + "Two?"),
        ("A <image>, B <image>.", 2, f"A {VISION}, B {VISION}."),
        ("<image>\nOne?", 1, f"{VISION}\nOne?"),
        ("No image.", 0, "No image."),
    ],
)
def test_image_positions_in_text(qwen: Processor, question: str, num_images: int, expected: str) -> None:
    rendered = qwen.render(question, num_images=num_images, columns=Columns())
    assert user_text(rendered) == expected


def test_a_placeholder_without_an_image_is_an_error_unless_the_run_reads_no_images(qwen: Processor) -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "See <image>"}]}]
    for question in ("What is <image>?", chat):
        with pytest.raises(DataError, match=r"has the placeholder <image>, .* set data\.image_key to the column"):
            qwen.render(question, num_images=0, columns=Columns())
        assert "<image>" in qwen.render(question, num_images=0, columns=Columns(image_key=None))


def test_image_positions_in_messages(qwen: Processor) -> None:
    parts = [
        {"type": "text", "text": "See "},
        {"type": "image", "image": None},
        {"type": "text", "text": "and <image>"},
    ]
    messages = [{"role": "user", "content": parts}]
    assert user_text(qwen.render(messages, num_images=2, columns=Columns())) == f"See {VISION}and {VISION}"
    earlier = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}, {"role": "user", "content": "R"}]
    rendered = qwen.render(earlier, num_images=1, columns=Columns())
    assert f"user\n{VISION}Q<|im_end|>" in rendered
    assert rendered.count(VISION) == 1


def test_images_without_a_chat_template(qwen: Processor) -> None:
    columns = Columns(apply_chat_template=False, input_template="Q: {} A:")
    assert qwen.render("is <image> red?", num_images=1, columns=columns) == f"Q: is {VISION} red? A:"


@pytest.mark.parametrize(("question", "num_images"), [("<image>", 2), ("<image><image>", 1)])
def test_more_or_fewer_images_than_placeholders(qwen: Processor, question: str, num_images: int) -> None:
    with pytest.raises(DataError, match=f"has {num_images} images, but its question has {3 - num_images} placeholders"):
        qwen.render(question, num_images=num_images, columns=Columns())


def test_a_template_that_drops_images_is_an_error(qwen: Processor) -> None:
    with pytest.raises(DataError, match="0 placeholders for 1 images"):
        qwen.encode("no image here", [(28, 28)])


@pytest.mark.parametrize("plain", [False, True])
def test_text_that_looks_like_vision_tokens_is_never_an_image(vlm: Processor, plain: bool) -> None:
    question = "<|vision_start|><|image_pad|><|vision_end|> <|video_pad|><|vision_pad|>"
    columns = Columns(apply_chat_template=not plain)
    for num_images in (0, 1):
        rendered = vlm.render(question, num_images=num_images, columns=columns)
        sizes = [(2 * (vlm.resize_factor or 0), vlm.resize_factor or 0)] * num_images
        tokens, request = vlm.encode(rendered, sizes)
        assert int((vlm.token_types(tokens) == 1).sum()) == 2 * num_images
        assert int((vlm.token_types(request) == 1).sum()) == num_images
        assert not (vlm.token_types(tokens) == 2).any()
        assert question in vlm.decode(tokens)


def test_tokens_and_pixels_equal_those_of_the_models_processor(vlm: Processor) -> None:
    media = [noise(vlm, 100, 70), noise(vlm, 40, 300, seed=1)]
    rendered = vlm.render("A <image> B <image>?", num_images=2, columns=Columns())
    tokens, request = vlm.encode(rendered, [item.size for item in media])
    ours = vlm.pixel_inputs(media)

    reference_processor: Any = vlm._processor  # type: ignore[attr-defined]
    images = [Image.fromarray(item.fetch()) for item in media]
    reference = reference_processor(text=[rendered], images=images, return_tensors="pt")
    assert tokens.tolist() == reference["input_ids"][0].tolist()
    assert vlm.token_types(tokens).tolist() == reference["mm_token_type_ids"][0].tolist()
    assert torch.equal(ours["pixel_values"], reference["pixel_values"])
    assert torch.equal(ours["image_grid_thw"], reference["image_grid_thw"])
    assert [list(vlm.grid(item.size)) for item in media] == reference["image_grid_thw"].tolist()
    assert ours["pixel_values"].shape[0] == sum(math.prod(vlm.grid(item.size)) for item in media)
    assert len(request) == len(vlm.tokenizer(rendered).input_ids)


def test_a_second_resize_by_the_engine_changes_nothing(vlm: Processor) -> None:
    size = vlm.engine_kwargs["images_kwargs"]["size"]
    assert size == {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}
    images: Any = vlm._processor.image_processor  # type: ignore[attr-defined]
    for width, height in [(1, 1), (900, 5), (1000, 1000), (333, 77)]:
        media = noise(vlm, width, height)
        resized = images(images=[Image.fromarray(media.fetch())], size=size, return_tensors="pt")
        assert torch.equal(resized["pixel_values"], vlm.pixel_inputs([media])["pixel_values"])


def test_the_dummy_sample_has_the_smallest_image_and_no_sampled_token(vlm: Processor) -> None:
    sample = vlm.dummy_sample()
    assert sample is not None
    assert vlm.token_types(sample.tokens).tolist() == [0, 1, 0]
    assert not sample.sampled.any()
    inputs = vlm.pixel_inputs(sample.media)
    assert inputs["image_grid_thw"].tolist() == [[1, 2, 2]]
    assert inputs["pixel_values"].shape[0] == math.prod(vlm.grid(sample.media[0].size)) == 4


def test_vision_tokens_are_banned_and_end_tokens_are_not(vlm: Processor) -> None:
    names = {vlm.tokenizer.convert_ids_to_tokens(token) for token in vlm.banned_tokens}
    assert names == {f"<|{n}|>" for n in ("vision_start", "vision_end", "vision_pad", "image_pad", "video_pad")}
    assert not set(vlm.banned_tokens) & set(vlm.eos_token_ids)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("model.visual.blocks.0.attn.qkv.weight", "vision"),
        ("model.visual.patch_embed.proj.weight", "vision"),
        ("model.visual.merger.mlp.0.weight", "projector"),
        ("model.visual.deepstack_merger_list.0.linear_fc1.weight", "projector"),
        ("model.language_model.layers.0.mlp.up_proj.weight", "language"),
        ("lm_head.weight", "language"),
    ],
)
def test_parameters_belong_to_vision_projector_or_language(qwen: Processor, name: str, group: str) -> None:
    assert qwen.parameter_group(name) == group


def test_each_parameter_of_a_real_model_has_the_group_of_its_module(folders: dict[str, Path]) -> None:
    from transformers import AutoModelForImageTextToText

    one = processor(str(folders["qwen3_vl"]), min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS)
    model = AutoModelForImageTextToText.from_pretrained(folders["qwen3_vl"])
    groups = {name: one.parameter_group(name) for name, _ in model.named_parameters()}
    vision = {name for name in groups if name.startswith("model.visual.")}
    assert {name for name, group in groups.items() if group != "language"} == vision
    assert {name for name in vision if groups[name] == "projector"} == {name for name in vision if "merger" in name}


def test_bounds_that_no_image_satisfies_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="no image of whole 28x28 patches"):
        processor(str(folders["qwen2_5_vl"]), min_pixels=800, max_pixels=1000)
    with pytest.raises(ConfigError, match="32x32"):
        processor(str(folders["qwen3_vl"]), min_pixels=100, max_pixels=1000)


def test_a_saved_processor_loads_with_the_bounds_of_the_run(vlm: Processor, tmp_path: Path) -> None:
    vlm.save(tmp_path)
    again = AutoProcessor.from_pretrained(tmp_path)
    assert dict(again.image_processor.size) == {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}
    media = noise(vlm, 200, 90)
    image = Image.fromarray(media.fetch())
    inputs = again(text=[VISION], images=[image], return_tensors="pt")
    assert torch.equal(inputs["pixel_values"], vlm.pixel_inputs([media])["pixel_values"])
    assert again.tokenizer.chat_template == vlm.tokenizer.chat_template
