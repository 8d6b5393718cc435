"""What a run's settings say to its roles: of which models they are, for how many steps, and with which loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlmrl.algorithms.corrections import Correction
from vlmrl.algorithms.losses import PolicyLoss
from vlmrl.config.base import names_function
from vlmrl.config.run import EvalConfig, RlConfig, RolloutBench, SftConfig
from vlmrl.config.schedule import optimizer_steps
from vlmrl.models.adapter_plan import AdapterPlan
from vlmrl.rollout.capacity import LEAST_DEPTH, Demand, prompts_at_once


def model_settings(config: RlConfig | SftConfig) -> dict[str, Any]:
    """What policy and reference are made of, so that both are asked the same question."""
    return {
        "actor": config.actor,
        "ds": config.ds,
        "loop": config.train,
        "columns": config.data,
        "vision": config.vision,
        "temperature": config.rollout.temperature if isinstance(config, RlConfig) else 1.0,
        "bans": isinstance(config, RlConfig) and config.rollout.top_p == 1.0,
    }


def critic_settings(config: RlConfig, adapter: AdapterPlan | None, num_rows: int) -> dict[str, Any]:
    """What the critic is made of."""
    return {
        "critic": config.whole_critic,
        "adapter": adapter,
        "ds": config.ds,
        "loop": config.train,
        "columns": config.data,
        "vision": config.vision,
        "total_steps": optimizer_steps(config, num_rows),
    }


def policy_loss(config: RlConfig) -> PolicyLoss:
    """The loss that the settings ask for."""
    actor, advantage, kl = config.actor, config.algo.advantage, config.algo.kl
    low, high = actor.clip_range
    correction = Correction(advantage.is_correction_type, *advantage.correction_range)
    return PolicyLoss(
        # Ranks stand in another folder than the user does.
        kind=absolute(actor.policy_loss_type) if names_function(actor.policy_loss_type) else actor.policy_loss_type,
        clip_low=low,
        clip_high=high,
        dual_clip=actor.dual_clip,
        kl_estimator=kl.estimator,
        kl_early_stop=kl.early_stop,
        entropy_coef=actor.entropy_coef,
        correction=correction if advantage.is_correction_enable else None,
        aggregation=config.aggregation,
        max_new_tokens=config.rollout.max_new_tokens,
    )


def demand(config: RlConfig | EvalConfig | RolloutBench) -> Demand:
    """The most that one engine of the run has under way at once."""
    num_engines, rollout = config.vllm.num_engines, config.rollout
    if isinstance(config, EvalConfig):
        prompts = prompts_at_once(config.eval.max_samples, num_engines)
        return Demand(prompts * config.eval.n_samples_per_prompt, prompts, config.data.max_len)
    prompts = prompts_at_once(rollout.batch_size, num_engines)
    if isinstance(config, RolloutBench):
        return Demand(prompts * max(config.bench.n_samples_per_prompt), prompts, config.data.max_len)
    responses = prompts * rollout.n_samples_per_prompt
    if config.evaluates:
        responses = max(responses, LEAST_DEPTH * config.eval.n_samples_per_prompt)
    return Demand(responses, prompts, config.data.max_len)


def absolute(spec: str) -> str:
    """`path/to/file.py:function` wherever a process stands."""
    return str(Path(spec).expanduser().absolute())
