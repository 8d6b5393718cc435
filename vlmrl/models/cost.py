"""What an image costs a training pass, in language tokens: counted from the model's own matrices."""

from __future__ import annotations

import math

from torch import nn
from transformers import PreTrainedModel

from vlmrl.plugins import Processor


def patch_cost(net: PreTrainedModel, processor: Processor) -> float:
    """Multiplications per vision patch over multiplications per language token, projector included; 0 without a tower.

    A matrix is used once per patch or token (the projector's once per merged patch), so its size is what it costs. A
    part that does not train costs a third: it has no backward pass. It is counted rather than timed so that equal runs
    cut equal packs, and a run that goes on after a kill makes the same numbers.
    """
    dummy = processor.dummy_sample()
    if dummy is None:
        return 0.0
    size = dummy.media[0].size
    tokens_per_patch = processor.num_tokens(size) / math.prod(processor.grid(size))
    tables = [module for module in net.modules() if isinstance(module, nn.Embedding)]
    looked_up = {id(layer.weight) for layer in (*tables, net.get_output_embeddings())}
    sizes = {"vision": 0.0, "projector": 0.0, "language": 0.0}
    for name, parameter in net.named_parameters():
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        if len(shape) > 1 and id(parameter) not in looked_up:
            share = 1.0 if parameter.requires_grad else 1 / 3
            sizes[processor.parameter_group(name)] += share * math.prod(shape)
    return (sizes["vision"] + tokens_per_patch * sizes["projector"]) / max(1.0, sizes["language"])
