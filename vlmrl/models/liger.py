"""Liger's fused kernels for a model's layers, on CUDA. The only file that imports liger_kernel."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from vlmrl.errors import ConfigError


def apply_liger(net: PreTrainedModel, device: torch.device) -> None:
    """Fuse the norms and the gated feed-forward layers of `net`, in place.

    Log-probs stay those of `models.logprobs`: Liger's cross-entropy computes its gradient in the forward pass, for the
    sum over tokens, but a policy loss weights each token. Rotary embeddings stay the model's: their arguments differ
    from those of Liger's.

    Raises ConfigError without CUDA, without Liger, or when Liger has no kernels for the model's family.
    """
    if device.type != "cuda":
        raise ConfigError(f"ds.use_liger_kernel needs CUDA, and this run is on {device.type}: leave it out")
    try:
        from liger_kernel.transformers import monkey_patch
    except ImportError as error:
        raise ConfigError(
            "ds.use_liger_kernel: the package liger-kernel is not installed: run make setup on a machine with a GPU"
        ) from error
    family = net.config.model_type
    known = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
    if family not in known:
        raise ConfigError(
            f"ds.use_liger_kernel: Liger has no kernels for {family} models, only for {', '.join(sorted(known))}: "
            "leave it out"
        )
    # Transformers' trainer calls this function too; it passes each family the options that it takes.
    monkey_patch._apply_liger_kernel_to_instance(
        net, rope=False, cross_entropy=False, fused_linear_cross_entropy=False, rms_norm=True, swiglu=True
    )
