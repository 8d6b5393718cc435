"""Attention that keeps packed samples, and the images of a vision tower, apart, and lets answers share their prompt.

It is registered with Transformers under the name `PACKED`. Who looks at whom reaches it as a keyword argument that
Transformers passes through every model to its attention function (`attention_plan`, or `cu_seq_lens_q` in a vision
tower). Without it each row is one sample, padded on the right: a causal token never looks at what follows it, so that
needs no mask either.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from vlmrl.errors import ConfigError
from vlmrl.models.attention_kernels import Bounds, How, attend, takes_varlen, varlen, visible
from vlmrl.models.attention_plan import Plan, plan, spans_of

PACKED = "vlmrl_packed"

PACKED_VISION = "vlmrl_flash_packed"
"""The same function. Transformers gives a vision tower's attention all images at once, with their lengths, when its
name says "flash", and one image at a time otherwise."""

Setting = Literal["auto", "sdpa", "eager", "varlen"]


def implementation(setting: Setting, device: torch.device) -> str | dict[str, str]:
    """What `ds.attn_implementation` means to Transformers' `from_pretrained`.

    `auto` and `varlen` are the attention of this file. `sdpa` and `eager` are Transformers' own, with a mask that it
    derives from the positions. Raises ConfigError for `varlen` where there is no CUDA.
    """
    if setting == "varlen" and device.type != "cuda":
        raise ConfigError(
            f"ds.attn_implementation varlen runs on CUDA only, and this run is on {device.type}: use auto"
        )
    if setting in ("sdpa", "eager"):
        return setting
    return {"": PACKED, "text_config": PACKED, "vision_config": "sdpa"}


def see_all_images_at_once(net: PreTrainedModel) -> None:
    """Give the vision tower of a model that was loaded with `PACKED` the attention of this file too.

    Only after loading: a name that says "flash" makes Transformers look for the flash-attn package while it loads.
    """
    if keeps_samples_apart(net) and "vision_config" in net.config.sub_configs:
        net.config.vision_config._attn_implementation = PACKED_VISION


def keeps_samples_apart(net: PreTrainedModel) -> bool:
    """The language model uses this file's attention, so that its inputs must carry the samples' lengths."""
    return bool(net.config.get_text_config()._attn_implementation == PACKED)


def check_layers(net: PreTrainedModel, *, samples_share_rows: bool) -> None:
    """Raise ConfigError where samples would reach each other, or attention would not be the model's own.

    Recurrent and convolutional layers carry their state past the end of a sample, whatever the attention does. And the
    attention of this file knows no other limits than a sample and a sliding window.
    """
    name = type(net).__name__
    if samples_share_rows and net._is_stateful:
        raise ConfigError(f"train.layout: samples of {name}, which has recurrent layers, would mix: use padded")
    kinds = set(getattr(net.config.get_text_config(), "layer_types", None) or ())
    unknown = sorted(kinds - {"full_attention", "sliding_attention", "linear_attention"})
    if unknown and keeps_samples_apart(net):
        raise ConfigError(f"{name} has layers of {unknown[0]}: set ds.attn_implementation to sdpa or eager")


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
    attention_plan: Plan | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention within each span and to its parent: query [B, H, T, d], key and value [B, Hkv, T, d] -> [B, T, H, d].

    Args:
        attention_plan: who looks at whom, in the B rows laid end to end.
        cu_seq_lens_q: [n + 1] int32, where each of n spans without parents starts; the last is B * T. What Transformers
            says of images; `max_length_q` is the longest.
        is_causal: False lets tokens look ahead; by default `module.is_causal` decides.

    Without either, each row is one sample.

    Raises ConfigError for what only other kernels can do: soft caps, attention sinks, position biases, masks.
    """
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None]
    if unknown or attention_mask is not None:
        raise ConfigError(
            f"{type(module).__name__} wants {', '.join(unknown) or 'a mask of its own'}, which packed attention does "
            "not have: set ds.attn_implementation to sdpa or eager"
        )
    batch, heads, length, dim = query.shape
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    how = How(scaling, dropout, sliding_window)
    if cu_seq_lens_q is None and attention_plan is None:
        return _rows_alone(query, key, value, how, causal=causal).transpose(1, 2).contiguous(), None
    q, k, v = (states.transpose(1, 2).reshape(batch * length, -1, dim) for states in (query, key, value))
    if attention_plan is not None:
        attended = attend(q, k, v, attention_plan, how)
        return attended.reshape(batch, length, heads, dim), None
    assert cu_seq_lens_q is not None
    if takes_varlen(q, how) and max_length_q is not None:
        # Without a look at the lengths, for which the CPU would have to wait in every layer.
        bounds = Bounds(cu_seq_lens_q, cu_seq_lens_q, int(max_length_q), int(max_length_q))
        attended = varlen(q, k, v, bounds, how, causal=causal)
    else:
        attended = attend(q, k, v, plan(spans_of(cu_seq_lens_q.diff().tolist()), causal=causal), how)
    return attended.reshape(batch, length, heads, dim), None


def _rows_alone(query: Tensor, key: Tensor, value: Tensor, how: How, *, causal: bool) -> Tensor:
    """Each row one sample: [B, H, T, d] -> [B, H, T, d]."""
    length = query.shape[2]
    mask = None
    if how.window is not None and length > how.window:
        mask = visible(length, length, causal=causal, window=how.window, device=query.device)
    return nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=how.dropout,
        is_causal=causal and mask is None,
        scale=how.scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )


AttentionInterface.register(PACKED, packed_attention)
AttentionInterface.register(PACKED_VISION, packed_attention)
