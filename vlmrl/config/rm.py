"""The training of reward models."""

from typing import Annotated, Literal

from pydantic import Field

from vlmrl.config.actor import Model
from vlmrl.config.base import PositiveFloat, Section, Unread
from vlmrl.config.optimizer import Adam
from vlmrl.config.pairs import PAIR_KEYS


class Rm(Section):
    """What the reward model scores, and its loss."""

    kind: Literal["outcome", "process"] = "outcome"
    """`outcome`: a model that scores whole responses learns from pairs of a chosen and a rejected response
    (`reward.model_name_or_path`). `process`: one that scores each step learns from labelled steps
    (`reward.process_model_name_or_path`)."""
    loss_type: Literal["sigmoid", "logexp"] = "sigmoid"
    """Loss of pairs: Bradley-Terry's `-log sigmoid(chosen - rejected - margin)`. `logexp`, `log(1 + exp(rejected -
    chosen + margin))`, is the same function under OpenRLHF's other name."""
    process_separator: Annotated[str, Field(min_length=1)] = "\n\n"
    """`process`: text that ends a step of a response; the last step ends with the response. Responses that are lists of
    steps are joined with it. Give the run that uses the model the same `reward.process_separator`."""


class RewardAdam(Adam):
    """AdamW (arXiv:1711.05101)."""

    lr: PositiveFloat = 9e-6
    """Peak learning rate; for adapters (`ds.lora.rank`) the default is 1e-5."""


class RewardActor(Model):
    """The trained model, which gets a score layer in place of its output layer unless it has one."""

    adam: RewardAdam = RewardAdam()
    """Settings of AdamW; with `muon`, for the weights that Muon does not update."""


def unread_of_rm(rm: Rm) -> Unread:
    if rm.kind == "outcome":
        reason = "rm.kind outcome learns from data.chosen_key and data.rejected_key"
        return dict.fromkeys(("data.label_key", "data.output_key", "rm.process_separator"), reason)
    reason = "rm.kind process learns from the steps of data.output_key and the labels of data.label_key"
    return dict.fromkeys((*(f"data.{name}" for name in PAIR_KEYS), "rm.loss_type"), reason)
