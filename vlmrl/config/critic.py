"""The critic: a model that predicts the return of a response."""

from typing import Literal

from vlmrl.config.actor import Model
from vlmrl.config.base import PositiveFloat, PositiveInt, StepInterval, Text
from vlmrl.config.optimizer import Adam, OptimizerSettings


class CriticAdam(Adam):
    """AdamW (arXiv:1711.05101)."""

    lr: PositiveFloat = 9e-6
    """Peak learning rate."""


class Critic(OptimizerSettings):
    """The critic, for an `algo.advantage.estimator` that needs one, or your own with `critic.model_name_or_path`."""

    adam: CriticAdam = CriticAdam()
    """Settings of AdamW; with `muon`, for the weights that Muon does not update."""
    model_name_or_path: Text | None = None
    """Local folder or Hub id of the critic's initial model; by default `reward.model_name_or_path`, else the actor's,
    without the adapter of `actor.adapter_name_or_path`. Gives your own estimator a critic."""
    num_nodes: PositiveInt = 1
    """Machines on which the critic is trained."""
    num_gpus_per_node: PositiveInt = 1
    """Ranks per machine."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """ZeRO stage of the critic; by default `ds.zero_stage`."""
    value_clip: PositiveFloat | None = 0.5
    """Clip range of the values around those of the rollout; None does not clip."""
    freezing_steps: StepInterval = -1
    """Initial steps in which only the critic is trained; -1 means none."""
    save_value_network: bool = False
    """Also write the final critic, to critic/ in `ckpt.output_dir`."""
    gradient_checkpointing_enable: bool | None = None
    """Recompute activations in the backward pass; by default like the actor."""
    freeze_visual_encoder: bool | None = None
    """Do not train the vision tower; by default like the actor."""
    freeze_projector: bool | None = None
    """Do not train the projector between vision tower and language model; by default like the actor."""

    @property
    def as_model(self) -> Model:
        """The same settings as a `Model`. Only for `RlConfig.resolved_critic`, in which no setting is None."""
        return Model(**{name: getattr(self, name) for name in type(self).model_fields if name in Model.model_fields})
