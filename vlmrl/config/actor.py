"""The model that is trained."""

from typing import Literal

from pydantic import Field

from vlmrl.config.base import NonNegativeFloat, PositiveInt, Section, Text
from vlmrl.config.optimizer import Optimized


class Model(Optimized):
    """The trained model, whatever the verb."""

    model_name_or_path: Text
    """Local folder or Hub id of the model."""
    adapter_name_or_path: Text | None = None
    """Folder of an adapter of this model to go on from, as a run with `ds.lora.rank` leaves it in adapter/."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off unless you trust its author."""
    num_nodes: PositiveInt = 1
    """Machines the model is trained on."""
    num_gpus_per_node: PositiveInt = 1
    """Ranks per machine: one GPU each, or one CPU core each where there is no GPU."""
    gradient_checkpointing_enable: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    gradient_checkpointing_reentrant: bool = False
    """Use PyTorch's older, re-entrant checkpointing."""
    freeze_visual_encoder: bool = False
    """Do not train the vision tower."""
    freeze_projector: bool = False
    """Do not train the projector between vision tower and language model."""


class Actor(Model):
    """The policy."""

    policy_loss_type: Literal["ppo"] = "ppo"
    """Policy loss: `ppo` is the clipped surrogate (arXiv:1707.06347)."""
    eps_clip: NonNegativeFloat = 0.2
    """Clip range of the probability ratio, both sides."""
    eps_clip_low_high: tuple[NonNegativeFloat, NonNegativeFloat] | None = None
    """Unequal clip range, below and above 1 (DAPO's clip-higher, arXiv:2503.14476), instead of `eps_clip`."""
    dual_clip: float | None = Field(default=None, gt=1.0)
    """Bound on the loss of bad answers, in units of the advantage (arXiv:1912.09729); above 1."""


class Ref(Section):
    """The reference model. Exists only when `algo.kl.init_coef` is above 0."""

    model_name_or_path: Text | None = None
    """Another model as the reference. By default it is the actor's starting weights; under `ds.lora.rank` the actor
    itself with its adapters off, which takes no memory of its own."""
    num_nodes: PositiveInt = 1
    """Machines the reference runs on."""
    num_gpus_per_node: PositiveInt = 1
    """Ranks per machine."""
