"""Small models of vision families other than Qwen's: special tokens, chat templates, processors and configurations.

`vlmrl.models.tiny` builds them. Tokens, names and classes are those of the families' real checkpoints; the 256 bytes
come first, and there are no merges.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

    from vlmrl.models.tiny import _Shape

Ids = dict[str, int]
_PATCH = 14
_TILE = 4 * _PATCH
"""Pixels of the side of a tile."""
_TILE_TOKENS = 4
"""2x2 patches are an image token."""
_INITIALIZER_RANGE = 0.06
"""As in `vlmrl.models.tiny`."""


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """What `vlmrl.models.tiny` needs to build a model of a family."""

    tokens: tuple[str, ...]
    """Special tokens; their ids follow the 256 bytes."""
    ends: tuple[str, ...]
    """Tokens that end a response; the first is the tokenizer's."""
    pad: str
    template: str
    config: Callable[[_Shape, Ids, bool], PreTrainedConfig]
    processor: Callable[[_Shape, PreTrainedTokenizerBase], ProcessorMixin]
    names: dict[str, str] = field(default_factory=dict)
    """Attributes of the tokenizer that the family's processor reads, and their tokens."""
    plain_tokens: tuple[str, ...] = ()
    """Further tokens, of plain text."""
    bos: str | None = None
    in_files: tuple[str, str] | None = None
    """Part of the names of some weights as Transformers saves them, and in the family's checkpoints."""

    def tokenizer(self) -> PreTrainedTokenizerBase:
        from transformers import Qwen2Tokenizer
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        tokenizer = Qwen2Tokenizer(
            vocab={character: byte for byte, character in bytes_to_unicode().items()},
            merges=[],
            model_max_length=8192,
            # The class adds these, and the named ones, itself.
            unk_token=self.tokens[0],
            eos_token=self.tokens[0],
            pad_token=self.tokens[0],
            extra_special_tokens=self.names,
        )
        tokenizer.add_tokens(list(self.tokens), special_tokens=True)
        tokenizer.add_tokens(list(self.plain_tokens))
        tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token = self.ends[0], self.pad, None
        tokenizer.bos_token = self.bos
        tokenizer.chat_template = self.template
        return tokenizer

    def rename_weights(self, out: Path) -> None:
        """Give the weights in the folder `out` the names of the family's checkpoints."""
        from safetensors.torch import load_file, save_file

        if self.in_files is not None:
            weights = load_file(out / "model.safetensors")
            renamed = {name.replace(*self.in_files): weight for name, weight in weights.items()}
            save_file(renamed, out / "model.safetensors", metadata={"format": "pt"})


def _turns(image: str, *, opens: str, closes: str, begins: str) -> str:
    """Make a chat template: `opens` and `closes` stand around each message, and `begins` before a response."""
    return f"""\
{{%- for message in messages %}}
  {{{{- {opens} }}}}
  {{%- if message.content is string %}}
    {{{{- message.content }}}}
  {{%- else %}}
    {{%- for part in message.content %}}
      {{%- if part.type == 'image' or 'image' in part %}}{{{{- '{image}' }}}}{{%- endif %}}
      {{%- if 'text' in part %}}{{{{- part.text }}}}{{%- endif %}}
    {{%- endfor %}}
  {{%- endif %}}
  {{{{- {closes} }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- {begins} }}}}{{%- endif %}}
"""


def _language(shape: _Shape, *, end: int, pad: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads // 2,
        "max_position_embeddings": 8192,
        "initializer_range": _INITIALIZER_RANGE,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": pad,
        "eos_token_id": end,
        "pad_token_id": pad,
    } | more


# ---------------------------------------------------------------- GLM-4.1V


def _glm4v(shape: _Shape, ids: Ids, tied: bool) -> PreTrainedConfig:
    from transformers import Glm4vConfig

    # vLLM reads the setting of the biases; Transformers always has them.
    text = _language(shape, end=ids["<|endoftext|>"], pad=ids["<|endoftext|>"], attention_bias=True)
    # Half of the 32 channels of a head are rotated.
    text["rope_parameters"] |= {"mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5}
    vision = {
        "depth": shape.vision_depth,
        "hidden_size": shape.vision_hidden,
        "intermediate_size": shape.vision_intermediate,
        "num_heads": shape.vision_heads,
        "out_hidden_size": shape.hidden,
        "image_size": 8 * _PATCH,
        "patch_size": _PATCH,
        "initializer_range": _INITIALIZER_RANGE,
    }
    places = {
        f"{kind}{place}_token_id": ids[token]
        for kind in ("image", "video")
        for place, token in (("", f"<|{kind}|>"), ("_start", f"<|begin_of_{kind}|>"), ("_end", f"<|end_of_{kind}|>"))
    }
    return Glm4vConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied, **places)


