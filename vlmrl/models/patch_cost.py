"""Cost of a vision patch in a training pass, in language tokens, counted from the model's matrices."""

from __future__ import annotations

import math

from torch import nn
from transformers import PreTrainedModel

from vlmrl.models.quantize import true_shape
from vlmrl.plugins import ParameterGroup, Processor


def patch_cost(net: PreTrainedModel, processor: Processor) -> float:
    """Divide the multiplications per vision patch, projector included, by those per language token; 0 without a tower.

    A matrix is used once per patch or token (the projector's once per merged patch), so its cost is its size: a third
    for the forward pass, a third for the gradient of its inputs, needed if its part or an earlier one trains, and a
    third for its own gradient. The cost is counted rather than timed, so that equal runs make equal packs and a resumed
    run is reproducible.
    """
    dummy = processor.dummy_sample()
    if dummy is None:
        return 0.0
    size = dummy.media[0].size
    tokens_per_patch = processor.num_tokens(size) / math.prod(processor.grid(size))
    tables = [module for module in net.modules() if isinstance(module, nn.Embedding)]
    # A reward model has no output embeddings, and its head has few parameters.
    excluded = {id(layer.weight) for layer in (*tables, net.get_output_embeddings()) if layer is not None}
    sizes: dict[ParameterGroup, float] = {"vision": 0.0, "projector": 0.0, "language": 0.0}
    passes = _passes(net, processor)
    for name, parameter in net.named_parameters():
        shape = true_shape(parameter)
        if len(shape) > 1 and id(parameter) not in excluded:
            group = processor.parameter_group(name)
            sizes[group] += (passes[group] + parameter.requires_grad) / 3 * math.prod(shape)
    return (sizes["vision"] + tokens_per_patch * sizes["projector"]) / max(1.0, sizes["language"])


def _passes(net: PreTrainedModel, processor: Processor) -> dict[ParameterGroup, int]:
    """Multiplications with each matrix, by part, without that for its own gradient: two if the part or one upstream
    trains, else one."""
    training = {processor.parameter_group(name) for name, p in net.named_parameters() if p.requires_grad}
    downstream: tuple[ParameterGroup, ...] = ("vision", "projector", "language")
    return {group: 2 if training & {*downstream[: n + 1]} else 1 for n, group in enumerate(downstream)}
