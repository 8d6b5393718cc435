"""Settings of a run's roles, from the run's configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from vlmrl.agents.settings import AgentEngineSettings, EnvironmentSettings, attempt_limit_s
from vlmrl.algorithms.corrections import Correction
from vlmrl.algorithms.losses import PolicyLoss
from vlmrl.algorithms.preference_loss import PreferenceLoss
from vlmrl.cluster.data import SourceSettings, put, row_requirements
from vlmrl.cluster.rewards import RewarderSettings
from vlmrl.config.base import is_function_spec
from vlmrl.config.bench_verbs import RolloutBench
from vlmrl.config.data import Columns
from vlmrl.config.ds import Ds
from vlmrl.config.num_steps import optimizer_steps
from vlmrl.config.roles import REWARD_MODELS
from vlmrl.config.stages import DpoConfig, RmConfig, SftConfig, SupervisedConfig
from vlmrl.config.training import TrainingConfig
from vlmrl.config.verbs import EvalConfig, RlConfig
from vlmrl.config.vision import Vision
from vlmrl.learning.settings import (
    CriticSettings,
    InnerTeacherSettings,
    PolicySettings,
    ReferenceSettings,
    RewardModelSettings,
    RewardTrainerSettings,
    TeacherSettings,
)
from vlmrl.models.adapter_plan import AdapterPlan
from vlmrl.observe.run_folder import RunFolder
from vlmrl.rewards.client import read_token
from vlmrl.rollout.capacity import MIN_PROMPTS_AT_ONCE, Demand, prompts_at_once
from vlmrl.rollout.settings import EngineSettings

if TYPE_CHECKING:
    from vlmrl.rollout.engine import RolloutEngine


def source_settings(config: TrainingConfig | EvalConfig | RolloutBench) -> SourceSettings:
    """Settings of the source of prompts."""
    return SourceSettings(
        model=config.actor.model_name_or_path,
        trust_remote_code=config.actor.trust_remote_code,
        data=config.data,
        evaluation=config.eval if isinstance(config, RlConfig | SupervisedConfig | EvalConfig) else None,
        seed=config.train.seed,
        functions=tuple(config.reward.functions) if isinstance(config, RlConfig | EvalConfig) else (),
        requirements=row_requirements(config),
        epochs=config.train.max_epochs if isinstance(config, SupervisedConfig) else None,
        environments=environment_settings(config) if isinstance(config, RlConfig | EvalConfig) else None,
    )


def rewarder_settings(config: RlConfig | EvalConfig) -> RewarderSettings | None:
    """Settings of reward functions and servers; None if the run has neither and only models score responses."""
    reward = config.reward
    if not reward.functions and reward.remote_url is None:
        return None
    if reward.user_function is not None:
        # The worker has another working directory than the user.
        reward = reward.model_copy(update={"remote_url": absolute(reward.user_function)})
    log = RunFolder(Path(config.ckpt.output_dir).expanduser().absolute()).reward_log
    return RewarderSettings(reward=reward, token=read_token(), log=log, label_key=config.data.label_key)


def environment_settings(config: RlConfig | EvalConfig) -> EnvironmentSettings | None:
    """Settings of the environments; None without an agent."""
    if config.train.agent_func_path is None:
        return None
    log = RunFolder(Path(config.ckpt.output_dir).expanduser().absolute()).agent_log
    spec = absolute(config.train.agent_func_path)
    return EnvironmentSettings(spec=spec, agent=config.agent, columns=config.data, log=log)


def engine_builder(config: RlConfig | EvalConfig, adapter: AdapterPlan | None = None) -> Callable[[], RolloutEngine]:
    """Return what builds an engine in its process: one that plays episodes, if the run has an environment."""
    settings, environments = engine_settings(config, adapter), environment_settings(config)
    if environments is None:
        return settings.build
    return AgentEngineSettings(engine=settings, environments=environments, share=put, gateway=config.gateway).build


def generation_limit_s(config: RlConfig | EvalConfig) -> float:
    """Return the seconds in which an engine must finish the responses to one of its prompts.

    With an environment these are episodes with all their attempts, which may have to be played one after the other.
    """
    limit_s, agent = config.vllm.generate_timeout_s, config.agent
    if not config.has_agent:
        return limit_s
    from vlmrl.agents.environments import NUM_ALONE

    num_episodes = config.eval.n_samples_per_prompt
    if isinstance(config, RlConfig):
        num_episodes = max(num_episodes, config.rollout.n_samples_per_prompt)
    rounds = -(-num_episodes // (agent.num_workers or NUM_ALONE))
    return rounds * (limit_s + (agent.max_retries + 1) * attempt_limit_s(agent))


def engine_settings(config: RlConfig | EvalConfig, adapter: AdapterPlan | None = None) -> EngineSettings:
    """Settings of an engine. It makes room for `adapter`, the policy's, if it can apply that itself."""
    return EngineSettings(
        model=config.actor.model_name_or_path,
        vllm=config.vllm,
        columns=config.data,
        trust_remote_code=config.actor.trust_remote_code,
        dtype=config.ds.param_dtype,
        max_model_len=config.max_sequence_tokens,
        max_images=config.agent.max_images if config.has_agent else config.data.max_images_per_prompt,
        top_p=config.rollout.top_p,
        temperature=config.rollout.temperature,
        name="vllm",
        adapter=adapter if adapter is not None and adapter.fits_engine else None,
        returns_experts=isinstance(config, RlConfig) and config.algo.routing_replay,
        demand=demand(config),
    )


