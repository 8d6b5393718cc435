"""Processor of Qwen2-VL, 2.5-VL, 3-VL (also with experts) and Qwen3.5.

An image is a run of `<|image_pad|>`, one per merged patch. A video is a run of `<|video_pad|>` (Qwen2-VL, Qwen2.5-VL),
or one run with its time for each two frames (Qwen3-VL, Qwen3.5).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from vlmrl.errors import ConfigError, DataError
from vlmrl.processors.text import any_of, end_tokens
from vlmrl.processors.vision import VisionProcessor, check_bounds
from vlmrl.types import Ints, Media
from vlmrl.video_size import Size, VideoSize

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, ProcessorMixin

    from vlmrl.plugins import ParameterGroup

MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")

_START, _IMAGE, _VIDEO, _END = "<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>"
_VISION_TOKENS = (_START, _END, "<|vision_pad|>", _IMAGE, _VIDEO)


class QwenVlProcessor(VisionProcessor):
    """See `vlmrl.plugins.Processor`."""

    def __init__(
        self,
        processor: ProcessorMixin,
        *,
        eos_token_ids: tuple[int, ...],
        min_pixels: int,
        max_pixels: int,
        steps_per_s: float = 0.0,
    ) -> None:
        """`steps_per_s`: positions per second of a video (Qwen2.5-VL); 0: each pair of frames takes one position."""
        super().__init__(processor.tokenizer, eos_token_ids=eos_token_ids)
        self._processor: Any = processor
        images = self._processor.image_processor
        # The same bounds for trainer, engine and the saved model.
        bounds = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
        images.size = dict(bounds)
        # Frames come in their final size and number.
        self.engine_kwargs = {
            "images_kwargs": {"size": bounds},
            "videos_kwargs": {"do_resize": False, "do_sample_frames": False, "cap_pixels_per_frame": False},
        }
        self._steps_per_s = steps_per_s
        self._times: dict[str, Ints] = {}
        self._frames_per_patch = int(self._processor.video_processor.temporal_patch_size)
        self.frame_factor = self._frames_per_patch
        # Only Qwen3-VL's prompts show the time of each pair of frames.
        self._shows_times = hasattr(self._processor, "_calculate_timestamps")
        self.min_pixels, self.max_pixels = min_pixels, max_pixels
        self.patch_size = int(images.patch_size)
        self.resize_factor: int = self.patch_size * int(images.merge_size)
        self.resize_settings = f"bicubic:{self.resize_factor}:{min_pixels}:{max_pixels}"
        check_bounds(self.resize_factor, min_pixels, max_pixels)

        vocabulary = self.tokenizer.get_vocab()
        missing = [token for token in (_START, _IMAGE, _END) if token not in vocabulary]
        if missing:
            raise ConfigError(
                f"the tokenizer lacks the vision tokens {' '.join(missing)}: it is not this model's tokenizer"
            )
        self.banned_tokens = tuple(vocabulary[token] for token in _VISION_TOKENS if token in vocabulary)
        self._vocabulary = vocabulary
        self._image_token = vocabulary[_IMAGE]
        self._video_token = vocabulary.get(_VIDEO, -1)
        self._vision = any_of({token for token in _VISION_TOKENS if token in vocabulary})

    def encode(self, text: str, sizes: Sequence[Size]) -> tuple[Ints, Ints]:
        request = self.token_ids(text)
        places = np.flatnonzero(self.token_types(request))
        if len(places) != len(sizes):
            raise DataError(f"the rendered prompt has {len(places)} placeholders for {len(sizes)} images")
        pieces = np.split(request, np.sort(np.concatenate([places, places + 1])))
        for number, size in enumerate(sizes):
            expansion = self.expansion(size)
            if expansion[-1 - self._shows_end(size)] != request[places[number]]:
                raise DataError("images and videos of the prompt are in another order than their placeholders")
            pieces[2 * number + 1] = expansion
        return np.concatenate(pieces), request

    def _shows_end(self, size: Size) -> bool:
        """Whether the tokens of an image or video end with text behind its last image or video token."""
        return isinstance(size, VideoSize) and self._shows_times

    def expansion(self, size: Size) -> Ints:
        num_tokens = self.num_tokens(size)
        if not isinstance(size, VideoSize):
            return np.full(num_tokens, self._image_token, dtype=np.int64)
        if not self._shows_times:
            return np.full(num_tokens, self._video_token, dtype=np.int64)
        times = [number / size.fps for number in size.indices]
        pairs = zip(times[::2], times[1::2], strict=True)
        frame = np.full(num_tokens // self.grid(size)[0], self._video_token, dtype=np.int64)
        start, end = ([self._vocabulary[token]] for token in (_START, _END))
        pieces = [np.concatenate([self._time(first, second), start, frame, end]) for first, second in pairs]
        return np.concatenate(pieces)

    def _time(self, first: float, second: float) -> Ints:
        """Tokens of the time of two frames, given in seconds. They are kept: a video's tokens are needed many times."""
        text = f"<{(first + second) / 2:.1f} seconds>"
        if text not in self._times:
            self._times[text] = self.token_ids(text)
        return self._times[text]

    def pixel_inputs(self, media: Sequence[Media]) -> dict[str, Tensor]:
        """The tower takes patches of images and videos alike, so both are in `pixel_values`."""
        if not media:
            return {}
        import torch

        if not any(isinstance(item.size, VideoSize) for item in media):
            return self._image_patches(media)
        of_items = [
            self._video_patches(item) if isinstance(item.size, VideoSize) else self._image_patches([item])
            for item in media
        ]
        return {name: torch.cat([patches[name] for patches in of_items]) for name in of_items[0]}

    def _image_patches(self, media: Sequence[Media]) -> dict[str, Tensor]:
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

    def _video_patches(self, video: Media) -> dict[str, Tensor]:
        import torch

        inputs = self._processor.video_processor(
            videos=[torch.from_numpy(np.array(video.fetch())).permute(0, 3, 1, 2)],
            do_resize=False,
            do_convert_rgb=False,
            do_sample_frames=False,
            cap_pixels_per_frame=False,  # without effect here; without it Transformers warns
            input_data_format="channels_first",
            return_tensors="pt",
        )
        return {"pixel_values": inputs["pixel_values_videos"], "image_grid_thw": inputs["video_grid_thw"]}

    def token_types(self, tokens: Ints) -> Ints:
        return np.where(tokens == self._image_token, 1, np.where(tokens == self._video_token, 2, 0))

    def grid(self, size: Size) -> tuple[int, int, int]:
        width, height = size[:2]
        num_frames = size.num_frames if isinstance(size, VideoSize) else self._frames_per_patch
        return num_frames // self._frames_per_patch, height // self.patch_size, width // self.patch_size

    def num_tokens(self, size: Size) -> int:
        frames, rows, columns = self._merged_grid(size)
        return frames * rows * columns

    def _merged_grid(self, size: Size) -> tuple[int, int, int]:
        """Tokens in time, height and width."""
        frames, _, _ = self.grid(size)
        return frames, size[1] // self.resize_factor, size[0] // self.resize_factor

    def video_positions(self, tokens: Ints, sizes: Sequence[Size]) -> Ints:
        """Text continues from the largest position before it, as in vLLM and in Qwen's own code.

        Transformers 5.19 continues after a video of Qwen2.5-VL from the larger of its height and width, which ignores
        how long it is.
        """
        positions = np.empty((3, len(tokens)), dtype=np.int64)
        runs = self._runs(sizes)
        starts = np.flatnonzero(np.diff(self.token_types(tokens), prepend=0))
        bounds = [0, *starts.tolist(), len(tokens)]
        following = 0
        for first, last in pairwise(bounds):
            if first == last:
                continue
            if not self.token_types(tokens[first : first + 1])[0]:
                run = np.broadcast_to(np.arange(last - first), (3, last - first))
            else:
                run = next(runs)
            positions[:, first:last] = following + run
            following += int(run.max()) + 1
        return positions

    def _runs(self, sizes: Sequence[Size]) -> Iterator[Ints]:
        """Yield the positions in time, height and width, [3, tokens], of each run of image or video tokens."""
        for size in sizes:
            frames, rows, columns = self._merged_grid(size)
            steps = 1 if isinstance(size, VideoSize) and self._shows_times else frames
            grid = np.indices((steps, rows, columns)).reshape(3, -1)
            if isinstance(size, VideoSize) and self._steps_per_s:
                # In single precision, as the processor's tensor holds the seconds of a pair of frames.
                seconds = float(np.float32(self._frames_per_patch / size.sampled_fps))
                grid[0] = (grid[0] * (seconds * self._steps_per_s)).astype(np.int64)
            yield from [grid] * (frames // steps)

    def _smallest_size(self) -> tuple[int, int]:
        return self.resize_factor, self.resize_factor  # also below `data.min_pixels`

    def parameter_group(self, name: str) -> ParameterGroup:
        if "visual." not in name:
            return "language"
        return "projector" if "merger" in name.partition("visual.")[2] else "vision"

    def image_text(self, kind: str = "image") -> str:
        return f"{_START}{_VIDEO if kind == 'video' else _IMAGE}{_END}"


def load(
    path: str, *, config: PretrainedConfig, min_pixels: int, max_pixels: int, trust_remote_code: bool
) -> QwenVlProcessor:
    """Load the processor of a Qwen-VL model."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
    ends = end_tokens(path, config, processor.tokenizer)
    steps = getattr(getattr(config, "vision_config", None), "tokens_per_second", 0.0)
    return QwenVlProcessor(
        processor, eos_token_ids=ends, min_pixels=min_pixels, max_pixels=max_pixels, steps_per_s=float(steps or 0.0)
    )
