"""DeepSpeed and numerics."""

from typing import Literal

from vlmrl.config.base import Section


class Ds(Section):
    """DeepSpeed ZeRO and numerics."""

    zero_stage: Literal[0, 1, 2, 3] = 2
    """What is sharded over ranks: 1 optimizer state, 2 and gradients, 3 and weights."""
    param_dtype: Literal["bf16", "fp32"] = "bf16"
    """Precision of weights and activations."""
    adam_offload: bool = False
    """Keep the optimizer state in CPU memory."""
    attn_implementation: Literal["auto", "sdpa", "eager", "varlen"] = "auto"
    """Attention kernel: `varlen` is PyTorch's own on CUDA; auto chooses by device."""
    use_liger_kernel: bool = False
    """Fused norms and feed-forward layers by Liger, on CUDA. Log-probs never hold the logits of all tokens anyway."""
    packing_samples: bool | None = None
    """OpenRLHF's name for `train.layout`: true is shared, false is padded."""
    overlap_comm: bool = False
    """Overlap gradient communication with the backward pass."""
