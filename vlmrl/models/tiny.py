"""Small models of real architectures with random weights, and their tokenizer, chat template and processor.

    python -m vlmrl.models.tiny --family qwen2_5_vl --out DIR

They load in Transformers and vLLM like the family's real checkpoints. The vocabulary is the 256 bytes and Qwen's
special tokens, without merges, so that an ASCII character is one token; ids from 270 on are unused.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from vlmrl import startup
from vlmrl.errors import ConfigError, VlmrlError
from vlmrl.models.tiny_qwen import save_qwen_processor
from vlmrl.models.tiny_vision import VISION_FAMILIES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_Plain = Literal[
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_text", "qwen3", "qwen3_moe", "llama"
]
Family = Literal[_Plain, "smolvlm", "gemma3", "internvl", "glm4v"]
Size = Literal["micro", "tiny", "small", "medium"]

SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
"""Qwen's special tokens in Qwen's order; their ids follow the 256 bytes."""

_IMAGE_PART = (
    "{%- if part.type == 'image' or 'image' in part %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif part.type == 'video' or 'video' in part %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{%- endif %}"
)
_CHAT_TEMPLATE = """\
{%- for message in messages %}
  {{- '<|im_start|>' + message.role + '\\n' }}
  {%- if message.content is string %}
    {{- message.content }}
  {%- else %}
    {%- for part in message.content %}
      IMAGE_PART
      {%- if 'text' in part %}{{- part.text }}{%- endif %}
    {%- endfor %}
  {%- endif %}
  {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


_INITIALIZER_RANGE = 0.06
"""With the usual 0.02, signals at a width of 128 are so weak that the model does not learn to use images."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """Sizes of a model. Heads of the language model have 32 channels, the minimum of vLLM's CPU attention."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    vision_hidden: int
    vision_intermediate: int
    vision_depth: int

    @property
    def heads(self) -> int:
        return self.hidden // 32

    @property
    def vision_heads(self) -> int:
        return max(2, self.vision_hidden // 32)


_SHAPES: dict[str, _Shape] = {
    "micro": _Shape(
        384, hidden=64, intermediate=96, layers=2, vision_hidden=32, vision_intermediate=64, vision_depth=2
    ),
    "tiny": _Shape(
        384, hidden=128, intermediate=384, layers=3, vision_hidden=128, vision_intermediate=256, vision_depth=3
    ),
    "small": _Shape(
        8192, hidden=256, intermediate=768, layers=6, vision_hidden=256, vision_intermediate=512, vision_depth=4
    ),
    "medium": _Shape(
        8192, hidden=768, intermediate=2304, layers=8, vision_hidden=256, vision_intermediate=512, vision_depth=4
    ),
}


def build(family: Family, out: Path, *, tied: bool = False, seed: int = 0, size: Size = "tiny") -> Path:
    """Write a randomly initialized fp32 model of `family` to the folder `out`, and return the folder.

    `tiny` has about 1.6M parameters and learns to count in a hundred steps of supervised training. `micro` is the
    smallest that vLLM serves. `small`, with about 13M parameters and a vocabulary of 8192, and `medium`, with about
    74M, are for benchmarks. Equal arguments write equal weights.

    Raises ConfigError for an unknown family or size.
    """
    if family not in get_args(Family):
        raise ConfigError(f"no tiny model of family {family!r}; there are: {', '.join(get_args(Family))}")
    if size not in _SHAPES:
        raise ConfigError(f"no tiny model of size {size!r}; there are: {', '.join(_SHAPES)}")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file: name a folder to write the model to")
    startup.prepare()
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig
    from transformers.utils import logging

    from vlmrl.models.checkpoint_layout import keep_checkpoint_layout

    other = VISION_FAMILIES.get(family)
    tokenizer = _tokenizer(family) if other is None else other.tokenizer()
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in (other.tokens if other else SPECIAL_TOKENS)}
    ends, pad = (other.ends, other.pad) if other else (("<|im_end|>", "<|endoftext|>"), "<|endoftext|>")
    config = (other.config if other else _FAMILIES[family])(_SHAPES[size], ids, tied)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        factory: Any = AutoModelForImageTextToText if _takes_images(family) else AutoModelForCausalLM
        model = factory.from_config(config, dtype=torch.float32)
        for matrix in (parameter for parameter in model.parameters() if parameter.dim() == 2 and not parameter.any()):
            torch.nn.init.normal_(matrix, std=_INITIALIZER_RANGE)  # Gemma 3's projector is zero
    keep_checkpoint_layout(model)
    model.generation_config = GenerationConfig(
        bos_token_id=ids[pad], eos_token_id=[ids[end] for end in ends], pad_token_id=ids[pad]
    )
    out.mkdir(parents=True, exist_ok=True)
    shows_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    model.save_pretrained(out)
    if shows_bars:
        logging.enable_progress_bar()
    if not _takes_images(family):
        tokenizer.save_pretrained(out)
    elif other is None:
        save_qwen_processor(family, tokenizer, out)
    else:
        other.rename_weights(out)
        other.processor(_SHAPES[size], tokenizer).save_pretrained(out)
    return out


def _tokenizer(family: Family) -> PreTrainedTokenizerBase:
    from transformers import Qwen2Tokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokenizer = Qwen2Tokenizer(
        vocab={character: byte for byte, character in bytes_to_unicode().items()},
        merges=[],
        model_max_length=8192,
    )
    # The class adds <|endoftext|> itself. Setting `eos` before `add_tokens` would change the order of the ids.
    tokenizer.add_tokens(list(SPECIAL_TOKENS), special_tokens=True)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = _CHAT_TEMPLATE.replace("IMAGE_PART", _IMAGE_PART if _takes_images(family) else "")
    return tokenizer


def _takes_images(family: Family) -> bool:
    return "_vl" in family or family == "qwen3_5" or family in VISION_FAMILIES


def _language(
    shape: _Shape, ids: dict[str, int], *, mrope_section: list[int] | None = None, **more: Any
) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads // 2,
        "max_position_embeddings": 8192,
        "initializer_range": _INITIALIZER_RANGE,
        "rope_parameters": rope if mrope_section is None else rope | {"mrope_section": mrope_section},
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    } | more


