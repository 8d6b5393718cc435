"""Settings that the verbs have in common which train a model, or sample responses."""

from typing import Self

from pydantic import model_validator

from vlmrl.config import actor, adapters, agent, ckpt, data, ds, experts, vision
from vlmrl.config.actor import Model
from vlmrl.config.agent import Agent
from vlmrl.config.base import Unread
from vlmrl.config.ckpt import Ckpt, Logger
from vlmrl.config.data import Columns, Data
from vlmrl.config.ds import Ds
from vlmrl.config.gateway import Gateway
from vlmrl.config.lora import ADAPTER_RATE
from vlmrl.config.names import is_given
from vlmrl.config.reward import Scoring
from vlmrl.config.rollout import Rollout
from vlmrl.config.train import AgentLoop, Loop
from vlmrl.config.verb_base import VerbConfig
from vlmrl.config.vision import Vision


class TrainingConfig(VerbConfig):
    """The settings that all training verbs have."""

    actor: Model
    data: Data
    vision: Vision = Vision()
    train: Loop = Loop()
    ds: Ds = Ds()
    ckpt: Ckpt = Ckpt()
    logger: Logger = Logger()

    def unread(self) -> Unread:
        lora = self.ds.lora
        return (
            actor.unread_of_model(self.actor)
            | data.unread_of_columns(self.data)
            | ckpt.unread_of_output(self.ckpt, self.logger)
            | ds.unread_of_ds(self.ds)
            | adapters.unread_of_adapters(self.ds)
            | vision.unread_of_vision(
                self.actor,
                is_adapted=adapters.reaches_vision(self.actor, lora) if lora.rank else None,
                has_other_frozen_tower=self.has_other_frozen_tower,
            )
        )

    @property
    def has_other_frozen_tower(self) -> bool:
        """Another model than the actor has a frozen vision tower."""
        return False

    @property
    def pools(self) -> list[frozenset[str]]:
        """Sets of roles that share devices and use them in turn."""
        return []

    @property
    def has_reference(self) -> bool:
        """The run has a separate reference model."""
        return False

    @property
    def reference_is_base(self) -> bool:
        """The reference is the actor with its adapters off, not a separate model."""
        return False

    @property
    def _num_ranks(self) -> dict[str, int]:
        """For each trained model, the settings of its ranks -> their number."""
        return {
            "actor.num_nodes x actor.num_gpus_per_node": self.actor.num_nodes * self.actor.num_gpus_per_node,
        }

    @property
    def _zero_stages(self) -> dict[str, tuple[int | None, str]]:
        """For each trained model: the setting of its ZeRO stage -> that stage, and the optimizer."""
        return {"ds.zero_stage": (self.ds.zero_stage, self.actor.optim)}

    def conflicts(self) -> list[str]:
        return [
            *actor.conflicts_of_model(self.actor),
            *data.conflicts_of_data(self.data),
            *ds.conflicts_of_ds(self.ds, self.train),
            *ds.conflicts_of_sequence(self.ds, self._num_ranks),
            *experts.conflicts_of_experts(self.ds, self._num_ranks, self._zero_stages),
            *adapters.conflicts_of_adapters(self.actor, self.ds),
        ]

    @model_validator(mode="after")
    def resolve_layout(self) -> Self:
        """Apply `ds.packing_samples` to `train.layout`."""
        if self.ds.packing_samples is not None and not is_given(self.train, "layout"):
            # The settings are frozen, and this validator is still constructing them.
            self.__dict__["train"] = self.train.model_copy(update={"layout": ds.layout(self.ds.packing_samples)})
        return self

    @model_validator(mode="after")
    def resolve_rate(self) -> Self:
        """Set the default learning rate of adapters, which is higher than that of full weights."""
        if self.ds.lora.rank and not is_given(self.actor, "adam.lr"):
            adam = self.actor.adam.model_copy(update={"lr": ADAPTER_RATE})
            self.__dict__["actor"] = self.actor.model_copy(update={"adam": adam})
        return self


class AgentConfig(VerbConfig):
    """The settings of verbs that sample responses."""

    actor: Model
    data: Columns
    train: AgentLoop
    reward: Scoring
    rollout: Rollout
    agent: Agent
    gateway: Gateway

    @property
    def has_agent(self) -> bool:
        """Responses are conversations with an environment."""
        return self.train.agent_func_path is not None

    @property
    def max_response_tokens(self) -> int:
        """Length of the longest possible response, in sampled tokens."""
        return agent.longest_response(self.agent, self.rollout, has_agent=self.has_agent)

    @property
    def max_sequence_tokens(self) -> int:
        """Length of the longest possible prompt with its response, in tokens."""
        return agent.longest_sequence(self.agent, self.rollout, max_len=self.data.max_len, has_agent=self.has_agent)

    @property
    def settings_of_length(self) -> str:
        """The settings that `max_sequence_tokens` follows from, with their values."""
        return agent.settings_of_length(self.agent, self.rollout, max_len=self.data.max_len, has_agent=self.has_agent)

    @model_validator(mode="after")
    def drop_default_rewards(self) -> Self:
        """Drop the default reward functions where an environment gives rewards and the user names no functions."""
        if self.has_agent and not is_given(self.reward, "functions"):
            self.__dict__["reward"] = self.reward.model_copy(update={"functions": {}})
        return self
