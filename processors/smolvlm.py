"""Processor of SmolVLM2: rows and columns of square tiles, each behind a token with its place, then the whole image.

The longest side of every image is a whole number of tiles, as many as `data.max_pixels` allows in a square.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from PIL.Image import Resampling

from vlmrl.errors import ConfigError
from vlmrl.processors.text import end_tokens
from vlmrl.processors.vision import TiledProcessor
from vlmrl.types import Ints, Media
from vlmrl.video_size import Size

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, ProcessorMixin

MODEL_TYPES = ("smolvlm",)

_AROUND, _IMAGE, _WHOLE = "<fake_token_around_image>", "<image>", "<global-img>"
_PLACE = re.compile(r"<row_\d+_col_\d+>")


class SmolVlmProcessor(TiledProcessor):
    """See `vlmrl.plugins.Processor`."""

    placeholder = image_token = _IMAGE
    vision_tokens = (_AROUND, _IMAGE, _WHOLE)
    tower, projector = "vision_model", "connector"
    resample = Resampling.LANCZOS

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
        tile = int(images.max_image_size["longest_edge"])
        places = filter(_PLACE.fullmatch, processor.tokenizer.get_vocab())
        self.vision_tokens = (*self.vision_tokens, *sorted(places))
        length = int(processor.image_seq_len)
        super().__init__(processor, eos_token_ids=eos_token_ids, side=tile, patch_size=patch_size, tile_tokens=length)
        tiles = min(math.isqrt(max_pixels) // tile, int(images.size["longest_edge"]) // tile)
        if tiles < 1 or min_pixels > tiles * tile**2:
            raise ConfigError(
                f"data.min_pixels {min_pixels} and data.max_pixels {max_pixels}: the longest side of an image of this "
                f"model is a multiple of {tile} pixels: set data.max_pixels to at least {tile**2}, and data.min_pixels "
                f"to at most {max(tiles, 1) * tile**2}"
            )
        self._most_tiles = tiles
        images.do_image_splitting, images.size = True, {"longest_edge": tiles * tile}
        self.engine_kwargs = {"do_image_splitting": True, "size": {"longest_edge": tiles * tile}}
        self.min_pixels, self.max_pixels = min_pixels, max_pixels
        self.resize_settings = f"lanczos:tiles:{tile}:{tiles}"
        self._expansions: dict[tuple[int, int], Ints] = {}

    def target_size(self, size: tuple[int, int]) -> tuple[int, int]:
        rows, columns = self._tiles(size)
        return max(columns, 1) * self.resize_factor, max(rows, 1) * self.resize_factor

    def num_tiles(self, size: Size) -> int:
        rows, columns = self._tiles((size[0], size[1]))
        return rows * columns + 1

    def expansion(self, size: Size) -> Ints:
        from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

        tiles = self._tiles((size[0], size[1]))
        if tiles not in self._expansions:
            text = get_image_prompt_string(*tiles, self.tile_tokens, _AROUND, _IMAGE, _WHOLE)
            self._expansions[tiles] = self.token_ids(text)
        return self._expansions[tiles]

    def tile_pixels(self, media: Sequence[Media]) -> Tensor:
        # Of one prompt, as the model takes them.
        pixels = super().tile_pixels(media)
        assert len(pixels) == 1
        return pixels

    def _tiles(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and columns of tiles; (0, 0) for an image that is a single tile."""
        _, rows, columns = self._processor.image_processor.get_number_of_image_patches(
            size[1], size[0], dict(self.engine_kwargs)
        )
        return rows, columns

    def _marked_content(self, content: str | Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
        marked = super()._marked_content(content)
        # The family's chat template drops contents that are not lists of parts.
        return [{"type": "text", "text": marked}] if isinstance(marked, str) else marked


def load(
    path: str, *, config: PretrainedConfig, min_pixels: int, max_pixels: int, trust_remote_code: bool
) -> SmolVlmProcessor:
    """Load the processor of a SmolVLM2 model."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
    return SmolVlmProcessor(
        processor,
        eos_token_ids=end_tokens(path, config, processor.tokenizer),
        patch_size=int(config.vision_config.patch_size),
        min_pixels=min_pixels,
        max_pixels=max_pixels,
    )