def _glm4v_processor(shape: _Shape, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    from transformers import Glm4vImageProcessor, Glm4vProcessor, Glm4vVideoProcessor

    settings: dict[str, Any] = {"patch_size": _PATCH, "merge_size": 2, "temporal_patch_size": 2}
    size = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000}
    return Glm4vProcessor(
        image_processor=Glm4vImageProcessor(size=size, **settings),
        tokenizer=tokenizer,
        video_processor=Glm4vVideoProcessor(size=size, **settings),
        chat_template=tokenizer.chat_template,
    )


_GLM4V = VisionFamily(
    tokens=(
        *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"),
        *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        *("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>", "<|image|>", "<|video|>"),
    ),
    ends=("<|endoftext|>", "<|user|>", "<|observation|>"),
    pad="<|endoftext|>",
    template="[gMASK]<sop>"
    + _turns(
        "<|begin_of_image|><|image|><|end_of_image|>",
        opens="'<|' + message.role + '|>\\n'",
        closes="''",
        begins="'<|assistant|>\\n'",
    ),
    config=_glm4v,
    processor=_glm4v_processor,
)

# ---------------------------------------------------------------- InternVL3.5


def _internvl(shape: _Shape, ids: Ids, tied: bool) -> PreTrainedConfig:
    from transformers import InternVLConfig

    text = _language(shape, end=ids["<|im_end|>"], pad=ids["<|endoftext|>"], head_dim=32, model_type="qwen3")
    vision = {
        "num_hidden_layers": shape.vision_depth,
        "hidden_size": shape.vision_hidden,
        "intermediate_size": shape.vision_intermediate,
        "num_attention_heads": shape.vision_heads,
        "attention_bias": True,
        "image_size": _TILE,
        "patch_size": _PATCH,
        "initializer_range": _INITIALIZER_RANGE,
    }
    return InternVLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=tied,
        image_token_id=ids["<IMG_CONTEXT>"],
        image_seq_length=_TILE_TOKENS,
    )


