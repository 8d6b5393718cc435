"""Models over ranks, connected: each gets samples packed as the policy does."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from vlmrl.cluster.models import (
    PackingPlan,
    PolicyWithoutAdapter,
    Ranks,
    RemoteCritic,
    RemotePolicy,
    RemoteReference,
    RemoteTeacher,
    StepPlan,
)
from vlmrl.cluster.rewards import RemoteRewardModel
from vlmrl.cluster.worker_group import WorkerGroup
from vlmrl.config.reward import Reward
from vlmrl.config.roles import REWARD_MODELS
from vlmrl.config.train import Loop
from vlmrl.config.training import TrainingConfig
from vlmrl.plugins import Processor

if TYPE_CHECKING:
    from vlmrl.learning.critic import Critic
    from vlmrl.learning.policy import Policy
    from vlmrl.learning.policy_and_critic import PolicyAndCritic
    from vlmrl.learning.reference import Reference
    from vlmrl.learning.reward_model import RewardModel
    from vlmrl.learning.reward_trainer import RewardTrainer


class Learners(NamedTuple):
    """The models over ranks, except reward models."""

    policy: RemotePolicy
    reference: RemoteReference | PolicyWithoutAdapter | None = None
    critic: RemoteCritic | None = None
    teacher: RemoteTeacher | None = None


class Trained(NamedTuple):
    """Ranks of the trained models."""

    policy: WorkerGroup[Policy]
    critic: WorkerGroup[Critic | PolicyAndCritic] | None
    pair: WorkerGroup[PolicyAndCritic] | None
    """The ranks of both, if they share processes."""


def remote_critic(
    trained: Trained, ranks: Ranks[Policy], steps: StepPlan, say: Callable[[str], None]
) -> RemoteCritic | None:
    """Return the critic over its own ranks or the policy's; None without one."""
    if trained.critic is None:
        return None
    if trained.pair is not None and trained.pair.call(lambda pair: pair.shares_features())[0]:
        say("critic: in the actor's processes, with the actor's image features")
    return RemoteCritic(ranks.over(trained.critic, sequence_size=ranks.sequence_size), steps)


def remote_reference(
    config: TrainingConfig, policy: RemotePolicy, group: WorkerGroup[Reference] | None, say: Callable[[str], None]
) -> RemoteReference | PolicyWithoutAdapter:
    """Return the reference over its own ranks; without any (None), the policy with its adapters off."""
    if group is not None:
        return RemoteReference(policy.ranks.over(group))
    adapter = config.actor.adapter_name_or_path
    base = f"{config.actor.model_name_or_path}{f' without {adapter}' if adapter else ''}"
    say(f"reference: the policy with its adapters off, which is {base}")
    return PolicyWithoutAdapter(policy)


def remote_reward_models(reward: Reward, ranks: Mapping[str, Ranks[RewardModel]]) -> list[RemoteRewardModel]:
    """Return the reward models; `ranks` are those of each role."""
    outcome, process = REWARD_MODELS
    names = {outcome: "model", process: "process"}
    weights = {outcome: reward.model_weight, process: reward.process_weight}
    return [
        RemoteRewardModel(names[role], of_role, weights[role], is_process=role == process)
        for role, of_role in ranks.items()
    ]


def packing_plan(
    model: WorkerGroup[Policy | RewardTrainer | RewardModel],
    loop: Loop,
    processor: Processor,
    say: Callable[[str], None],
    *,
    sequence_size: int = 1,
) -> PackingPlan:
    """Return the packing of samples, which depends on the model: patch cost and recurrent layers.

    `sequence_size` ranks share the tokens of a pack.
    """
    patch_cost, is_recurrent = model.call(lambda model: model.traits())[0]
    if processor.resize_factor is not None:
        say(f"a vision patch costs as much as {patch_cost:.2f} language tokens")
    if is_recurrent and loop.layout != "padded":
        say(f"train.layout padded instead of {loop.layout}: recurrent layers would mix the samples of a pack")
    return PackingPlan(
        layout="padded" if is_recurrent else loop.layout,
        max_tokens=loop.max_tokens_per_gpu * sequence_size,
        max_samples=loop.micro_batch_size,
        # Tokens are shared by the ranks, but each encodes all images of a pack.
        image_cost=lambda image: sequence_size * patch_cost * math.prod(processor.grid(image.size)),
        filler=processor.dummy_sample(),
    )
