"""A base held in 4 bits by bitsandbytes: which layers, how they are stored, and their values written out again."""

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

# When it is imported, it looks on the Hub for a faster kernel for inference on CPU, and says that there is none.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

DTYPES = {"uint8": torch.uint8, "bf16": torch.bfloat16, "fp32": torch.float32}
"""`ds.quant_storage` -> dtype."""


@dataclass(frozen=True, slots=True)
class FourBit:
    """How a base is held: as NF4 with double quantisation (arXiv:2305.14314)."""

    storage: torch.dtype
    """Of the tensors that hold the bits. The layers compute in the dtype that the model is read in."""
    group: Callable[[str], ParameterGroup]
    """`Processor.parameter_group`: only the language model is quantised."""


def four_bit(ds: Ds, processor: Processor) -> FourBit | None:
    """What `load_model` must know of 4 bits; None when the settings ask for none.

    ZeRO-3 shards tensors of its one dtype alone, and DeepSpeed casts every float of another dtype, which would destroy
    bits that are stored as such: bytes are safe everywhere else.
    """
    if not ds.load_in_4bit:
        return None
    auto = ds.param_dtype if ds.zero_stage == 3 else "uint8"
    return FourBit(DTYPES[auto if ds.quant_storage == "auto" else ds.quant_storage], processor.parameter_group)


def quantization(four_bit: FourBit, skeleton: PreTrainedModel, *, dtype: torch.dtype) -> BitsAndBytesConfig:
    """What `from_pretrained` must know to quantise the layers of `quantized_layers` and nothing else.

    Transformers asks for the layers to leave as they are, and takes each entry for a regular expression that may match
    the start of a name: one expression of whole names is exact.
    """
    wanted = set(quantized_layers(skeleton, four_bit.group))
    kept = [name for name, module in skeleton.named_modules() if isinstance(module, nn.Linear) and name not in wanted]
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=four_bit.storage,
        llm_int8_skip_modules=[f"({'|'.join(map(re.escape, kept))})$"] if kept else [],
    )


def quantized_layers(net: PreTrainedModel, group: Callable[[str], ParameterGroup]) -> list[str]:
    """Names of the linear layers of the language model, without the heads that make logits, scores or values of what it
    puts out: no later layer makes up for their rounding."""
    body = {id(module) for module in net.base_model.modules()} - {id(net.get_output_embeddings())}
    return [
        name
        for name, module in net.named_modules()
        # Transformers quantises no subclasses.
        if type(module) is nn.Linear and id(module) in body and group(f"{name}.weight") == "language"
    ]


def settle(net: PreTrainedModel) -> None:
    """Make a model that was just read in 4 bits one that trains and is written like any other, in place."""
    import bitsandbytes

    for module in net.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            # With AVX512-BF16 the first pass without gradients would repack the weight in place, compute in bf16, and
            # leave a weight that no training pass can read.
            module.support_avx512bf16_for_cpu = False
    for parameter in net.parameters():
        if parameter.device.type == "cpu" and not is_four_bit(parameter):
            # It may be a view of the mapped file, of which the process would hold every page that was quantised.
            parameter.data = parameter.data.clone()
    # `save_pretrained` would put the 4-bit weights in the place of those that it is given, and say so in the config.
    net.hf_quantizer = None
    del net.config.quantization_config


def is_four_bit(tensor: Tensor) -> bool:
    """Whether the tensor holds bits that `dequantized` turns into numbers."""
    return getattr(tensor, "quant_state", None) is not None


def dequantized(tensor: Tensor) -> Tensor:
    """The numbers that a 4-bit tensor stands for, in the dtype that the model computes in; any other tensor as it is.

    It must be whole, not a shard.
    """
    if not is_four_bit(tensor):
        return tensor.detach()
    from bitsandbytes.functional import dequantize_4bit

    numbers: Tensor = dequantize_4bit(tensor.data, tensor.quant_state)  # type: ignore[attr-defined]
    return numbers


def true_shape(tensor: Tensor) -> tuple[int, ...]:
    """Shape of what the tensor stands for: under ZeRO-3 of the whole one, in 4 bits of its numbers."""
    if is_four_bit(tensor):
        return tuple(tensor.quant_state.shape)  # type: ignore[attr-defined]
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def true_dtype(tensor: Tensor) -> torch.dtype:
    """Dtype of what the tensor stands for."""
    return tensor.quant_state.dtype if is_four_bit(tensor) else tensor.dtype  # type: ignore[attr-defined]
