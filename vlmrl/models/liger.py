"""Liger's fused kernels in place of a model's own layers, on CUDA. The only door to liger_kernel."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from vlmrl.errors import ConfigError


def apply_liger(net: PreTrainedModel, device: torch.device) -> None:
    """Fuse the norms and the gated feed-forward layers of `net`, in place.

    The log-probabilities stay those of `models.logprobs`: Liger's own cross-entropy makes its gradient in the forward
    pass, for one sum of all tokens, and a policy loss weighs each token. Rotary embeddings stay the model's, whose
    arguments differ from those that Liger's take.

    Raises ConfigError where there is no CUDA, no Liger, or no kernel of Liger's for this family.
    """
    if device.type != "cuda":
        raise ConfigError(f"ds.use_liger_kernel needs CUDA, and this run is on {device.type}: leave it out")
    try:
        from liger_kernel.transformers import monkey_patch
    except ImportError as error:
        raise ConfigError(
            "ds.use_liger_kernel: the package liger-kernel is not installed: make setup on a machine with a GPU "
            "installs it"
        ) from error
    family = net.config.model_type
    known = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
    if family not in known:
        raise ConfigError(
            f"ds.use_liger_kernel: Liger has no kernels for {family} models, only for {', '.join(sorted(known))}: "
            "leave it out"
        )
    # The function that Transformers' own trainer calls; it knows which family takes which of these.
    monkey_patch._apply_liger_kernel_to_instance(
        net, rope=False, cross_entropy=False, fused_linear_cross_entropy=False, rms_norm=True, swiglu=True
    )