def _vision(shape: _Shape, **more: Any) -> dict[str, Any]:
    return {
        "depth": shape.vision_depth,
        "num_heads": shape.vision_heads,
        "spatial_merge_size": 2,
        "initializer_range": _INITIALIZER_RANGE,
        "temporal_patch_size": 2,
    } | more


def _placeholders(ids: dict[str, int]) -> dict[str, int]:
    names = {"image_token_id": "image_pad", "video_token_id": "video_pad", "vision_start_token_id": "vision_start"}
    names["vision_end_token_id"] = "vision_end"
    return {key: ids[f"<|{name}|>"] for key, name in names.items()}


def _qwen2_vl(shape: _Shape, ids: dict[str, int], tied: bool) -> PreTrainedConfig:
    from transformers import Qwen2VLConfig

    vision = _vision(
        shape,
        embed_dim=shape.vision_hidden,
        hidden_size=shape.hidden,
        mlp_ratio=shape.vision_intermediate // shape.vision_hidden,
        patch_size=14,
    )
    text = _language(shape, ids, mrope_section=[4, 6, 6])
    return Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied, **_placeholders(ids))


def _qwen2_5_vl(shape: _Shape, ids: dict[str, int], tied: bool) -> PreTrainedConfig:
    from transformers import Qwen2_5_VLConfig

    vision = _vision(
        shape,
        hidden_size=shape.vision_hidden,
        intermediate_size=shape.vision_intermediate,
        out_hidden_size=shape.hidden,
        patch_size=14,
        window_size=112,
        fullatt_block_indexes=[shape.vision_depth - 1],
    )
    text = _language(shape, ids, mrope_section=[4, 6, 6])
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied, **_placeholders(ids))


def _qwen3_vl(shape: _Shape, ids: dict[str, int], tied: bool) -> PreTrainedConfig:
    from transformers import Qwen3VLConfig

    text, vision = _qwen3_vl_parts(shape, ids)
    return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied, **_placeholders(ids))


def _qwen3_vl_moe(shape: _Shape, ids: dict[str, int], tied: bool) -> PreTrainedConfig:
    from transformers import Qwen3VLMoeConfig

    text, vision = _qwen3_vl_parts(shape, ids)
    # Transformers knows a checkpoint's layout of experts by their shapes, so none may be square.
    text |= _experts(shape.intermediate // 2)
    return Qwen3VLMoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied, **_placeholders(ids))


