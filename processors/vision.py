"""Base of the processors of families with images: an image is a placeholder in the text, which image tokens replace."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL.Image import Resampling

from vlmrl.data.chat_template import Message
from vlmrl.data.media import Blank, target_size
from vlmrl.errors import ConfigError, DataError
from vlmrl.processors.text import TextProcessor, any_of, refuse_image_parts
from vlmrl.types import Ints, Media, Sample
from vlmrl.video_size import IMAGE as MARK
from vlmrl.video_size import Size

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import ProcessorMixin

    from vlmrl.plugins import ParameterGroup

MODEL_TYPES: tuple[str, ...] = ()


class VisionProcessor(TextProcessor):
    """See `vlmrl.plugins.Processor`."""

    resize_factor: int
    resample: Resampling = Resampling.BICUBIC
    _processor: Any

    def target_size(self, size: tuple[int, int]) -> tuple[int, int]:
        bounds = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        return target_size(size, factor=self.resize_factor, **bounds)

    def dummy_sample(self) -> Sample | None:
        width, height = self._smallest_size()
        media = Blank(f"blank:{width}x{height}", (width, height))
        tokens, _ = self.encode(self.image_text(), [media.size])
        return Sample(tokens=tokens, sampled=np.zeros(len(tokens), dtype=np.bool_), media=(media,))

    def _smallest_size(self) -> tuple[int, int]:
        """(width, height) of the smallest image that the tower takes."""
        return self.target_size((self.resize_factor, self.resize_factor))

    def collapsed(self, tokens: Ints, last: Ints, sizes: Sequence[Size]) -> Ints:
        kept = np.ones(len(tokens), dtype=np.bool_)
        for size, place in zip(sizes, last.tolist(), strict=True):
            expansion = self.expansion(size)
            num_behind = len(expansion) - 1 - int(np.flatnonzero(self.token_types(expansion))[-1])
            end = place + num_behind + 1
            kept[end - len(expansion) : end] = False
            kept[place] = True
        return tokens[kept]

    def save(self, folder: Path) -> None:
        self._processor.save_pretrained(folder)

    def place_images(self, messages: list[Message], num_images: int, *, reads_images: bool) -> list[Message]:
        if not num_images:
            refuse_image_parts(messages)
            if reads_images and any(MARK in part["text"] for m in messages for part in m["content"]):
                # The model would be trained to respond without seeing the image.
                raise DataError(
                    f"the question has the placeholder {MARK}, but the row has no image: set data.image_key to "
                    "the column that holds the images, or to none if this is plain text"
                )
            return messages
        split = [message | {"content": _split(message["content"])} for message in messages]
        num_placeholders = sum(part["type"] != "text" for message in split for part in message["content"])
        if num_placeholders not in (0, num_images):
            raise DataError(f"the row has {num_images} images, but its question has {num_placeholders} placeholders")
        if num_placeholders == 0:
            first = next((m for m in split if m["role"] == "user"), split[0])
            first["content"] = [{"type": "image"}] * num_images + first["content"]
        return split


class PlaceholderProcessor(VisionProcessor):
    """A family of which one token marks an image in the text, and whose videos are not read."""

    placeholder: str
    """The token that marks an image."""
    image_token: str
    """The token that an image's features replace."""
    vision_tokens: tuple[str, ...]
    """Tokens around images, and those two: none of them may be sampled."""

    def __init__(self, processor: ProcessorMixin, *, eos_token_ids: tuple[int, ...]) -> None:
        super().__init__(processor.tokenizer, eos_token_ids=eos_token_ids)
        self._processor = processor
        vocabulary = self.tokenizer.get_vocab()
        missing = [token for token in self.vision_tokens if token not in vocabulary]
        if missing:
            raise ConfigError(
                f"the tokenizer lacks the vision tokens {' '.join(missing)}: it is not this model's tokenizer"
            )
        self.banned_tokens = tuple(vocabulary[token] for token in self.vision_tokens)
        self._vision = any_of(set(self.vision_tokens))
        self._image_id, self._placeholder_id = vocabulary[self.image_token], vocabulary[self.placeholder]

    @abstractmethod
    def expansion(self, size: Size) -> Ints: ...

    def encode(self, text: str, sizes: Sequence[Size]) -> tuple[Ints, Ints]:
        request = self.token_ids(text)
        places = np.flatnonzero(request == self._placeholder_id)
        if len(places) != len(sizes):
            raise DataError(f"the rendered prompt has {len(places)} placeholders for {len(sizes)} images")
        pieces = np.split(request, np.sort(np.concatenate([places, places + 1])))
        for number, size in enumerate(sizes):
            pieces[2 * number + 1] = self.expansion(size)
        return np.concatenate(pieces), request

    def token_types(self, tokens: Ints) -> Ints:
        return (tokens == self._image_id).astype(np.int64)

    def num_tokens(self, size: Size) -> int:
        return int(self.token_types(self.expansion(size)).sum())

    def image_text(self, kind: str = "image") -> str:
        assert kind == "image", "videos of a model that takes none are refused with their row"
        return self.placeholder

    def _pixels(self, media: Sequence[Media]) -> list[Tensor]:
        """Images as [3, height, width] uint8 tensors, in the size that they were resized to."""
        import torch

        return [torch.from_numpy(np.array(item.fetch())).permute(2, 0, 1) for item in media]


