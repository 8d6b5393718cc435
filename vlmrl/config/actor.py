"""The trained model and the reference model."""

from pydantic import Field, field_validator

from vlmrl.config.base import NonNegativeFloat, PositiveInt, Section, Text, Unread, check_name
from vlmrl.config.built_in import DUAL_CLIP_LOSSES, POLICY_LOSSES, PolicyLossRow, quoted
from vlmrl.config.optimizer import OptimizerSettings, unread_of_optimizer

_TITLES = "; ".join(f"`{name}`: {row.title}" for name, row in POLICY_LOSSES.items())
_PAPER_CLIPS = "; ".join(
    f"`{name}` defaults to its paper's, {row.clip_range[0]:g} below 1 and {row.clip_range[1]:g} above"
    for name, row in POLICY_LOSSES.items()
    if row.clip_range is not None
)


class Model(OptimizerSettings):
    """The trained model."""

    model_name_or_path: Text
    """Local folder or Hub id of the model."""
    adapter_name_or_path: Text | None = None
    """Folder of an adapter to start from, as a run with `ds.lora.rank` writes it to adapter/. `eval` and `generate`
    merge it into the model that the engines load."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models whose author you trust."""
    num_nodes: PositiveInt = 1
    """Machines on which the model is trained."""
    num_gpus_per_node: PositiveInt = 1
    """Ranks per machine: one GPU each, or one CPU core each without GPUs."""
    aux_loss_coef: NonNegativeFloat = 0.0
    """Weight of the loss that balances the load of a mixture of experts (arXiv:2101.03961)."""
    gradient_checkpointing_enable: bool = False
    """Recompute activations in the backward pass: saves memory, and takes about a third more time."""
    gradient_checkpointing_reentrant: bool = False
    """Use PyTorch's older, re-entrant checkpointing."""
    freeze_visual_encoder: bool = False
    """Do not train the vision tower."""
    freeze_projector: bool = False
    """Do not train the projector between vision tower and language model."""


class Actor(Model):
    """The policy."""

    policy_loss_type: Text = Field(
        default="ppo", description=f"Policy loss. {_TITLES}; or your own, `path/to/file.py:function`."
    )
    eps_clip: NonNegativeFloat = Field(
        default=0.2, description=f"Clip range of the probability ratio, on both sides; {_PAPER_CLIPS}."
    )
    eps_clip_low_high: tuple[NonNegativeFloat, NonNegativeFloat] | None = None
    """Unequal clip range, below and above 1 (DAPO's clip-higher, arXiv:2503.14476), instead of `eps_clip`."""
    dual_clip: float | None = Field(
        default=None,
        gt=1.0,
        description=f"{quoted(DUAL_CLIP_LOSSES)}: bound on the loss of bad responses, in units of the advantage "
        "(arXiv:1912.09729); above 1.",
    )
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus: the entropy of the distribution that responses are sampled from."""

    @field_validator("policy_loss_type")
    @classmethod
    def check_loss(cls, loss: str) -> str:
        return check_name(loss, POLICY_LOSSES, "policy loss")

    @property
    def built_in_loss(self) -> PolicyLossRow | None:
        """The loss's row; None for the user's own function."""
        return POLICY_LOSSES.get(self.policy_loss_type)

    @property
    def clip_range(self) -> tuple[float, float]:
        """Distances to which the ratio is clipped, below and above 1."""
        return self.eps_clip_low_high or self.paper_clip or (self.eps_clip, self.eps_clip)

    @property
    def paper_clip(self) -> tuple[float, float] | None:
        """The clip range of the loss's paper; None if it has none or the user gives one."""
        is_given = "eps_clip" in self.model_fields_set or self.eps_clip_low_high is not None
        return None if is_given or self.built_in_loss is None else self.built_in_loss.clip_range


class Ref(Section):
    """The reference model, of the KL penalty (`algo.kl.init_coef` above 0) or of preferences (`vlmrl dpo`)."""

    model_name_or_path: Text | None = None
    """Model of the reference. By default a copy of the actor's initial weights; with `ds.lora.rank` the actor itself
    with its adapters off, which takes no extra memory."""
    num_nodes: PositiveInt = 1
    """Machines on which the reference runs."""
    num_gpus_per_node: PositiveInt = 1
    """Ranks per machine."""


def unread_of_model(model: Model) -> Unread:
    unread = unread_of_optimizer("actor", model)
    if not model.gradient_checkpointing_enable:
        unread["actor.gradient_checkpointing_reentrant"] = "actor.gradient_checkpointing_enable is off"
    return unread


def conflicts_of_model(model: Model) -> list[str]:
    if model.aux_loss_coef and model.gradient_checkpointing_enable and model.gradient_checkpointing_reentrant:
        return ["actor.gradient_checkpointing_reentrant loses the gradient of actor.aux_loss_coef: turn it off"]
    return []