def _qwen3_vl_parts(shape: _Shape, ids: dict[str, int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of the language model and of the tower."""
    vision = _vision_of_qwen3(shape, deepstack_visual_indexes=[0])
    text = _language(shape, ids, mrope_section=[6, 5, 5], head_dim=32)
    text["rope_parameters"]["mrope_interleaved"] = True
    return text, vision


def _vision_of_qwen3(shape: _Shape, **more: Any) -> dict[str, Any]:
    return _vision(
        shape,
        hidden_size=shape.vision_hidden,
        intermediate_size=shape.vision_intermediate,
        out_hidden_size=shape.hidden,
        patch_size=16,
        num_position_embeddings=64,
        **more,
    )


def _qwen3_5(shape: _Shape, ids: dict[str, int], tied: bool) -> PreTrainedConfig:
    from transformers import Qwen3_5Config

    text, vision = _hybrid(shape, ids), _vision_of_qwen3(shape)
    return Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=tied, **_placeholders(ids))


def _qwen3_5_text(shape: _Shape, ids: dict[str, int], tied: bool) -> PreTrainedConfig:
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(**_hybrid(shape, ids), tie_word_embeddings=tied)


def _hybrid(shape: _Shape, ids: dict[str, int]) -> dict[str, Any]:
    """Settings of a language model of which every fourth layer, and the last one, has attention, the others linear
    attention, whose heads have 64 channels: vLLM's kernel for CPUs takes 64 or 128."""
    has_attention = [i % 4 == 0 or i == shape.layers for i in range(1, shape.layers + 1)]
    text = _language(
        shape,
        ids,
        mrope_section=[4, 2, 2],
        head_dim=32,
        layer_types=["full_attention" if full else "linear_attention" for full in has_attention],
        linear_num_key_heads=shape.heads // 2,
        linear_num_value_heads=shape.heads,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    )
    text["rope_parameters"] |= {"mrope_interleaved": True, "partial_rotary_factor": 0.5}
    return text


def _qwen3(shape: _Shape, ids: dict[str, int], tied: bool) -> PreTrainedConfig:
    from transformers import Qwen3Config

    return Qwen3Config(**_language(shape, ids, head_dim=32), tie_word_embeddings=tied)


def _qwen3_moe(shape: _Shape, ids: dict[str, int], tied: bool) -> PreTrainedConfig:
    from transformers import Qwen3MoeConfig

    language = _language(shape, ids, head_dim=32) | _experts(shape.intermediate // 3)
    return Qwen3MoeConfig(**language, tie_word_embeddings=tied)


def _experts(channels: int) -> dict[str, Any]:
    """Settings of four experts in each layer, each of so many channels inside; a token takes two."""
    return {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": channels,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


def _llama(shape: _Shape, ids: dict[str, int], tied: bool) -> PreTrainedConfig:
    from transformers import LlamaConfig

    return LlamaConfig(**_language(shape, ids, head_dim=32), tie_word_embeddings=tied)


_FAMILIES: dict[str, Callable[[_Shape, dict[str, int], bool], PreTrainedConfig]] = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "qwen3_5": _qwen3_5,
    "qwen3_5_text": _qwen3_5_text,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "llama": _llama,
}


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m vlmrl.models.tiny", description="Write a small model with random weights."
    )
    parser.add_argument("--family", required=True, choices=get_args(Family), help="architecture")
    parser.add_argument("--out", required=True, type=Path, help="folder to write")
    parser.add_argument(
        "--size",
        default="tiny",
        choices=get_args(Size),
        help="micro 0.2M, tiny 1.6M, small 13M, medium 74M parameters",
    )
    parser.add_argument("--tied", action="store_true", help="input and output embeddings are the same tensor")
    parser.add_argument("--seed", default=0, type=int, help="seed of the weights")
    arguments = parser.parse_args(argv)
    # Progress bars for files of a few megabytes are noise.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        print(build(arguments.family, arguments.out, tied=arguments.tied, seed=arguments.seed, size=arguments.size))
    except VlmrlError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
