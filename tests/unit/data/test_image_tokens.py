from pathlib import Path

import numpy as np
import pytest
from chat_templates import text_processor

from vlmrl.data.image_tokens import collapse
from vlmrl.data.media import Blank
from vlmrl.errors import DataError
from vlmrl.models.tiny import build
from vlmrl.plugins import Processor, processor


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    folder: Path = build("qwen2_5_vl", tmp_path_factory.mktemp("models") / "vlm", size="micro")
    return processor(str(folder), min_pixels=784, max_pixels=150_000)


def images(*sizes: tuple[int, int]) -> list[Blank]:
    return [Blank(f"{width}x{height}", (width, height)) for width, height in sizes]


def test_each_image_has_one_placeholder(vlm: Processor) -> None:
    media = images((28, 28), (56, 84), (84, 28))
    text = vlm.image_text()  # type: ignore[attr-defined]
    tokens, request = vlm.encode(f"a{text}b{text}{text}c", [item.size for item in media])
    assert len(tokens) == len(request) + 0 + 5 + 2
    assert collapse(tokens, media, vlm).tolist() == request.tolist()


def test_images_side_by_side_are_told_apart_by_their_sizes(vlm: Processor) -> None:
    tokens, request = vlm.encode("<|image_pad|><|image_pad|>", [(28, 56), (84, 28)])
    assert len(tokens) == 5
    assert collapse(tokens, images((28, 56), (84, 28)), vlm).tolist() == request.tolist()


def test_without_images_nothing_changes(vlm: Processor) -> None:
    tokens = np.array([1, 2, 3])
    assert collapse(tokens, [], vlm).tolist() == [1, 2, 3]
    assert collapse(tokens, [], text_processor("chatml")).tolist() == [1, 2, 3]


def test_other_images_than_those_of_the_tokens_are_an_error(vlm: Processor) -> None:
    text = vlm.image_text()  # type: ignore[attr-defined]
    tokens, _ = vlm.encode(f"{text}a{text}", [(56, 28), (28, 28)])
    with pytest.raises(DataError, match="a sample has 3 image tokens, but its 1 images take 2"):
        collapse(tokens, images((56, 28)), vlm)
    with pytest.raises(DataError, match="the tokens of its image 2 are not side by side"):
        collapse(tokens, images((28, 28), (56, 28)), vlm)
