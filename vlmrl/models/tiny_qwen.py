"""Processors of tiny models of Qwen's families with images, for `vlmrl.models.tiny`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def save_qwen_processor(family: str, tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
    """Write the processor of a tiny model of Qwen's families with images to the folder `out`."""
    from transformers import (
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLProcessor,
        Qwen2VLVideoProcessor,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    is_third = family in ("qwen3_vl", "qwen3_vl_moe", "qwen3_5")
    patch = 16 if is_third else 14
    size = {"shortest_edge": (4 * patch) ** 2, "longest_edge": 1280 * (2 * patch) ** 2}
    settings: dict[str, Any] = {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2, "size": size}
    if is_third:
        settings |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    video: Any = Qwen3VLVideoProcessor if is_third else Qwen2VLVideoProcessor
    processor: Any = {"qwen2_vl": Qwen2VLProcessor, "qwen2_5_vl": Qwen2_5_VLProcessor}.get(family, Qwen3VLProcessor)
    processor(
        image_processor=Qwen2VLImageProcessor(**settings),
        tokenizer=tokenizer,
        video_processor=video(**settings),
        chat_template=tokenizer.chat_template,
    ).save_pretrained(out)
