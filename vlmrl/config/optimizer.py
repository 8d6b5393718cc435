"""The optimizer and the schedule of its learning rate."""

from typing import Annotated, Literal

from pydantic import Field

from vlmrl.config.base import Fraction, NonNegativeFloat, PositiveFloat, Section, Unread
from vlmrl.config.names import settings

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class Adam(Section):
    """AdamW (arXiv:1711.05101)."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate; for adapters (`ds.lora.rank`) the default is 1e-5."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay rates of the first and second moments."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""


class Muon(Section):
    """Muon (kellerjordan.github.io/posts/muon), DeepSpeed's, for the matrices inside the layers: five
    Newton-Schulz steps and Nesterov momentum."""

    lr: PositiveFloat = 0.02
    """Peak learning rate of the matrices; the rest (embeddings, output layer, norms, biases) takes `adam.lr`."""
    momentum: Beta = 0.95
    """Decay rate of the momentum."""


class OptimizerSettings(Section):
    """The optimizer of a trained model."""

    optim: Literal["adam", "adam_8bit", "adam_paged", "adam_8bit_paged", "muon"] = "adam"
    """Optimizer: AdamW; bitsandbytes' AdamW with a state of 8 bits, paged to CPU memory, or both (CUDA); or Muon."""
    adam: Adam = Adam()
    """Settings of AdamW; with `muon`, for the weights that Muon does not update."""
    muon: Muon = Muon()
    """Settings of Muon."""
    lr_scheduler: Literal["cosine_with_min_lr", "linear", "constant", "constant_with_warmup"] = "cosine_with_min_lr"
    """Shape of the learning rate over the run."""
    lr_warmup_ratio: Fraction = 0.03
    """Fraction of the optimizer steps spent rising to the peak learning rate."""
    min_lr_ratio: Fraction = 0.1
    """Floor of the cosine schedule, as a fraction of the peak."""
    max_norm: NonNegativeFloat = 1.0
    """Gradients are clipped to this norm; 0 turns clipping off."""


def unread_of_optimizer(role: str, optimizer: OptimizerSettings) -> Unread:
    """`role` is `actor` or `critic`."""
    unread: Unread = {}
    if optimizer.lr_scheduler != "cosine_with_min_lr":
        unread[f"{role}.min_lr_ratio"] = f"only {role}.lr_scheduler cosine_with_min_lr has a floor"
    if optimizer.lr_scheduler == "constant":
        reason = f"{role}.lr_scheduler constant does not warm up (constant_with_warmup does)"
        unread[f"{role}.lr_warmup_ratio"] = reason
    if optimizer.optim != "muon":
        unread |= dict.fromkeys(settings(Muon, f"{role}.muon."), f"{role}.optim is {optimizer.optim}")
    else:
        unread[f"{role}.max_norm"] = f"{role}.optim muon takes steps of a fixed size, regardless of the gradient's norm"
    return unread
