"""Processor of Gemma 3: every image has the same size and the same number of tokens, which attend to each other.

Newlines around an image join those of the text: `\\n` and `\\n\\n` are the one token `\\n\\n\\n`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from PIL.Image import Resampling

from vlmrl.errors import ConfigError
from vlmrl.processors.text import end_tokens
from vlmrl.processors.vision import TiledProcessor
from vlmrl.types import Ints
from vlmrl.video_size import Size

if TYPE_CHECKING:
    from transformers import PretrainedConfig, ProcessorMixin

MODEL_TYPES = ("gemma3",)

_START, _IMAGE, _END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"


class Gemma3Processor(TiledProcessor):
    """See `vlmrl.plugins.Processor`."""

    placeholder, image_token = _START, _IMAGE
    vision_tokens = (_START, _IMAGE, _END)
    tower, projector = "vision_tower", "multi_modal_projector"
    resample = Resampling.BILINEAR
    attends_both_ways = True

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
        side, length = int(images.size["height"]), int(processor.image_seq_length)
        super().__init__(processor, eos_token_ids=eos_token_ids, side=side, patch_size=patch_size, tile_tokens=length)
        if not min_pixels <= side**2 <= max_pixels:
            raise ConfigError(
                f"data.min_pixels {min_pixels} and data.max_pixels {max_pixels}: this model reads every image at "
                f"{side}x{side} pixels: set data.max_pixels to at least {side**2}, and data.min_pixels to at most that"
            )
        # Pan-and-scan adds cuts of an image, whose text vLLM tokenises by itself.
        self.engine_kwargs = {"do_pan_and_scan": False}
        self.min_pixels, self.max_pixels = min_pixels, max_pixels
        self.resize_settings = f"bilinear:fixed:{side}"
        vocabulary = self.tokenizer.get_vocab()
        one, two, three, four = (vocabulary["\n" * count] for count in range(1, 5))
        self._newline, self._newlines = one, two
        # In this order, as vLLM joins them.
        self._joined = {(one, two): three, (two, one): three, (two, two): four}
        self._rest = {two: [], three: [one], four: [two]}
        start, end = vocabulary[_START], vocabulary[_END]
        self._end_id = end
        self._expansion = np.array([two, start, *[self._image_id] * length, end, two], dtype=np.int64)

    def target_size(self, size: tuple[int, int]) -> tuple[int, int]:
        return self.resize_factor, self.resize_factor

    def num_tiles(self, size: Size) -> int:
        return 1

    def expansion(self, size: Size) -> Ints:
        return self._expansion

    def encode(self, text: str, sizes: Sequence[Size]) -> tuple[Ints, Ints]:
        tokens, request = super().encode(text, sizes)
        if not sizes:
            return tokens, request
        joined = tokens.tolist()
        for (first, second), both in self._joined.items():
            joined = _join(joined, first, second, both)
        return np.array(joined, dtype=np.int64), request

    def collapsed(self, tokens: Ints, last: Ints, sizes: Sequence[Size]) -> Ints:
        ids = tokens.tolist()
        kept: list[int] = []
        for place, token in enumerate(ids):
            is_behind = place > 0 and ids[place - 1] == self._end_id
            is_before = place + 1 < len(ids) and ids[place + 1] == self._placeholder_id
            rest = [token]
            for _ in range(is_behind + is_before):
                rest = [left for token in rest for left in self._rest.get(token, [token])]
            kept += [left for left in rest if left not in (self._image_id, self._end_id)]
        return np.array(kept, dtype=np.int64)


def _join(tokens: list[int], first: int, second: int, both: int) -> list[int]:
    """Replace each `first` with a `second` behind it by `both`, from left to right."""
    joined: list[int] = []
    place = 0
    while place < len(tokens):
        if tokens[place : place + 2] == [first, second]:
            joined.append(both)
            place += 2
        else:
            joined.append(tokens[place])
            place += 1
    return joined


def load(
    path: str, *, config: PretrainedConfig, min_pixels: int, max_pixels: int, trust_remote_code: bool
) -> Gemma3Processor:
    """Load the processor of a Gemma 3 model with images."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
    return Gemma3Processor(
        processor,
        eos_token_ids=end_tokens(path, config, processor.tokenizer),
        patch_size=int(config.vision_config.patch_size),
        min_pixels=min_pixels,
        max_pixels=max_pixels,
    )