class _OfEveryRole(TypedDict):
    ds: Ds
    columns: Columns
    vision: Vision


def _of_every_role(config: TrainingConfig | EvalConfig) -> _OfEveryRole:
    """Settings that all roles with a model have."""
    vision = Vision() if isinstance(config, EvalConfig) else config.vision
    return {"ds": config.ds, "columns": config.data, "vision": vision}


def policy_settings(config: TrainingConfig, adapter: AdapterPlan | None, num_rows: int) -> PolicySettings:
    """Settings of the policy. `num_rows` counts the training data."""
    rl = config if isinstance(config, RlConfig) else None
    frozen = max(0, rl.critic.freezing_steps) if rl is not None and rl.has_critic else 0
    return PolicySettings(
        actor=config.actor,
        loop=config.train,
        **_of_every_role(config),
        total_steps=optimizer_steps(config, num_rows, frozen=frozen),
        loss=None if rl is None else policy_loss(rl),
        temperature=1.0 if rl is None else rl.rollout.temperature,
        bans=rl is not None and rl.rollout.top_p == 1.0,
        adapter=adapter,
        teacher=inner_teacher(config) if isinstance(config, SftConfig) else None,
        ema_beta=rl.train.ema_beta if rl is not None and rl.train.enable_ema else None,
        replays_experts=rl is not None and rl.algo.routing_replay,
    )


def reward_trainer_settings(config: RmConfig, adapter: AdapterPlan | None, num_rows: int) -> RewardTrainerSettings:
    """Settings of the reward model that a run trains. `num_rows` counts the training data."""
    return RewardTrainerSettings(
        actor=config.actor,
        loop=config.train,
        **_of_every_role(config),
        total_steps=optimizer_steps(config, num_rows),
        adapter=adapter,
    )


def inner_teacher(config: SftConfig) -> InnerTeacherSettings | None:
    """Settings of the teacher in the policy's processes; None without one."""
    sft = config.sft
    if sft.teacher_model_name_or_path is None:
        return None
    return InnerTeacherSettings(path=sft.teacher_model_name_or_path, direction=sft.distill_kl, coef=sft.distill_coef)


def critic_settings(config: RlConfig, adapter: AdapterPlan | None, num_rows: int) -> CriticSettings:
    """Settings of the critic. `adapter` is its own; `num_rows` counts the training data."""
    return CriticSettings(
        critic=config.resolved_critic,
        adapter=adapter,
        loop=config.train,
        **_of_every_role(config),
        total_steps=optimizer_steps(config, num_rows),
    )


def reference_settings(config: RlConfig | DpoConfig) -> ReferenceSettings:
    """Settings of the reference model."""
    path = config.ref.model_name_or_path or config.actor.model_name_or_path
    rollout = config.rollout if isinstance(config, RlConfig) else None
    return ReferenceSettings(
        actor=config.actor.model_copy(update={"model_name_or_path": path}),
        **_of_every_role(config),
        temperature=1.0 if rollout is None else rollout.temperature,
        bans=rollout is not None and rollout.top_p == 1.0,
    )


