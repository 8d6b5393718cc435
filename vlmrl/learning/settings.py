"""Settings of the roles that train or score models: one class per role, which builds it where it is to run.

Nothing heavy is imported until then: a driver makes settings and never meets DeepSpeed.
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
    from vlmrl.models.adapter_plan import AdapterPlan


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
    """It alone trains, and goes on from `actor.adapter_name_or_path` where that is given."""
    ema_beta: float | None = None
    """The share of the moving average of the weights that stays at each optimizer step; None: no average is kept."""

    def build(self) -> Policy:
        from vlmrl.learning.policy import Policy

        return Policy(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSettings:
    """Settings of `Reference`: all but `actor` are the policy's, so that both are asked the same question."""

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
class CriticSettings:
    """Settings of `Critic`."""

    critic: CriticSection
    """`RlConfig.resolved_critic`."""
    ds: Ds
    """Of the policy; the ZeRO stage is the critic's own."""
    loop: Loop
    columns: Columns
    vision: Vision
    total_steps: int
    """Optimizer steps of the critic in the whole run."""
    adapter: AdapterPlan | None = None
    """It and the value head alone train."""

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
    """The model that writes the responses: they must mean the same to both."""
    ds: Ds
    loop: Loop
    columns: Columns
    vision: Vision
    offload: bool = False
    """The weights are in CPU memory while nothing is scored."""
    normalize: bool = False
    """Scores are in units of the scale that the model's config.json holds."""
    separator: str | None = None
    """The text that ends a step, for `step_scores`."""

    def build(self) -> RewardModel:
        from vlmrl.learning.reward_model import RewardModel

        return RewardModel(self)
