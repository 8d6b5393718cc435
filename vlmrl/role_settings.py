"""What a run's settings say to its roles: of which models they are, for how many steps, and with which loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlmrl.algorithms.corrections import Correction
from vlmrl.algorithms.losses import PolicyLoss
from vlmrl.config.base import names_function
from vlmrl.config.run import EvalConfig, RlConfig, RolloutBench, SftConfig
from vlmrl.errors import ConfigError
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


def check_steps(config: RlConfig | SftConfig, num_rows: int) -> int:
    """`last_step`, where there is also something to learn until then.

    Raises:
        ConfigError: the data are not enough for one step, or the critic has all steps for itself.
    """
    frozen = max(0, config.critic.freezing_steps) if isinstance(config, RlConfig) and config.has_critic else 0
    optimizer_steps(config, num_rows, frozen=frozen)
    return last_step(config, num_rows)


def optimizer_steps(config: RlConfig | SftConfig, num_rows: int, *, frozen: int = 0) -> int:
    """Optimizer steps of the whole run: what the learning rate's schedule is laid over. In the first `frozen` steps of
    the run none is taken.

    Raises:
        ConfigError: there are no other steps.
    """
    steps = last_step(config, num_rows)
    if isinstance(config, SftConfig):
        return steps
    if frozen >= steps:
        raise ConfigError(f"critic.freezing_steps {frozen} leaves the actor none of the run's {steps} steps: lower it")
    steps -= frozen
    samples = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    return steps * config.train.max_epochs * -(-samples // config.train.batch_size)


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


def last_step(config: RlConfig | SftConfig, num_rows: int) -> int:
    """Steps of the whole run.

    Raises:
        ConfigError: the data are not enough for one step.
    """
    size, passes, flag = _batches(config)
    steps = num_rows * passes // size
    if steps == 0:
        raise ConfigError(f"{num_rows} rows, {passes} times over, do not fill one batch of {size}: lower {flag}")
    return min(steps, config.train.max_steps or steps)


def last_step_from(config: RlConfig | SftConfig, num_rows: int, *, done: int, drawn: int) -> int:
    """`last_step` of a run that goes on after `done` steps and `drawn` rows, whose batches may have had another size.

    With dynamic filtering, where a step draws as many as it needs, the most that it can be.
    """
    size, passes, _ = _batches(config)
    steps = done + max(num_rows * passes - drawn, 0) // size
    if isinstance(config, RlConfig) and config.algo.dynamic_filtering_enable:
        steps = max(steps, num_rows * passes // size)
    return min(steps, config.train.max_steps or steps)


def share_done(config: RlConfig | SftConfig, num_rows: int, *, done: int, drawn: int) -> float:
    """How far a run is after `done` steps and `drawn` rows, from 0 to 1: by its rows or by `train.max_steps`, whichever
    ends it."""
    by_steps = done / config.train.max_steps if config.train.max_steps else 0.0
    return min(max(drawn / (num_rows * _batches(config)[1]), by_steps), 1.0)


def _batches(config: RlConfig | SftConfig) -> tuple[int, int, str]:
    """Rows of a step, passes over all rows, and the flag of the former."""
    if isinstance(config, RlConfig):
        return config.rollout.batch_size, config.train.num_episodes, "--rollout.batch_size"
    return config.train.batch_size, config.train.max_epochs, "--train.batch_size"
