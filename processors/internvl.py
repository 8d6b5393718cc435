"""Processor of InternVL (the `-HF` checkpoints of InternVL3 and 3.5): an image is a grid of square tiles.

Behind several tiles is the whole image, in the size of a tile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vlmrl.errors import ConfigError
from vlmrl.processors.text import end_tokens
from vlmrl.processors.vision import TiledProcessor
from vlmrl.types import Ints
from vlmrl.video_size import Size

if TYPE_CHECKING:
    from transformers import PretrainedConfig, ProcessorMixin

MODEL_TYPES = ("internvl",)

_START, _IMAGE, _END, _VIDEO = "<img>", "<IMG_CONTEXT>", "</img>", "<video>"


class InternVlProcessor(TiledProcessor):
    """See `vlmrl.plugins.Processor`."""

    placeholder = image_token = _IMAGE
    vision_tokens = (_START, _IMAGE, _END, _VIDEO)
    tower, projector = "vision_tower", "multi_modal_projector"

    def __init__(
        self,
        processor: ProcessorMixin,
        *,
        eos_token_ids: tuple[int, ...],
        patch_size: int,
        min_pixels: int,
        max_pixels: int,
    ) -> None:
        images = processor.image_processor
        side = int(images.size["height"])
        length = int(processor.image_seq_length)
        super().__init__(processor, eos_token_ids=eos_token_ids, side=side, patch_size=patch_size, tile_tokens=length)
        least, most = max(int(images.min_patches), -(-min_pixels // side**2)), max_pixels // side**2
        most = min(int(images.max_patches), most)
        if most < least:
            raise ConfigError(
                f"data.min_pixels {min_pixels} and data.max_pixels {max_pixels}: this model reads {images.min_patches} "
                f"to {images.max_patches} tiles of {side}x{side} pixels, and no number of {side**2} pixels lies between"
            )
        images.crop_to_patches, images.min_patches, images.max_patches = True, least, most
        self.engine_kwargs = {"crop_to_patches": True, "min_patches": least, "max_patches": most}
        self.min_pixels, self.max_pixels = min_pixels, max_pixels
        self.resize_settings = f"bicubic:tiles:{side}:{least}:{most}"

    def target_size(self, size: tuple[int, int]) -> tuple[int, int]:
        grid = self._tiles(size)
        while (again := self._tiles(self._canvas(grid))) != grid:
            grid = again
        return self._canvas(grid)

    def num_tiles(self, size: Size) -> int:
        columns, rows = self._tiles((size[0], size[1]))
        return columns * rows + (columns * rows > 1)

    def expansion(self, size: Size) -> Ints:
        start, end = self.tokenizer.convert_tokens_to_ids([_START, _END])
        return np.array([start, *[self._image_id] * self.num_tokens(size), end], dtype=np.int64)

    def _tiles(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the columns and rows that the family's processor chooses."""
        from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

        least, most = self.engine_kwargs["min_patches"], self.engine_kwargs["max_patches"]
        side = self.resize_factor
        columns, rows = get_optimal_tiled_canvas((size[1], size[0]), (side, side), least, most)
        return columns, rows

    def _canvas(self, grid: tuple[int, int]) -> tuple[int, int]:
        return grid[0] * self.resize_factor, grid[1] * self.resize_factor


def load(
    path: str, *, config: PretrainedConfig, min_pixels: int, max_pixels: int, trust_remote_code: bool
) -> InternVlProcessor:
    """Load the processor of an InternVL model."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
    return InternVlProcessor(
        processor,
        eos_token_ids=end_tokens(path, config, processor.tokenizer),
        patch_size=int(config.vision_config.patch_size[0]),
        min_pixels=min_pixels,
        max_pixels=max_pixels,
    )
