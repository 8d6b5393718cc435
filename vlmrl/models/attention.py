"""Attention that keeps packed samples, and the images of a vision tower, apart by their lengths: no [T, T] mask.

It is registered with Transformers under the name `PACKED`. The lengths reach it as the keyword arguments that
Transformers passes through every model to its attention function (`cu_seq_lens_q`, `max_length_q`). Without them each
row is one sample, padded on the right: a causal token never looks at what follows it, so that needs no mask either.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from vlmrl.errors import ConfigError
from vlmrl.types import Ints

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
        raise ConfigError(f"train.layout packed: samples of {name}, which has recurrent layers, would mix: use padded")
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
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention within each sample: query [B, H, T, d] and key, value [B, Hkv, T, d] -> [B, T, H, d].

    Args:
        cu_seq_lens_q: [n + 1] int32, where each of the n samples starts in the rows laid end to end; the last is B * T.
        max_length_q: tokens of the longest sample.
        is_causal: False lets tokens look ahead; by default `module.is_causal` decides.

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
    how = _How(scaling, dropout, causal, sliding_window)
    if cu_seq_lens_q is None:
        attended = _sdpa(query, key, value, how)
        return attended.transpose(1, 2).contiguous(), None
    q, k, v = (states.transpose(1, 2).reshape(batch * length, -1, dim) for states in (query, key, value))
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and not dropout:
        attended = _varlen(q, k, v, cu_seq_lens_q, max_length_q, how)
    else:
        attended = _by_length(q, k, v, cu_seq_lens_q.diff().tolist(), how)
    return attended.reshape(batch, length, heads, dim), None


class _How(NamedTuple):
    scaling: float | None
    dropout: float
    causal: bool
    window: int | None


def _varlen(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int | None, how: _How) -> Tensor:
    """PyTorch's kernel for samples end to end: q [T, H, d], k and v [T, Hkv, d] -> [T, H, d]. CUDA, half precision."""
    from torch.nn.attention.varlen import varlen_attn

    longest = int(starts.diff().max()) if longest is None else int(longest)
    behind = -1 if how.window is None else how.window - 1
    attended = varlen_attn(
        *(q, k, v, starts, starts, longest, longest),
        scale=how.scaling,
        window_size=(behind, 0 if how.causal else -1),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(attended, Tensor), "only the attended values were asked for"
    return attended


def _by_length(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], how: _How) -> Tensor:
    """SDPA over samples of about the same length at a time: q [T, H, d], k and v [T, Hkv, d] -> [T, H, d].

    A causal token never looks at the padding behind a sample; where tokens look ahead, only equal lengths go together.
    """
    starts = np.cumsum([0, *lengths[:-1]])
    attended: list[Tensor] = []
    places: list[Ints] = []
    for alike in _buckets(lengths, padded=how.causal):
        own = np.array([lengths[i] for i in alike])[:, None]
        offset = np.arange(own.max())
        # Behind a shorter sample its last token stands in: what is computed there is thrown away.
        tokens = starts[alike][:, None] + np.minimum(offset, own - 1)
        states = [_rows(flat, tokens).transpose(1, 2) for flat in (q, k, v)]
        rows = _sdpa(states[0], states[1], states[2], how).transpose(1, 2).flatten(0, 1)
        is_own = (offset < own).ravel()
        attended.append(rows if is_own.all() else rows[torch.from_numpy(is_own).to(rows.device)])
        places.append(tokens.ravel()[is_own])
    order = np.argsort(np.concatenate(places))
    return _rows(torch.cat(attended), order)


def _rows(flat: Tensor, tokens: Ints) -> Tensor:
    """flat [T, ...] -> [*tokens.shape, ...]; without a copy when the tokens are all there, in order."""
    if tokens.size == len(flat) and (np.diff(tokens.ravel()) == 1).all():
        return flat.reshape(*tokens.shape, *flat.shape[1:])
    index = torch.from_numpy(tokens.ravel()).to(flat.device)
    return flat.index_select(0, index).reshape(*tokens.shape, *flat.shape[1:])


def _sdpa(query: Tensor, key: Tensor, value: Tensor, how: _How) -> Tensor:
    """Each row one sample: [B, H, T, d] -> [B, H, T, d]."""
    mask = _window_mask(query.shape[2], how.window, query.device)
    return nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=how.dropout,
        is_causal=how.causal and mask is None,
        scale=how.scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )


def _buckets(lengths: list[int], *, padded: bool) -> list[list[int]]:
    """Indices of equal lengths or, `padded`, of lengths between the same powers of two: padding at most doubles it."""
    buckets: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        buckets.setdefault((length - 1).bit_length() if padded else length, []).append(i)
    return list(buckets.values())


def _window_mask(length: int, sliding_window: int | None, device: torch.device) -> Tensor | None:
    """[T, T] True where a token may look: itself and `sliding_window - 1` before it. None: no window is in the way."""
    if sliding_window is None or length <= sliding_window:
        return None
    offset = torch.arange(length, device=device)
    distance = offset[:, None] - offset[None, :]
    return (distance >= 0) & (distance < sliding_window)


AttentionInterface.register(PACKED, packed_attention)
AttentionInterface.register(PACKED_VISION, packed_attention)