def _internvl_processor(shape: _Shape, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    from transformers import GotOcr2ImageProcessor, InternVLProcessor, InternVLVideoProcessor

    settings: dict[str, Any] = {"size": {"height": _TILE, "width": _TILE}}
    settings |= {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
    return InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(crop_to_patches=True, min_patches=1, max_patches=12, **settings),
        tokenizer=tokenizer,
        video_processor=InternVLVideoProcessor(**settings),
        image_seq_length=_TILE_TOKENS,
        chat_template=tokenizer.chat_template,
    )


_CHATML = {"opens": "'<|im_start|>' + message.role + '\\n'", "closes": "'<|im_end|>\\n'"}

_INTERNVL = VisionFamily(
    tokens=(
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        *("<quad>", "</quad>", "<ref>", "</ref>", "<box>", "</box>"),
    ),
    ends=("<|im_end|>", "<|endoftext|>"),
    pad="<|endoftext|>",
    template=_turns("<IMG_CONTEXT>\\n", **_CHATML, begins="'<|im_start|>assistant\\n'"),
    config=_internvl,
    processor=_internvl_processor,
    names={"start_image_token": "<img>", "end_image_token": "</img>"}
    | {"context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"},
)

# ---------------------------------------------------------------- SmolVLM2


def _smolvlm(shape: _Shape, ids: Ids, tied: bool) -> PreTrainedConfig:
    from transformers import SmolVLMConfig

    end, pad = ids["<end_of_utterance>"], ids["<|im_end|>"]
    vision = {
        "num_hidden_layers": shape.vision_depth,
        "hidden_size": shape.vision_hidden,
        "intermediate_size": shape.vision_intermediate,
        "num_attention_heads": shape.vision_heads,
        "image_size": _TILE,
        "patch_size": _PATCH,
        "initializer_range": _INITIALIZER_RANGE,
    }
    return SmolVLMConfig(
        text_config=_language(shape, end=end, pad=pad, head_dim=32, model_type="llama", tie_word_embeddings=tied),
        vision_config=vision,
        tie_word_embeddings=tied,
        image_token_id=ids["<image>"],
        scale_factor=2,
        pad_token_id=pad,
    )


def _smolvlm_processor(shape: _Shape, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    from transformers import SmolVLMImageProcessor, SmolVLMProcessor, SmolVLMVideoProcessor

    sizes: dict[str, Any] = {"size": {"longest_edge": 4 * _TILE}, "max_image_size": {"longest_edge": _TILE}}
    return SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(**sizes),
        tokenizer=tokenizer,
        video_processor=SmolVLMVideoProcessor(**sizes),
        image_seq_len=_TILE_TOKENS,
        chat_template=tokenizer.chat_template,
    )


_SMOLVLM = VisionFamily(
    tokens=(
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        *("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"),
        *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    ),
    ends=("<end_of_utterance>",),
    pad="<|im_end|>",
    # As in Transformers' `processing_smolvlm`: contents are lists of parts.
    template=(
        "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
        "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
        "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
        "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
        "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    ),
    config=_smolvlm,
    processor=_smolvlm_processor,
    names={
        "fake_image_token": "<fake_token_around_image>",
        "image_token": "<image>",
        "end_of_utterance_token": "<end_of_utterance>",
        "global_image_token": "<global-img>",
    },
)

# ---------------------------------------------------------------- Gemma 3


def _gemma3(shape: _Shape, ids: Ids, tied: bool) -> PreTrainedConfig:
    from transformers import Gemma3Config

    text = _language(shape, end=ids["<eos>"], pad=ids["<pad>"], head_dim=32, query_pre_attn_scalar=32)
    text["rope_parameters"] = {
        "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    # Longer than an image, as in the real models.
    text |= {"bos_token_id": ids["<bos>"], "sliding_window": 24, "tie_word_embeddings": tied}
    text["layer_types"] = ["full_attention" if i % 2 else "sliding_attention" for i in range(shape.layers)]
    vision = {
        "num_hidden_layers": shape.vision_depth,
        "hidden_size": shape.vision_hidden,
        "intermediate_size": shape.vision_intermediate,
        "num_attention_heads": shape.vision_heads,
        "image_size": _TILE,
        "patch_size": _PATCH,
        "vision_use_head": False,
    }
    return Gemma3Config(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=tied,
        mm_tokens_per_image=_TILE_TOKENS,
        boi_token_index=ids["<start_of_image>"],
        eoi_token_index=ids["<end_of_image>"],
        image_token_index=ids["<image_soft_token>"],
        initializer_range=_INITIALIZER_RANGE,
    )


def _gemma3_processor(shape: _Shape, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    normal = [0.5] * 3
    return Gemma3Processor(
        image_processor=Gemma3ImageProcessor(
            size={"height": _TILE, "width": _TILE}, image_mean=normal, image_std=normal, do_pan_and_scan=False
        ),
        tokenizer=tokenizer,
        image_seq_length=_TILE_TOKENS,
        chat_template=tokenizer.chat_template,
    )


_GEMMA3 = VisionFamily(
    tokens=(
        *("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
        *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    ),
    plain_tokens=("\n", "\n\n", "\n\n\n", "\n\n\n\n"),
    ends=("<end_of_turn>", "<eos>"),
    pad="<pad>",
    bos="<bos>",
    # System messages are the beginning of the first turn; texts are trimmed.
    template="""\
{{- bos_token }}
{%- set first, turns = '', messages %}
{%- if messages[0].role == 'system' %}
  {%- set system = messages[0].content %}
  {%- set first = (system if system is string else system[0].text) + '\\n\\n' %}
  {%- set turns = messages[1:] %}
{%- endif %}
{%- for message in turns %}
  {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
  {%- endif %}
  {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
  {{- first if loop.first else '' }}
  {%- if message.content is string %}
    {{- message.content | trim }}
  {%- else %}
    {%- for part in message.content %}
      {%- if part.type == 'image' %}{{- '<start_of_image>' }}{%- endif %}
      {%- if part.type == 'text' %}{{- part.text | trim }}{%- endif %}
    {%- endfor %}
  {%- endif %}
  {{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
""",
    config=_gemma3,
    processor=_gemma3_processor,
    in_files=("vision_tower.", "vision_tower.vision_model."),
    names={"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
)

VISION_FAMILIES: dict[str, VisionFamily] = {
    "smolvlm": _SMOLVLM,
    "gemma3": _GEMMA3,
    "internvl": _INTERNVL,
    "glm4v": _GLM4V,
}
