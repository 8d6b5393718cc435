"""Full precision for buffers that a model's code computes and no file holds, such as RoPE's frequencies.

Under ZeRO-3 a model is built inside DeepSpeed's `zero.Init`, which casts all floating tensors of the constructors to
the dtype of the weights. A frequency in bf16 keeps 8 bits: at theta 1e6 an angle at distance 1,000 is off by a radian.
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
"""Relative tolerance: a hundred times the rounding of fp32, a hundredth of that of bf16."""


def computed_buffers(net: PreTrainedModel) -> dict[str, Tensor]:
    """Compute the floating non-persistent buffers of `net` without ZeRO; returns name -> value, in CPU memory.

    Reads no weights. A buffer that the class cannot compute again, because its `_init_weights` does not set it, is NaN.
    """
    kind, config = type(net), copy.deepcopy(net.config)
    # As in `from_pretrained`: make an empty model, then let the class compute what no file holds.
    with torch.random.fork_rng(devices=[]), torch.device("meta"), set_zero3_state():
        bare = kind._from_config(config, dtype=net.dtype, attn_implementation="eager")
        buffers = list(_computed(bare))
        for module, key, _ in buffers:
            module._buffers[key] = torch.full_like(_buffer(module, key), torch.nan, device="cpu")
    with torch.random.fork_rng(devices=[]):
        bare.initialize_weights()
    return {name: _buffer(module, key) for module, key, name in buffers}


def restore_buffers(net: PreTrainedModel) -> None:
    """Set the buffers of `net`, which was built inside `zero.Init`, to the values of `computed_buffers`.

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
    """Raise VlmrlError unless every buffer of `net` equals that of a model built without ZeRO, within rounding, in
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
                f"off by up to {_max_difference(held, value):.2g}), so trainer and engines would run different "
                "functions: set ds.zero_stage 2"
            )


def _computed(net: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """Yield (module, key in it, full name) of every floating buffer that is not in the files."""
    for prefix, module in net.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key in module._non_persistent_buffers_set and buffer.is_floating_point():
                yield module, key, f"{prefix}.{key}" if prefix else key


def _buffer(module: nn.Module, key: str) -> Tensor:
    buffer = module._buffers[key]
    assert buffer is not None
    return buffer


def _max_difference(held: Tensor, value: Tensor) -> float:
    if held.shape != value.shape:
        return torch.inf
    return float((held.detach().cpu().double() - value.double()).abs().max())
