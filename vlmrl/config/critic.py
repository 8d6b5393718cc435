"""The critic: a model that predicts what a response will be worth."""

from typing import Literal

from vlmrl.config.actor import Model
from vlmrl.config.base import Every, PositiveFloat, PositiveInt, Text
from vlmrl.config.optimizer import Adam, Optimized


class CriticAdam(Adam):
    """AdamW (arXiv:1711.05101)."""

    lr: PositiveFloat = 9e-6
    """Peak learning rate."""


class Critic(Optimized):
    """The critic, where `algo.advantage.estimator` needs one, or is your own with `critic.model_name_or_path`."""

    adam: CriticAdam = CriticAdam()
    """AdamW's settings; with `muon`, those of what Muon does not move."""
    model_name_or_path: Text | None = None
    """Local folder or Hub id of what the critic starts from; by default `reward.model_name_or_path`, or the actor's,
    without the adapter that `actor.adapter_name_or_path` may name. Gives an estimator of your own a critic."""
    num_nodes: PositiveInt = 1
    """Machines the critic is trained on."""
    num_gpus_per_node: PositiveInt = 1
    """Ranks per machine."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """What is sharded over the critic's ranks; by default `ds.zero_stage`."""
    value_clip: PositiveFloat | None = 0.5
    """A value may move by so much from that of the rollout before it stops counting; None does not clip."""
    freezing_steps: Every = -1
    """Steps at the beginning in which the critic alone learns; -1 means none."""
    save_value_network: bool = False
    """Write the final critic too, to critic/ in `ckpt.output_dir`."""
    gradient_checkpointing_enable: bool | None = None
    """Recompute activations in the backward pass; by default as the actor."""
    freeze_visual_encoder: bool | None = None
    """Do not train the vision tower; by default as the actor."""
    freeze_projector: bool | None = None
    """Do not train the projector between vision tower and language model; by default as the actor."""

    @property
    def as_model(self) -> Model:
        """The same in the words of any model that trains. For `RlConfig.whole_critic`, which leaves nothing open."""
        return Model(**{name: getattr(self, name) for name in type(self).model_fields if name in Model.model_fields})
