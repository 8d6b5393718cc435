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
class InnerTeacherSettings:
    """Settings of the teacher of supervised training, in the student's process; the rest are the student's."""

    path: str
    """Folder or Hub id of the teacher."""
    direction: Direction
    coef: float
    """Weight of the divergence, from above 0 to 1; the rest is that of the negative log-likelihood."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """Settings of `Policy`."""

    actor: Model
    ds: Ds
    loop: Loop
    columns: Columns
    vision: Vision
    total_steps: int
    """Optimizer steps of the whole run."""
    loss: PolicyLoss | None
    """None for supervised training."""
    temperature: float
    bans: bool
    """Log-probs are of the distribution without the tokens that the engines never sample."""
    adapter: AdapterPlan | None = None
    """Only this adapter trains, starting from `actor.adapter_name_or_path` if that is set."""
    teacher: InnerTeacherSettings | None = None
    """For supervised training only."""
    ema_beta: float | None = None
    """Decay of the moving average of the weights per optimizer step; None: no average."""

    def build(self) -> Policy:
        from vlmrl.learning.policy import Policy

        return Policy(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSettings:
    """Settings of `Reference`: all but `actor` are the policy's, so that both score the same distribution."""

    actor: Model
    ds: Ds
    columns: Columns
    vision: Vision
    temperature: float
    bans: bool

    def build(self) -> Reference:
        from vlmrl.learning.reference import Reference

        return Reference(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSettings:
    """Settings of `Teacher`. Temperature and bans are the policy's, so that both score the same distribution."""

    path: str
    """Folder or Hub id of the teacher."""
    flag: str
    """The setting that `path` came from, for messages."""
    actor: Model
    """The student; both must use the same tokens and image processing."""
    ds: Ds
    loop: Loop
    columns: Columns
    vision: Vision
    temperature: float
    bans: bool
    offload: bool = False
    """Keep the weights in main memory while nothing is scored."""

    def build(self) -> Teacher:
        from vlmrl.learning.teacher import Teacher

        return Teacher(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSettings:
    """Settings of `Critic`."""

    critic: CriticSection
    """`RlConfig.resolved_critic`."""
    ds: Ds
    """Those of the policy; the ZeRO stage is `critic.zero_stage`."""
    loop: Loop
    columns: Columns
    vision: Vision
    total_steps: int
    """Optimizer steps of the critic in the whole run."""
    adapter: AdapterPlan | None = None
    """Only this adapter and the value head train."""

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
class RewardModelSettings:
    """Settings of `RewardModel`."""

    path: str
    """Folder or Hub id of the model."""
    flag: str
    """The setting that `path` came from, for messages."""
    actor: Model
    """The model that generates the responses; both must use the same tokens and image processing."""
    ds: Ds
    loop: Loop
    columns: Columns
    vision: Vision
    offload: bool = False
    """Keep the weights in main memory while nothing is scored."""
    normalize: bool = False
    """Normalize scores by the mean and deviation in the model's config.json."""
    separator: str | None = None
    """The text that ends a step, for `step_scores`."""

    def build(self) -> RewardModel:
        from vlmrl.learning.reward_model import RewardModel

        return RewardModel(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTrainerSettings:
    """Settings of `RewardTrainer`."""

    actor: Model
    ds: Ds
    loop: Loop
    columns: Columns
    vision: Vision
    total_steps: int
    """Optimizer steps of the whole run."""
    adapter: AdapterPlan | None = None
    """Only this adapter and the score layer train, starting from `actor.adapter_name_or_path` if that is set."""

    def build(self) -> RewardTrainer:
        from vlmrl.learning.reward_trainer import RewardTrainer

        return RewardTrainer(self)
