"""Settings of the roles that train or score models: one class per role, whose `build` runs in the role's process.

Nothing heavy is imported until then: the driver makes settings without importing DeepSpeed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlmrl.config.actor import Model
from vlmrl.config.critic import Critic as CriticSection
from vlmrl.config.data import Columns
from vlmrl.config.ds import Ds
from vlmrl.config.train import Loop
from vlmrl.config.vision import Vision

if TYPE_CHECKING:
    from vlmrl.algorithms.losses import PolicyLoss
    from vlmrl.learning.critic import Critic
    from vlmrl.learning.policy import Policy
    from vlmrl.learning.policy_and_critic import PolicyAndCritic
    from vlmrl.learning.reference import Reference
    from vlmrl.learning.reward_model import RewardModel
    from vlmrl.learning.reward_trainer import RewardTrainer
    from vlmrl.learning.teacher import Teacher
    from vlmrl.models.adapter_plan import AdapterPlan
    from vlmrl.models.divergence import Direction


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSettings:
    """Settings that all roles have."""

    ds: Ds
    columns: Columns
    vision: Vision


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSettings(RoleSettings):
    """Settings that all trained models have."""

    loop: Loop
    total_steps: int
    """Optimizer steps of the model in the whole run."""
    adapter: AdapterPlan | None = None
    """Only this adapter trains, and a score layer or value head if the model has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenSettings(RoleSettings):
    """Settings of a frozen model that scores the responses of another."""

    path: str
    """Folder or Hub id of the model."""
    flag: str
    """The setting that `path` came from, for messages."""
    actor: Model
    """The model that generates the responses; both must use the same tokens and image processing."""
    loop: Loop
    offload: bool = False
    """Keep the weights in main memory while nothing is scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerTeacherSettings:
    """Settings of the teacher of supervised training, in the student's process; the rest are the student's."""

    path: str
    """Folder or Hub id of the teacher."""
    direction: Direction
    coef: float
    """Weight of the divergence, from above 0 to 1; the rest is that of the negative log-likelihood."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings(TrainedSettings):
    """Settings of `Policy`. An adapter starts from `actor.adapter_name_or_path` if that is set."""

    actor: Model
    loss: PolicyLoss | None
    """None for supervised training."""
    temperature: float
    bans: bool
    """Log-probs are of the distribution without the tokens that the engines never sample."""
    teacher: InnerTeacherSettings | None = None
    """For supervised training only."""
    ema_beta: float | None = None
    """Decay of the moving average of the weights per optimizer step; None: no average."""
    replays_experts: bool = False
    """Passes take the experts that the engines chose."""

    def build(self) -> Policy:
        from vlmrl.learning.policy import Policy

        return Policy(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSettings(RoleSettings):
    """Settings of `Reference`: all but `actor` are the policy's, so that both score the same distribution."""

    actor: Model
    temperature: float
    bans: bool

    def build(self) -> Reference:
        from vlmrl.learning.reference import Reference

        return Reference(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSettings(FrozenSettings):
    """Settings of `Teacher`. Temperature and bans are the policy's, so that both score the same distribution."""

    temperature: float
    bans: bool

    def build(self) -> Teacher:
        from vlmrl.learning.teacher import Teacher

        return Teacher(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSettings(TrainedSettings):
    """Settings of `Critic`. `ds` is the policy's; the ZeRO stage is `critic.zero_stage`."""

    critic: CriticSection
    """`RlConfig.resolved_critic`."""

    def build(self) -> Critic:
        from vlmrl.learning.critic import Critic

        return Critic(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyAndCriticSettings:
    """Settings of `PolicyAndCritic`."""

    policy: PolicySettings
    critic: CriticSettings

    def build(self) -> PolicyAndCritic:
        from vlmrl.learning.policy_and_critic import PolicyAndCritic

        return PolicyAndCritic(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelSettings(FrozenSettings):
    """Settings of `RewardModel`."""

    normalize: bool = False
    """Normalize scores by the mean and deviation in the model's config.json."""
    separator: str | None = None
    """The text that ends a step, for `step_scores`."""

    def build(self) -> RewardModel:
        from vlmrl.learning.reward_model import RewardModel

        return RewardModel(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTrainerSettings(TrainedSettings):
    """Settings of `RewardTrainer`. An adapter starts from `actor.adapter_name_or_path` if that is set."""

    actor: Model

    def build(self) -> RewardTrainer:
        from vlmrl.learning.reward_trainer import RewardTrainer

        return RewardTrainer(self)
