"""Check that the attention of a model knows where the samples of a row begin: models are free to ignore it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel, masking_utils

from vlmrl.errors import ConfigError
from vlmrl.models.attention import isolates_samples, watched_attention
from vlmrl.models.linear_attention import ATTENTION_TYPES


@contextmanager
def checked_attention(net: PreTrainedModel, inputs: Mapping[str, Any]) -> Iterator[None]:
    """Raise ConfigError at the end of the context, which is a pass over these `inputs` of `models.inputs`, if a layer
    attends by code of its own or without the attention plan, or if Transformers' mask ignores the positions.
    """
    if isolates_samples(net):
        plan = inputs.get("attention_plan")
        with watched_attention() as seen:
            yield
        text = net.config.get_text_config()
        kinds = getattr(text, "layer_types", None) or ("full_attention",) * int(text.num_hidden_layers)
        expected = sum(kind in ATTENTION_TYPES for kind in kinds)
        modules = net.base_model.get_decoder().modules()
        number = sum(id(module) in seen and seen[id(module)] is plan for module in modules)
        if number < expected:
            raise ConfigError(
                f"{expected - number} of the {expected} layers of {type(net).__name__} attend by code of their own, "
                "which knows nothing of packed samples: set ds.attn_implementation to sdpa or eager, and train.layout "
                "to padded"
            )
    elif "attention_mask" in inputs:  # each row is one sample
        yield
    else:
        with _watched_masks() as calls:
            yield
        if not calls:
            raise ConfigError(
                f"the attention mask of {type(net).__name__} lets packed samples attend to each other with this "
                "ds.attn_implementation: set it to auto, or train.layout to padded"
            )


@contextmanager
def _watched_masks() -> Iterator[list[bool]]:
    """Collect the calls of the function by which Transformers finds the samples of a row in the positions."""
    calls: list[bool] = []
    find = masking_utils.find_packed_sequence_indices

    def watched(*args: Any, **kwargs: Any) -> Any:
        calls.append(True)
        return find(*args, **kwargs)

    masking_utils.find_packed_sequence_indices = watched
    try:
        yield calls
    finally:
        masking_utils.find_packed_sequence_indices = find
