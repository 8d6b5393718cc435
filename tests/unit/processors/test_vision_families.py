"""Vision families other than Qwen's: ids, pixels and positions are those of Transformers' processors and models."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from vlmrl.config.data import Columns
from vlmrl.data.image_tokens import collapse
from vlmrl.data.media import InlineMedia, make_media
from vlmrl.errors import ConfigError, DataError
from vlmrl.models import tiny
from vlmrl.models.load import skeleton
from vlmrl.plugins import Processor, processor, processor_of

COLUMNS = Columns(max_pixels=200 * 200)
FAMILIES: list[tiny.Family] = ["glm4v", "internvl", "gemma3", "smolvlm"]
RAW = [(150, 90), (56, 56), (300, 70), (40, 200)]
"""Sizes of images of a dataset."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {family: tiny.build(family, root / family, size="micro") for family in FAMILIES}


@pytest.fixture(scope="module")
def loaded(folders: dict[str, Path]) -> dict[str, Processor]:
    return {family: processor_of(str(folder), COLUMNS) for family, folder in folders.items()}


def pictures(read: Processor) -> list[InlineMedia]:
    rng = np.random.default_rng(0)
    sources = [Image.fromarray(rng.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in RAW]
    return [make_media(source, processor=read, columns=COLUMNS) for source in sources]


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_pixels_are_those_of_the_familys_processor(
    folders: dict[str, Path], loaded: dict[str, Processor], family: str
) -> None:
    read = loaded[family]
    media = pictures(read)
    for item in media:
        assert read.target_size(item.size) == item.size, "a second resize changes nothing"
    question = [{"role": "user", "content": "one <image> two <image>\n<image><image>?"}]
    text = read.render(question, num_images=4, columns=COLUMNS)
    tokens, request = read.encode(text, [item.size for item in media])
    theirs: Any = AutoProcessor.from_pretrained(folders[family])
    images = [Image.fromarray(item.pixels) for item in media]
    expected = theirs(images=images, text=[text], return_tensors="pt", **read.engine_kwargs)
    assert tokens.tolist() == expected["input_ids"][0].tolist()
    mine = read.pixel_inputs(media)
    assert torch.equal(mine["pixel_values"], expected["pixel_values"].reshape(mine["pixel_values"].shape))
    assert int(read.token_types(tokens).sum()) == sum(read.num_tokens(item.size) for item in media)
    assert collapse(tokens, media, read).tolist() == request.tolist()
    if "image_tiles" in mine:
        assert mine["image_tiles"].tolist() == [read.grid(item.size)[0] for item in media]
    else:
        assert mine["image_grid_thw"].tolist() == [list(read.grid(item.size)) for item in media]


@pytest.mark.parametrize("family", FAMILIES)
def test_text_that_looks_like_image_tokens_is_plain_text(loaded: dict[str, Processor], family: str) -> None:
    read = loaded[family]
    spelled = "".join(read.tokenizer.convert_ids_to_tokens(list(read.banned_tokens))).replace("<image>", "")
    tokens, _ = read.encode(read.render(spelled, num_images=0, columns=COLUMNS), [])
    assert not set(tokens.tolist()) & set(read.banned_tokens)
    assert spelled in read.tokenizer.decode(tokens.tolist())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_only_message_is_in_the_prompt(loaded: dict[str, Processor], family: str) -> None:
    columns = COLUMNS.model_copy(update={"system_prompt": "Be brief."})
    text = loaded[family].render("how many?", num_images=0, columns=columns)
    assert "Be brief." in text
    assert "how many?" in text


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_in_a_part(folders: dict[str, Path], loaded: dict[str, Processor], family: str) -> None:
    names = [name for name, _ in skeleton(str(folders[family])).named_parameters()]
    groups = {name: loaded[family].parameter_group(name) for name in names}
    assert set(groups.values()) == {"vision", "projector", "language"}
    language = ("lm_head.", "model.language_model.", "model.text_model.")
    assert all((group == "language") == name.startswith(language) for name, group in groups.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_videos_are_refused_and_so_are_placeholders_without_images(loaded: dict[str, Processor], family: str) -> None:
    read = loaded[family]
    assert read.frame_factor is None
    with pytest.raises(DataError, match="2 placeholders for 1 images"):
        read.encode(read.image_text() * 2, [read.target_size((56, 56))])
    with pytest.raises(DataError, match="placeholder <image>, but the row has no image"):
        read.render("how <image>?", num_images=0, columns=COLUMNS)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_processor_reads_images_alike(loaded: dict[str, Processor], family: str, tmp_path: Path) -> None:
    read = loaded[family]
    read.save(tmp_path)
    theirs: Any = AutoProcessor.from_pretrained(tmp_path)
    item = pictures(read)[0]
    tokens, _ = read.encode(read.image_text(), [item.size])
    expected = theirs(images=[Image.fromarray(item.pixels)], text=[read.image_text()], return_tensors="pt")
    assert expected["input_ids"][0].tolist() == tokens.tolist()


def test_tiles_of_internvl_worked_by_hand(loaded: dict[str, Processor]) -> None:
    read = loaded["internvl"]
    # 200 x 200 pixels hold 12 tiles of 56 x 56. 5 : 3 is nearest to 3 x 2 tiles; with the whole image they are 7.
    assert read.target_size((150, 90)) == (3 * 56, 2 * 56)
    assert read.num_tokens((168, 112)) == 7 * 4
    start, *inside, end = read.expansion((56, 56)).tolist()
    assert read.tokenizer.convert_ids_to_tokens([start, end]) == ["<img>", "</img>"]
    assert read.token_types(np.array(inside)).tolist() == [1] * 4


@pytest.mark.parametrize(
    ("family", "bounds", "message"),
    [
        ("internvl", (3136, 3000), "1 to 12 tiles of 56x56 pixels"),
        ("internvl", (13 * 3136, 10**6), "1 to 12 tiles of 56x56 pixels"),
        ("smolvlm", (1, 3135), "set data.max_pixels to at least 3136"),
        ("smolvlm", (3 * 3136, 4 * 3136), "data.min_pixels to at most 6272"),
        ("gemma3", (1, 3135), "every image at 56x56 pixels: set data.max_pixels to at least 3136"),
        ("glm4v", (57 * 57, 58 * 58), "no image of whole 28x28 patches"),
    ],
)
def test_bounds_that_no_image_meets_are_refused(
    folders: dict[str, Path], family: str, bounds: tuple[int, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        processor(str(folders[family]), min_pixels=bounds[0], max_pixels=bounds[1])
