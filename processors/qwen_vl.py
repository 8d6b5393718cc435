"""Processor of Qwen2-VL, 2.5-VL, 3-VL and Qwen3.5: an image is a run of `<|image_pad|>`, one per merged patch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vlmrl.data.chat_template import Message
from vlmrl.data.media import Blank
from vlmrl.errors import ConfigError, DataError
from vlmrl.processors.text import TextProcessor, any_of, end_tokens, refuse_image_parts
from vlmrl.types import Ints, Media, Sample

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, ProcessorMixin

    from vlmrl.plugins import ParameterGroup

MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")

PLACEHOLDER = "<image>"
"""Placeholder of an image in a dataset's text."""

_START, _IMAGE, _VIDEO, _END = "<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>"
_VISION_TOKENS = (_START, _END, "<|vision_pad|>", _IMAGE, _VIDEO)


class QwenVlProcessor(TextProcessor):
    """See `vlmrl.plugins.Processor`."""

    def __init__(
        self, processor: ProcessorMixin, *, eos_token_ids: tuple[int, ...], min_pixels: int, max_pixels: int
    ) -> None:
        super().__init__(processor.tokenizer, eos_token_ids=eos_token_ids)
        self._processor: Any = processor
        images = self._processor.image_processor
        # The same bounds for trainer, engine and the saved model.
        bounds = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
        images.size = dict(bounds)
        self.engine_kwargs = {"images_kwargs": {"size": bounds}}
        self.min_pixels, self.max_pixels = min_pixels, max_pixels
        self.patch_size = int(images.patch_size)
        self.resize_factor: int = self.patch_size * int(images.merge_size)
        self.resize_settings = f"bicubic:{self.resize_factor}:{min_pixels}:{max_pixels}"
        self._check_bounds()

        vocabulary = self.tokenizer.get_vocab()
        missing = [token for token in (_START, _IMAGE, _END) if token not in vocabulary]
        if missing:
            raise ConfigError(
                f"the tokenizer lacks the vision tokens {' '.join(missing)}: it is not this model's tokenizer"
            )
        self.banned_tokens = tuple(vocabulary[token] for token in _VISION_TOKENS if token in vocabulary)
        self._image_token = vocabulary[_IMAGE]
        self._video_token = vocabulary.get(_VIDEO, -1)
        self._vision = any_of({token for token in _VISION_TOKENS if token in vocabulary})

    def encode(self, text: str, sizes: Sequence[tuple[int, int]]) -> tuple[Ints, Ints]:
        request = self.token_ids(text)
        is_image = request == self._image_token
        if is_image.sum() != len(sizes):
            raise DataError(f"the rendered prompt has {is_image.sum()} placeholders for {len(sizes)} images")
        repeats = np.ones(len(request), dtype=np.int64)
        repeats[is_image] = [self.num_tokens(size) for size in sizes]
        return np.repeat(request, repeats), request

    def pixel_inputs(self, media: Sequence[Media]) -> dict[str, Tensor]:
        if not media:
            return {}
        import torch

        # The pixels already have their final size.
        images = [torch.from_numpy(np.array(item.fetch())).permute(2, 0, 1) for item in media]
        inputs = self._processor.image_processor(
            images=images,
            do_resize=False,
            do_convert_rgb=False,
            input_data_format="channels_first",
            return_tensors="pt",
        )
        return {"pixel_values": inputs["pixel_values"], "image_grid_thw": inputs["image_grid_thw"]}

    def token_types(self, tokens: Ints) -> Ints:
        return np.where(tokens == self._image_token, 1, np.where(tokens == self._video_token, 2, 0))

    def grid(self, size: tuple[int, int]) -> tuple[int, int, int]:
        width, height = size
        return 1, height // self.patch_size, width // self.patch_size

    def num_tokens(self, size: tuple[int, int]) -> int:
        width, height = size
        return (width // self.resize_factor) * (height // self.resize_factor)

    def dummy_sample(self) -> Sample | None:
        side = self.resize_factor
        media = Blank(f"blank:{side}x{side}", (side, side))
        tokens, _ = self.encode(self.image_text(), [media.size])
        return Sample(tokens=tokens, sampled=np.zeros(len(tokens), dtype=np.bool_), media=(media,))

    def parameter_group(self, name: str) -> ParameterGroup:
        if "visual." not in name:
            return "language"
        return "projector" if "merger" in name.partition("visual.")[2] else "vision"

    def save(self, folder: Path) -> None:
        self._processor.save_pretrained(folder)

    def place_images(self, messages: list[Message], num_images: int, *, reads_images: bool) -> list[Message]:
        if not num_images:
            refuse_image_parts(messages)
            if reads_images and any(PLACEHOLDER in part["text"] for m in messages for part in m["content"]):
                # The model would be trained to respond without seeing the image.
                raise DataError(
                    f"the question has the placeholder {PLACEHOLDER}, but the row has no image: set data.image_key to "
                    "the column that holds the images, or to none if this is plain text"
                )
            return messages
        split = [message | {"content": _split(message["content"])} for message in messages]
        num_placeholders = sum(part["type"] == "image" for message in split for part in message["content"])
        if num_placeholders not in (0, num_images):
            raise DataError(f"the row has {num_images} images, but its question has {num_placeholders} placeholders")
        if num_placeholders == 0:
            first = next((m for m in split if m["role"] == "user"), split[0])
            first["content"] = [{"type": "image"}] * num_images + first["content"]
        return split

    def image_text(self) -> str:
        return f"{_START}{_IMAGE}{_END}"

    def _check_bounds(self) -> None:
        area = self.resize_factor**2
        if -(-self.min_pixels // area) > self.max_pixels // area:
            raise ConfigError(
                f"data.min_pixels {self.min_pixels} and data.max_pixels {self.max_pixels}: no image of whole "
                f"{self.resize_factor}x{self.resize_factor} patches ({area} pixels) lies between them"
            )


def load(
    path: str, *, config: PretrainedConfig, min_pixels: int, max_pixels: int, trust_remote_code: bool
) -> QwenVlProcessor:
    """Load the processor of a Qwen-VL model."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
    ends = end_tokens(path, config, processor.tokenizer)
    return QwenVlProcessor(processor, eos_token_ids=ends, min_pixels=min_pixels, max_pixels=max_pixels)


def _split(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Split `<image>` in text parts into separate image parts."""
    split: list[dict[str, Any]] = []
    for part in parts:
        if part["type"] != "text":
            split.append(part)
            continue
        for i, text in enumerate(part["text"].split(PLACEHOLDER)):
            split += [{"type": "image"}] * (i > 0) + [{"type": "text", "text": text}] * bool(text)
    return split
