"""Processors of tiny models, one with vision and one for text."""

import pytest

from vlmrl.models.tiny import build
from vlmrl.plugins import Processor, processor


@pytest.fixture(scope="session")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    folder = build("qwen2_5_vl", tmp_path_factory.mktemp("models") / "vlm", size="micro")
    return processor(str(folder), min_pixels=28 * 28, max_pixels=112 * 112)


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    folder = build("qwen3", tmp_path_factory.mktemp("models") / "text", size="micro")
    return processor(str(folder), min_pixels=28 * 28, max_pixels=112 * 112)
