"""Buffers that a model's code computes and no file holds, such as RoPE's frequencies, in full precision.

ZeRO-3 builds a model inside DeepSpeed's `zero.Init`, which casts every floating tensor that the constructors make to
the type of the weights. A frequency in bf16 keeps 8 bits: at theta 1e6 an angle at distance 1,000 is off by a radian.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import set_zero3_state

from vlmrl.errors import ConfigError, VlmrlError

_ROUNDING = 1e-5
"""Relative: a hundred times that of fp32, and a hundredth of that of bf16."""


def computed_buffers(net: PreTrainedModel) -> dict[str, Tensor]:
    """Name -> the value of each floating non-persistent buffer in a model of `net`'s class and configuration that is
    built without ZeRO, in CPU memory. Reads no weight.

    A buffer that the class cannot compute again, because its `_init_weights` does not set it, holds NaN.
    """
    kind, config = type(net), copy.deepcopy(net.config)
    # As `from_pretrained` does it elsewhere: an empty model, and then the class fills in what no file holds.
    with torch.random.fork_rng(devices=[]), torch.device("meta"), set_zero3_state():
        bare = kind._from_config(config, dtype=net.dtype, attn_implementation="eager")
        owned = list(_computed(bare))
        for module, key, _ in owned:
            module._buffers[key] = torch.full_like(_buffer(module, key), torch.nan, device="cpu")
    with torch.random.fork_rng(devices=[]):
        bare.initialize_weights()
    return {name: _buffer(module, key) for module, key, name in owned}


def restore_buffers(net: PreTrainedModel) -> None:
    """Put the values of `computed_buffers` into `net`, which `zero.Init` has built.

    Raises ConfigError for a buffer in less than fp32 that the class cannot compute again.
    """
    values = computed_buffers(net)
    for module, key, name in list(_computed(net)):
        held, value = _buffer(module, key), values[name]
        if not value.isnan().any():
            module._buffers[key] = value.to(held.device)
        elif held.dtype != torch.float32:
            raise ConfigError(
                f"ds.zero_stage 3 rounds the buffer {name} to {held.dtype}, and {type(net).__name__} cannot compute it "
                "again: set ds.param_dtype fp32, or ds.zero_stage 2"
            )


def check_buffers(net: PreTrainedModel) -> None:
    """Raise VlmrlError unless every buffer of `net` is that of a model built without ZeRO, but for the last bits, in
    which devices may differ.
    """
    values = computed_buffers(net)
    for module, key, name in _computed(net):
        held, value = _buffer(module, key), values.get(name)
        if value is None or value.isnan().any():
            continue
        if held.dtype != value.dtype or not torch.allclose(held.detach().cpu(), value, rtol=_ROUNDING, atol=0.0):
            raise VlmrlError(
                f"the buffer {name} of the model is not what its code computes ({held.dtype} instead of {value.dtype}, "
                f"off by up to {_distance(held, value):.2g}), so it would learn another function than the engines "
                "answer with: set ds.zero_stage 2"
            )


def _computed(net: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """(module, key in it, full name) of every floating buffer that is not in the files."""
    for prefix, module in net.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key in module._non_persistent_buffers_set and buffer.is_floating_point():
                yield module, key, f"{prefix}.{key}" if prefix else key


def _buffer(module: nn.Module, key: str) -> Tensor:
    buffer = module._buffers[key]
    assert buffer is not None
    return buffer


def _distance(held: Tensor, value: Tensor) -> float:
    if held.shape != value.shape:
        return torch.inf
    return float((held.detach().cpu().double() - value.double()).abs().max())
