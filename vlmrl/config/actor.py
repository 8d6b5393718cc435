"""The model that is trained."""

from pydantic import Field, field_validator

from vlmrl.config.base import NonNegativeFloat, PositiveInt, Section, Text, known_or_own
from vlmrl.config.optimizer import Optimized

POLICY_LOSSES = ("ppo", "gspo", "cispo")
GSPO_CLIP = (3e-4, 4e-4)
"""The clip range of GSPO's experiments (arXiv:2507.18071, section 5.1)."""


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

    policy_loss_type: Text = "ppo"
    """Policy loss: `ppo`, the clipped surrogate (arXiv:1707.06347); `gspo`, one ratio per answer (arXiv:2507.18071);
    `cispo`, which clips weights and no gradient (arXiv:2506.13585); or your own, `path/to/file.py:function`."""
    eps_clip: NonNegativeFloat = 0.2
    """Clip range of the probability ratio, both sides; `gspo`, whose ratio hardly moves, has its paper's unless given:
    0.0003 below and 0.0004 above 1."""
    eps_clip_low_high: tuple[NonNegativeFloat, NonNegativeFloat] | None = None
    """Unequal clip range, below and above 1 (DAPO's clip-higher, arXiv:2503.14476), instead of `eps_clip`."""
    dual_clip: float | None = Field(default=None, gt=1.0)
    """`ppo`: bound on the loss of bad answers, in units of the advantage (arXiv:1912.09729); above 1."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus: the entropy of the distribution that answers are sampled from."""

    @field_validator("policy_loss_type")
    @classmethod
    def check_loss(cls, loss: str) -> str:
        return known_or_own(loss, POLICY_LOSSES, "policy loss")

    @property
    def clip_range(self) -> tuple[float, float]:
        """How far the ratio may go below and above 1."""
        if self.eps_clip_low_high is not None:
            return self.eps_clip_low_high
        if self.has_paper_clip:
            return GSPO_CLIP
        return self.eps_clip, self.eps_clip

    @property
    def has_paper_clip(self) -> bool:
        """The clip range is that of GSPO's paper, because none was given."""
        is_given = "eps_clip" in self.model_fields_set or self.eps_clip_low_high is not None
        return self.policy_loss_type == "gspo" and not is_given


class Ref(Section):
    """The reference model. Exists only when `algo.kl.init_coef` is above 0."""

    model_name_or_path: Text | None = None
    """Another model as the reference. By default it is the actor's starting weights; under `ds.lora.rank` the actor
    itself with its adapters off, which takes no memory of its own."""
    num_nodes: PositiveInt = 1
    """Machines the reference runs on."""
    num_gpus_per_node: PositiveInt = 1
    """Ranks per machine."""
