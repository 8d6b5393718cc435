"""4-bit bases of bitsandbytes: the quantized layers, their storage, and dequantization."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from vlmrl.config.ds import Ds

if TYPE_CHECKING:
    from vlmrl.plugins import ParameterGroup, Processor

# On import it looks on the Hub for a faster CPU inference kernel, and warns that there is none.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

DTYPES = {"uint8": torch.uint8, "bf16": torch.bfloat16, "fp32": torch.float32}
"""`ds.quant_storage` -> dtype."""


@dataclass(frozen=True, slots=True)
class FourBit:
    """Settings of a base in NF4 with double quantization (arXiv:2305.14314)."""

    storage: torch.dtype
    """Dtype of the tensors that hold the bits. The layers compute in the dtype that the model is loaded in."""
    group: Callable[[str], ParameterGroup]
    """`Processor.parameter_group`: only the language model is quantized."""


def four_bit(ds: Ds, processor: Processor) -> FourBit | None:
    """Make the 4-bit settings for `load_model`; None unless `ds.load_in_4bit`.

    ZeRO-3 shards tensors of a single dtype. DeepSpeed casts all floating tensors to its own dtype, which would destroy
    bits that are stored as another one: outside of ZeRO-3 the default is uint8.
    """
    if not ds.load_in_4bit:
        return None
    auto = ds.param_dtype if ds.zero_stage == 3 else "uint8"
    return FourBit(DTYPES[auto if ds.quant_storage == "auto" else ds.quant_storage], processor.parameter_group)


def quantization(four_bit: FourBit, skeleton: PreTrainedModel, *, dtype: torch.dtype) -> BitsAndBytesConfig:
    """Make the configuration with which `from_pretrained` quantizes `quantized_layers` and nothing else.

    Transformers takes the layers to skip, each a regular expression that may match the start of a name: a single
    expression of whole names is exact.
    """
    quantized = set(quantized_layers(skeleton, four_bit.group))
    skipped = [
        name for name, module in skeleton.named_modules() if isinstance(module, nn.Linear) and name not in quantized
    ]
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=four_bit.storage,
        llm_int8_skip_modules=[f"({'|'.join(map(re.escape, skipped))})$"] if skipped else [],
    )


def quantized_layers(net: PreTrainedModel, group: Callable[[str], ParameterGroup]) -> list[str]:
    """Return the names of the language model's linear layers, without the heads of logits, scores or values: no later
    layer could compensate for their rounding."""
    body = {id(module) for module in net.base_model.modules()} - {id(net.get_output_embeddings())}
    return [
        name
        for name, module in net.named_modules()
        # Transformers does not quantize subclasses.
        if type(module) is nn.Linear and id(module) in body and group(f"{name}.weight") == "language"
    ]


def prepare_four_bit(net: PreTrainedModel) -> None:
    """Prepare a model that was just loaded in 4 bits for training and saving, in place."""
    import bitsandbytes

    for module in net.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            # With AVX512-BF16 the first pass without gradients would compute in bf16 and repack the weight in place,
            # into a form that training passes cannot read.
            module.support_avx512bf16_for_cpu = False
    for parameter in net.parameters():
        if parameter.device.type == "cpu" and not is_four_bit(parameter):
            # It may be a view of the mapped file, whose pages, quantized weights included, would stay in memory.
            parameter.data = parameter.data.clone()
    # `save_pretrained` would write the 4-bit weights instead of the given ones, and name them in the config.
    net.hf_quantizer = None
    del net.config.quantization_config


def is_four_bit(tensor: Tensor) -> bool:
    """Whether the tensor holds 4-bit weights, which `dequantized` decodes."""
    return getattr(tensor, "quant_state", None) is not None


def dequantized(tensor: Tensor) -> Tensor:
    """Decode a 4-bit tensor into the dtype that the model computes in; return any other tensor unchanged.

    The tensor must not be a shard.
    """
    if not is_four_bit(tensor):
        return tensor.detach()
    from bitsandbytes.functional import dequantize_4bit

    numbers: Tensor = dequantize_4bit(tensor.data, tensor.quant_state)  # type: ignore[attr-defined]
    return numbers


def true_shape(tensor: Tensor) -> tuple[int, ...]:
    """Shape of the unsharded, dequantized tensor."""
    if is_four_bit(tensor):
        return tuple(tensor.quant_state.shape)  # type: ignore[attr-defined]
    return tuple(getattr(tensor, "whole_shape", getattr(tensor, "ds_shape", tensor.shape)))


def true_dtype(tensor: Tensor) -> torch.dtype:
    """Dtype of the dequantized tensor."""
    return tensor.quant_state.dtype if is_four_bit(tensor) else tensor.dtype  # type: ignore[attr-defined]