def teacher_settings(config: RlConfig) -> TeacherSettings | None:
    """Settings of the teacher; None without one."""
    distill = config.algo.distill
    if distill.teacher_model_name_or_path is None:
        return None
    return TeacherSettings(
        path=distill.teacher_model_name_or_path,
        flag="algo.distill.teacher_model_name_or_path",
        actor=config.actor,
        loop=config.train,
        **_of_every_role(config),
        temperature=config.rollout.temperature,
        bans=config.rollout.top_p == 1.0,
        offload=distill.offload,
    )


def reward_model_settings(config: RlConfig | EvalConfig) -> dict[str, RewardModelSettings]:
    """Role -> settings, for the reward models of the run."""
    reward = config.reward
    outcome, process = REWARD_MODELS
    paths = {outcome: reward.model_name_or_path, process: reward.process_model_name_or_path}
    flags = {outcome: "reward.model_name_or_path", process: "reward.process_model_name_or_path"}
    return {
        role: RewardModelSettings(
            path=path,
            flag=flags[role],
            actor=config.actor,
            loop=config.train,
            **_of_every_role(config),
            offload=reward.offload,
            normalize=role == outcome and reward.normalize_enable,
            separator=reward.process_separator if role == process else None,
        )
        for role, path in paths.items()
        if path is not None
    }


def policy_loss(config: RlConfig) -> PolicyLoss:
    """Return the policy loss of the run."""
    actor, advantage, kl = config.actor, config.algo.advantage, config.algo.kl
    low, high = actor.clip_range
    correction = Correction(advantage.is_correction_type, *advantage.correction_range)
    return PolicyLoss(
        # Ranks have another working directory than the user.
        kind=absolute(actor.policy_loss_type) if is_function_spec(actor.policy_loss_type) else actor.policy_loss_type,
        clip_low=low,
        clip_high=high,
        dual_clip=actor.dual_clip,
        kl_estimator=kl.estimator,
        kl_early_stop=kl.early_stop,
        entropy_coef=actor.entropy_coef,
        correction=correction if advantage.is_correction_enable else None,
        aggregation=config.aggregation,
        max_tokens=config.max_response_tokens,
    )


def demand(config: RlConfig | EvalConfig | RolloutBench) -> Demand:
    """Maximum numbers of requests that one engine of the run has in flight."""
    num_engines, rollout = config.vllm.num_engines, config.rollout
    longest = config.data.max_len
    if not isinstance(config, RolloutBench) and config.has_agent:
        longest = config.agent.context_len
    if isinstance(config, EvalConfig):
        prompts = prompts_at_once(config.eval.max_samples, num_engines)
        return Demand(prompts * config.eval.n_samples_per_prompt, prompts, longest)
    if isinstance(config, RolloutBench):
        prompts = prompts_at_once(rollout.batch_size, num_engines)
        return Demand(prompts * max(config.bench.n_samples_per_prompt), prompts, config.data.max_len)
    prompts = prompts_at_once((1 + config.train.queue_size) * rollout.batch_size, num_engines)
    responses = prompts * rollout.n_samples_per_prompt
    if config.evaluates:
        responses = max(responses, MIN_PROMPTS_AT_ONCE * config.eval.n_samples_per_prompt)
    return Demand(responses, prompts, longest)


def preference_loss(config: DpoConfig) -> PreferenceLoss:
    """Return the preference loss of the run."""
    dpo = config.dpo
    return PreferenceLoss(
        kind=dpo.loss,
        beta=dpo.beta,
        label_smoothing=dpo.label_smoothing,
        nll_coef=dpo.nll_coef,
        simpo_gamma=dpo.simpo_gamma,
        mpo_weights=dpo.mpo_weights,
        kto_weights=(dpo.kto_desirable_weight, dpo.kto_undesirable_weight),
    )


def absolute(spec: str) -> str:
    """`path/to/file.py:function` with an absolute path, for processes in other working directories."""
    return str(Path(spec).expanduser().absolute())
