"""Write the weights of experts in the layout of their family's checkpoints."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, Transpose, WeightConverter


class ReversibleTranspose(Transpose):
    """A transpose of tensors that are not in the model's layout yet, whose reverse always transposes.

    Published checkpoints of Qwen3-VL-MoE hold [experts, in, out], the model [experts, out, in]. Transformers transposes
    where the shapes differ. When it saves, it compares the model's tensor with the model's shape, finds them equal, and
    leaves the tensor as it is: it could read such a file itself, but vLLM could not.
    """

    @property
    def reverse_op(self) -> ConversionOps:
        return Transpose(dim0=self.dim1, dim1=self.dim0)


def keep_checkpoint_layout(net: PreTrainedModel) -> None:
    """Make `save_pretrained` and `revert_weight_conversion` write experts as the family's checkpoints hold them."""
    conversions = getattr(net, "_weight_conversions", None)
    is_made = conversions is None
    if conversions is None:
        conversions = get_model_conversion_mapping(net, add_legacy=False)
    converters = [c for c in conversions if isinstance(c, WeightConverter) and any(map(_is_checked, c.operations))]
    for converter in converters:
        converter.operations = [_reversible(op) if _is_checked(op) else op for op in converter.operations]
    if converters and is_made:
        net._weight_conversions = conversions


def _is_checked(operation: ConversionOps) -> bool:
    return type(operation) is Transpose and operation.check_dims


def _reversible(operation: Any) -> ReversibleTranspose:
    return ReversibleTranspose(operation.dim0, operation.dim1, check_dims=True)
