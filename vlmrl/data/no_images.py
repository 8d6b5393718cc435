"""What a processor tells of images, for a model that takes none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from PIL.Image import Resampling

from vlmrl.types import Ints, Media, Sample
from vlmrl.video_size import Size

if TYPE_CHECKING:
    from torch import Tensor


class NoImages:
    """The part of `vlmrl.plugins.Processor` that is about images."""

    banned_tokens: tuple[int, ...] = ()
    resize_factor: int | None = None
    resample = Resampling.BICUBIC
    frame_factor: int | None = None
    attends_both_ways = False
    min_pixels: int = 0
    max_pixels: int = 0
    resize_settings: str = ""

    def target_size(self, size: tuple[int, int]) -> tuple[int, int]:
        raise AssertionError(f"a text model was asked for the target of an image of size {size}")

    def pixel_inputs(self, media: Sequence[Media]) -> dict[str, Tensor]:
        assert not media, "a text model was handed images"
        return {}

    def token_types(self, tokens: Ints) -> Ints:
        return np.zeros_like(tokens)

    def grid(self, size: Size) -> tuple[int, int, int]:
        raise AssertionError(f"a text model was asked for the patches of an image of size {size}")

    def num_tokens(self, size: Size) -> int:
        raise AssertionError(f"a text model was asked for the tokens of an image of size {size}")

    def expansion(self, size: Size) -> Ints:
        raise AssertionError(f"a text model was asked for the tokens of an image of size {size}")

    def video_positions(self, tokens: Ints, sizes: Sequence[Size]) -> Ints:
        raise AssertionError("a text model was asked for positions of a video")

    def dummy_sample(self) -> Sample | None:
        return None

    def collapsed(self, tokens: Ints, last: Ints, sizes: Sequence[Size]) -> Ints:
        assert not sizes, "a text model was handed images"
        return tokens

    def image_text(self, kind: str = "image") -> str:
        """Return the placeholder of an image (or a `video`) when no chat template is applied."""
        raise AssertionError("a text model has no placeholder for images")
