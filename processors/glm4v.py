"""Processor of GLM-4.1V: an image is a run of `<|image|>`, one per merged patch, as in Qwen-VL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vlmrl.processors.text import end_tokens
from vlmrl.processors.vision import PlaceholderProcessor, check_bounds
from vlmrl.types import Ints, Media
from vlmrl.video_size import Size

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, ProcessorMixin

    from vlmrl.plugins import ParameterGroup

MODEL_TYPES = ("glm4v",)

_START, _IMAGE, _END = "<|begin_of_image|>", "<|image|>", "<|end_of_image|>"


class Glm4vProcessor(PlaceholderProcessor):
    """See `vlmrl.plugins.Processor`."""

    placeholder = image_token = _IMAGE
    vision_tokens = (_START, _IMAGE, _END, "<|begin_of_video|>", "<|video|>", "<|end_of_video|>")

    def __init__(
        self, processor: ProcessorMixin, *, eos_token_ids: tuple[int, ...], min_pixels: int, max_pixels: int
    ) -> None:
        super().__init__(processor, eos_token_ids=eos_token_ids)
        images = self._processor.image_processor
        # The model's bounds count the pixels of the two equal frames that an image is.
        frames = int(images.temporal_patch_size)
        bounds = {"shortest_edge": frames * min_pixels, "longest_edge": frames * max_pixels}
        images.size = dict(bounds)
        self.engine_kwargs = {"images_kwargs": {"size": bounds}}
        self.min_pixels, self.max_pixels = min_pixels, max_pixels
        self.patch_size = int(images.patch_size)
        self.resize_factor = self.patch_size * int(images.merge_size)
        self.resize_settings = f"bicubic:{self.resize_factor}:{min_pixels}:{max_pixels}"
        check_bounds(self.resize_factor, min_pixels, max_pixels)

    def expansion(self, size: Size) -> Ints:
        return np.full(self.num_tokens(size), self._image_id, dtype=np.int64)

    def num_tokens(self, size: Size) -> int:
        return (size[0] // self.resize_factor) * (size[1] // self.resize_factor)

    def grid(self, size: Size) -> tuple[int, int, int]:
        return 1, size[1] // self.patch_size, size[0] // self.patch_size

    def pixel_inputs(self, media: Sequence[Media]) -> dict[str, Tensor]:
        if not media:
            return {}
        inputs = self._processor.image_processor(
            images=self._pixels(media),
            do_resize=False,
            do_convert_rgb=False,
            input_data_format="channels_first",
            return_tensors="pt",
        )
        return {"pixel_values": inputs["pixel_values"], "image_grid_thw": inputs["image_grid_thw"]}

    def image_text(self, kind: str = "image") -> str:
        return f"{_START}{super().image_text(kind)}{_END}"

    def parameter_group(self, name: str) -> ParameterGroup:
        if "visual." not in name:
            return "language"
        layer = name.partition("visual.")[2]
        return "projector" if layer.startswith(("merger", "downsample")) else "vision"


def load(
    path: str, *, config: PretrainedConfig, min_pixels: int, max_pixels: int, trust_remote_code: bool
) -> Glm4vProcessor:
    """Load the processor of a GLM-4.1V model."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
    ends = end_tokens(path, config, processor.tokenizer)
    return Glm4vProcessor(processor, eos_token_ids=ends, min_pixels=min_pixels, max_pixels=max_pixels)
