"""Shapes of published models, so that a plan needs no network. Each is the difference from a tiny configuration of the
family (`models.tiny`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlmrl.models.tiny import Family


@dataclass(frozen=True, slots=True)
class Shape:
    """A published model."""

    family: Family
    model_type: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    keys: int
    """Heads of keys and values."""
    channels: int
    """Of a head."""
    vocabulary: int
    tied: bool
    """Input and output embeddings are the same."""
    experts: int = 0
    tower: tuple[int, int, int, int] | None = None
    """Layers, hidden and intermediate size of the vision tower, and its heads."""

    def config(self, tiny: Mapping[str, Any]) -> dict[str, Any]:
        """Return the contents of config.json: those of a tiny model of the family, with these sizes."""
        text: dict[str, Any] = {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.keys,
            "head_dim": self.channels,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": self.tied,
            "layer_types": ["full_attention"] * self.layers,
        }
        if self.experts:
            text |= {"num_experts": self.experts, "num_experts_per_tok": 8, "decoder_sparse_step": 1}
            text |= {"moe_intermediate_size": self.intermediate // 8, "mlp_only_layers": []}
        top = {"model_type": self.model_type, "architectures": None, "tie_word_embeddings": self.tied}
        if self.tower is None:
            return {**tiny, **text, **top}
        config = {**tiny, **top}
        config["text_config"] = {**tiny["text_config"], **text, "model_type": f"{self.model_type}_text"}
        config["vision_config"] = {**tiny["vision_config"], **_vision(self, *self.tower)}
        return config


def _vision(shape: Shape, depth: int, hidden: int, intermediate: int, heads: int) -> dict[str, Any]:
    vision = {"depth": depth, "hidden_size": hidden, "intermediate_size": intermediate, "num_heads": heads}
    vision["out_hidden_size"] = shape.hidden
    if shape.family == "qwen2_5_vl":
        return vision | {"fullatt_block_indexes": [7, 15, 23, 31]}
    third = depth // 3
    deepstack = [5, 11, 17] if depth == 24 else [third - 1, 2 * third - 2, 3 * third - 3]
    return vision | {"deepstack_visual_indexes": deepstack, "num_position_embeddings": 2304}


def _qwen(vocabulary: int, rows: Mapping[str, tuple[Any, ...]], family: Family, model_type: str) -> dict[str, Shape]:
    shapes = {}
    for name, (hidden, intermediate, layers, heads, keys, tied, more) in rows.items():
        sizes = (hidden, intermediate, layers, heads, keys)
        shapes[name] = Shape(family, model_type, *sizes, 128, vocabulary, tied, **more)
    return shapes


_SMALL_TOWER = {"tower": (24, 1024, 4096, 16)}
_TOWER = {"tower": (27, 1152, 4304, 16)}

SHAPES: Mapping[str, Shape] = {
    **_qwen(
        151936,
        {
            "Qwen3-0.6B": (1024, 3072, 28, 16, 8, True, {}),
            "Qwen3-1.7B": (2048, 6144, 28, 16, 8, True, {}),
            "Qwen3-4B": (2560, 9728, 36, 32, 8, True, {}),
            "Qwen3-8B": (4096, 12288, 36, 32, 8, False, {}),
            "Qwen3-14B": (5120, 17408, 40, 40, 8, False, {}),
            "Qwen3-32B": (5120, 25600, 64, 64, 8, False, {}),
        },
        "qwen3",
        "qwen3",
    ),
    **_qwen(
        151936,
        {
            "Qwen3-30B-A3B": (2048, 6144, 48, 32, 4, False, {"experts": 128}),
            "Qwen3-235B-A22B": (4096, 12288, 94, 64, 4, False, {"experts": 128}),
        },
        "qwen3",
        "qwen3_moe",
    ),
    **_qwen(
        151936,
        {
            "Qwen3-VL-2B": (2048, 6144, 28, 16, 8, True, _SMALL_TOWER),
            "Qwen3-VL-4B": (2560, 9728, 36, 32, 8, True, _SMALL_TOWER),
            "Qwen3-VL-8B": (4096, 12288, 36, 32, 8, False, _TOWER),
            "Qwen3-VL-32B": (5120, 25600, 64, 64, 8, False, _TOWER),
        },
        "qwen3_vl",
        "qwen3_vl",
    ),
    **_qwen(
        151936,
        {"Qwen3-VL-30B-A3B": (2048, 6144, 48, 32, 4, False, {"experts": 128, **_TOWER})},
        "qwen3_vl",
        "qwen3_vl_moe",
    ),
    "Qwen2.5-VL-3B": Shape(
        "qwen2_5_vl", "qwen2_5_vl", 2048, 11008, 36, 16, 2, 128, 151936, tied=True, tower=(32, 1280, 3420, 16)
    ),
    **_qwen(
        152064,
        {
            "Qwen2.5-VL-7B": (3584, 18944, 28, 28, 4, False, {"tower": (32, 1280, 3420, 16)}),
            "Qwen2.5-VL-32B": (5120, 27648, 64, 40, 8, False, {"tower": (32, 1280, 3456, 16)}),
            "Qwen2.5-VL-72B": (8192, 29568, 80, 64, 8, False, {"tower": (32, 1280, 3456, 16)}),
        },
        "qwen2_5_vl",
        "qwen2_5_vl",
    ),
    "Llama-3.2-1B": Shape("llama", "llama", 2048, 8192, 16, 32, 8, 64, 128256, tied=True),
    "Llama-3.2-3B": Shape("llama", "llama", 3072, 8192, 28, 24, 8, 128, 128256, tied=True),
    "Llama-3.1-8B": Shape("llama", "llama", 4096, 14336, 32, 32, 8, 128, 128256, tied=False),
    "Llama-3.1-70B": Shape("llama", "llama", 8192, 28672, 80, 64, 8, 128, 128256, tied=False),
}
"""Name without owner and variant -> shape."""
_BY_NAME = {name.lower(): name for name in SHAPES}
_VARIANT = re.compile(r"[-_](instruct|thinking|base|chat|it|\d{4})$")
_OTHER_NAMES = {"llama-3-8b": "llama-3.1-8b", "llama-3-70b": "llama-3.1-70b", "llama-3.3-70b": "llama-3.1-70b"}


def published_name(name: str) -> str | None:
    """Return the key in `SHAPES` of a published model, by its name with or without owner and variant; None if there is
    none."""
    key = name.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    while (shorter := _VARIANT.sub("", key)) != key:
        key = shorter
    return _BY_NAME.get(_OTHER_NAMES.get(key, key))


def hub_id(name: str) -> str:
    """Return the id on the Hub of a name without an owner: of the variant that follows instructions."""
    key = published_name(name)
    if "/" in name or key is None:
        return name
    if name.lower() != key.lower():
        key = name
    elif "-VL-" in key or key.startswith("Llama"):
        key += "-Instruct"
    if key.lower().startswith("llama-3-"):
        key = f"Meta-{key}"
    return f"{'meta-llama' if 'llama' in key.lower() else 'Qwen'}/{key}"