class TiledProcessor(PlaceholderProcessor):
    """A family whose tower takes square tiles: pieces of an image, and the whole image once more, all of one size."""

    tower: str
    """Name of the vision tower in the model."""
    projector: str

    def __init__(
        self, processor: ProcessorMixin, *, eos_token_ids: tuple[int, ...], side: int, patch_size: int, tile_tokens: int
    ) -> None:
        """`side`: pixels of a tile; `tile_tokens`: image tokens of one."""
        super().__init__(processor, eos_token_ids=eos_token_ids)
        self.resize_factor, self.patch_size, self.tile_tokens = side, patch_size, tile_tokens

    @abstractmethod
    def num_tiles(self, size: Size) -> int: ...

    def tile_pixels(self, media: Sequence[Media]) -> Tensor:
        """Return the tiles of these images, at least one, in order: [tiles, 3, side, side]."""
        inputs = self._processor.image_processor(
            images=self._pixels(media), input_data_format="channels_first", return_tensors="pt", **self.engine_kwargs
        )
        pixels: Tensor = inputs["pixel_values"]
        return pixels

    def pixel_inputs(self, media: Sequence[Media]) -> dict[str, Tensor]:
        import torch

        tiles = {"image_tiles": torch.tensor([self.num_tiles(item.size) for item in media], dtype=torch.int64)}
        return tiles | {"pixel_values": self.tile_pixels(media)} if media else tiles

    def num_tokens(self, size: Size) -> int:
        return self.num_tiles(size) * self.tile_tokens

    def grid(self, size: Size) -> tuple[int, int, int]:
        patches = self.resize_factor // self.patch_size
        return self.num_tiles(size), patches, patches

    def parameter_group(self, name: str) -> ParameterGroup:
        parts = name.split(".")
        if self.tower in parts:
            return "vision"
        return "projector" if self.projector in parts else "language"


def check_bounds(factor: int, min_pixels: int, max_pixels: int) -> None:
    """Raise ConfigError when no image of whole patches lies between the bounds."""
    area = factor**2
    if -(-min_pixels // area) > max_pixels // area:
        raise ConfigError(
            f"data.min_pixels {min_pixels} and data.max_pixels {max_pixels}: no image of whole "
            f"{factor}x{factor} patches ({area} pixels) lies between them"
        )


def _split(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Split `<image>` in text parts into separate image parts."""
    split: list[dict[str, Any]] = []
    for part in parts:
        if part["type"] != "text":
            split.append(part)
            continue
        for i, text in enumerate(part["text"].split(MARK)):
            split += [{"type": "image"}] * (i > 0) + [{"type": "text", "text": text}] * bool(text)
    return split
