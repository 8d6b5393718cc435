"""Attention that isolates packed samples and the images of a vision tower, and lets responses share their prompt.

It is registered with Transformers under the name `PACKED`. The spans are a keyword argument that Transformers passes
through every model to its attention function: `attention_plan`, or `cu_seq_lens_q` in a vision tower. Without them each
row is one sample, padded on the right; causal tokens never attend to the padding, so that needs no mask either.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from vlmrl.errors import ConfigError
from vlmrl.models.attention_kernels import AttentionOptions, Bounds, attend, takes_varlen, varlen, visible
from vlmrl.models.attention_plan import AttentionPlan, plan_attention, spans_of
from vlmrl.models.linear_attention import mixes_samples, state_of

if TYPE_CHECKING:
    from vlmrl.models.sequence import SequenceShard

PACKED = "vlmrl_packed"

PACKED_VISION = "vlmrl_flash_packed"
"""The same function. Transformers passes a vision tower's attention all images at once, with their lengths, if its name
contains "flash", and one image at a time otherwise."""

Setting = Literal["auto", "sdpa", "eager", "varlen"]


def implementation(setting: Setting, device: torch.device) -> str | dict[str, str]:
    """Translate `ds.attn_implementation` into the argument of Transformers' `from_pretrained`.

    `auto` and `varlen` are the attention of this file. `sdpa` and `eager` are Transformers' own, with a mask that it
    derives from the positions. Raises ConfigError for `varlen` without CUDA.
    """
    if setting == "varlen" and device.type != "cuda":
        raise ConfigError(
            f"ds.attn_implementation varlen runs on CUDA only, and this run is on {device.type}: use auto"
        )
    if setting in ("sdpa", "eager"):
        return setting
    return {"": PACKED, "text_config": PACKED, "vision_config": "sdpa"}


def use_packed_vision_attention(net: PreTrainedModel) -> None:
    """Use the attention of this file in the vision tower too, if the model was loaded with `PACKED`.

    Call it after loading: for a name with "flash" Transformers requires the flash-attn package while it loads.
    """
    if isolates_samples(net) and "vision_config" in net.config.sub_configs:
        net.config.vision_config._attn_implementation = PACKED_VISION


def isolates_samples(net: PreTrainedModel) -> bool:
    """Whether the language model uses this file's attention, so that its inputs must have an attention plan."""
    return bool(net.config.get_text_config()._attn_implementation == PACKED)


def check_layers(net: PreTrainedModel, *, samples_share_rows: bool) -> None:
    """Raise ConfigError when samples of a row would affect each other, or packed attention would change the model.

    Recurrent and convolutional layers carry state past the end of a sample, regardless of the attention, unless they
    run per span (`models.linear_attention`). Packed attention has no layer types but full and sliding attention.
    """
    name = type(net).__name__
    if samples_share_rows and mixes_samples(net):
        raise ConfigError(f"train.layout: samples of {name}, which has {state_of(net)}, would mix: use padded")
    kinds = set(getattr(net.config.get_text_config(), "layer_types", None) or ())
    unknown = sorted(kinds - {"full_attention", "sliding_attention", "linear_attention"})
    if unknown and isolates_samples(net):
        raise ConfigError(
            f"{name} has layers of {unknown[0]}: set ds.attn_implementation to sdpa or eager, train.layout to padded"
        )


_watchers: list[dict[int, AttentionPlan | None]] = []


@contextmanager
def watched_attention() -> Iterator[dict[int, AttentionPlan | None]]:
    """Collect the ids of the modules that call this file's attention within the context, each with the plan that
    reached it."""
    seen: dict[int, AttentionPlan | None] = {}
    _watchers.append(seen)
    try:
        yield seen
    finally:
        _watchers.remove(seen)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    attention_plan: AttentionPlan | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    sequence_shard: SequenceShard | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend within each span and to its parent: query [B, H, T, d], key and value [B, Hkv, T, d] -> [B, T, H, d].

    Args:
        attention_plan: the spans of the B rows laid end to end.
        cu_seq_lens_q: [n + 1] int32, the start of each of n spans without parents; the last is B * T. Transformers
            passes it for images, with `max_length_q`, the longest.
        is_causal: by default `module.is_causal`.
        sequence_shard: query, key and value are of this rank's tokens; the plan, or the rows, are of all tokens.

    Without plan and lengths, each row is one sample.

    Raises ConfigError for soft caps, attention sinks, position biases and masks, which the kernels do not have.
    """
    for seen in _watchers:
        seen[id(module)] = attention_plan
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None]
    if unknown or attention_mask is not None:
        raise ConfigError(
            f"{type(module).__name__} needs {', '.join(unknown) or 'its own mask'}, which packed attention does "
            "not support: set ds.attn_implementation to sdpa or eager"
        )
    if sequence_shard is not None:
        output, _ = packed_attention(
            module,
            *sequence_shard.to_heads(query, key, value),
            None,
            scaling=scaling,
            dropout=dropout,
            sliding_window=sliding_window,
            is_causal=is_causal,
            attention_plan=attention_plan,
        )
        return sequence_shard.to_tokens(output), None
    batch, _, length, _ = query.shape
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    options = AttentionOptions(scaling, dropout, sliding_window)
    if cu_seq_lens_q is None and attention_plan is None:
        return _attend_rows(query, key, value, options, causal=causal).transpose(1, 2).contiguous(), None
    # Kernels want values as wide as keys; multi-head latent attention has narrower ones.
    width = value.shape[-1]
    value = nn.functional.pad(value, (0, key.shape[-1] - width))
    q, k, v = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    if attention_plan is not None:
        output = attend(q, k, v, attention_plan, options)
        return output.unflatten(0, (batch, length))[..., :width], None
    assert cu_seq_lens_q is not None
    if takes_varlen(q, options) and max_length_q is not None:
        # Reading the lengths would synchronize with the GPU in every layer.
        bounds = Bounds(cu_seq_lens_q, cu_seq_lens_q, int(max_length_q), int(max_length_q))
        output = varlen(q, k, v, bounds, options, causal=causal)
    else:
        output = attend(q, k, v, plan_attention(spans_of(cu_seq_lens_q.diff().tolist()), causal=causal), options)
    return output.unflatten(0, (batch, length)), None


def _attend_rows(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, *, causal: bool) -> Tensor:
    """Attend within each row, which is one sample: [B, H, T, d] -> [B, H, T, d]."""
    length = query.shape[2]
    mask = None
    if options.window is not None and length > options.window:
        mask = visible(length, length, causal=causal, window=options.window, device=query.device)
    return nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=options.dropout,
        is_causal=causal and mask is None,
        scale=options.scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )


AttentionInterface.register(PACKED, packed_attention)
AttentionInterface.register(PACKED_VISION, packed_attention)
