"""The RL training loop, over Protocols: no Ray, DeepSpeed or vLLM in it.

An asynchronous run needs other Rollouts, another algorithm another estimator or loss, and PPO one more role. None needs
another loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from vlmrl.algorithms.kl import KlController
from vlmrl.config.verbs import RlConfig
from vlmrl.data.experience import Experience
from vlmrl.data.responses import to_samples
from vlmrl.errors import EngineLossError
from vlmrl.parallel import run_parallel
from vlmrl.system import stops
from vlmrl.trainer.collect import Ending, PromptBudget, collect
from vlmrl.trainer.episodes import responses_of
from vlmrl.trainer.experience import ModelOutputs, ScoredBatch, make_experience
from vlmrl.trainer.filtering import RewardRange
from vlmrl.trainer.protocols import Critic, Policy, Reference, Report, Rewarder, Rollouts, WeightSync
from vlmrl.types import Group, Metrics, Sample
from vlmrl.verify.logprobs import AGREEMENT, check_agreement


class LoopState(NamedTuple):
    """State of the loop that the next step needs, besides models and data."""

    kl_coef: float
    """Weight of the KL to the reference."""
    reward_range: RewardRange = RewardRange()


def train(
    config: RlConfig,
    *,
    rollouts: Rollouts,
    rewarder: Rewarder,
    policy: Policy,
    weight_sync: WeightSync,
    reference: Reference | None,
    critic: Critic | None,
    teacher: Reference | None = None,
    report: Report,
    check_responses: Callable[[int, Sequence[Group]], Callable[[], Metrics]],
    check_sync: Callable[[int], Metrics],
    after_step: Callable[[int, ScoredBatch], Metrics],
    save: Callable[[int, LoopState], None],
    first_step: int,
    last_step: int,
    budget: PromptBudget,
    state: LoopState,
) -> Ending:
    """Run the steps `first_step..last_step`, both included, as far as the prompts of the `budget` last.

    Args:
        check_responses: called with a step's groups while engines and policy still hold the weights that sampled them.
            It returns a function that is called after the update, while the engines hold them, for the metrics.
        check_sync: called with the version of the weights after each weight sync.
        after_step: evaluates, and writes transcripts.
        save: called last, with the state for the next step, so that a run resumed from it lacks nothing.
        state: the state for the first step, when the engines hold version `first_step - 1`.

    Raises:
        ExhaustedError: dynamic filtering kept too few groups; all earlier steps are complete.
        EngineLossError: engines died too often, or do not respond; all steps whose update has begun are complete.
        Stopped: the run was asked to stop; the last step whose update has begun is complete.
    """
    kl_controller = KlController(coef=state.kl_coef, target=config.algo.kl.target, horizon=config.algo.kl.horizon)
    reward_range = state.reward_range
    rollouts.published(first_step - 1)
    for step in range(first_step, last_step + 1):
        start = progress(config, step - 1, budget)
        collected = collect(
            config,
            step,
            rollouts=rollouts,
            rewarder=rewarder,
            report=report,
            budget=budget,
            reward_range=reward_range,
        )
        if isinstance(collected, Ending):
            return collected
        reward_range = reward_range.extended(collected.groups)
        groups, scores = [kept.group for kept in collected.kept], [kept.scores for kept in collected.kept]
        finish_check = check_responses(step, groups)
        trains_policy = critic is None or step > config.critic.freezing_steps
        outputs = run_models(
            config,
            to_samples(groups),
            policy=policy,
            reference=reference,
            critic=critic,
            teacher=teacher,
            report=report,
            update_finds_old=trains_policy and config.needs_one_pass,
        )
        batch, metrics = make_experience(
            config,
            groups,
            scores,
            outputs,
            kl_coef=kl_controller.coef,
            span=(start, progress(config, step, budget)) if config.algo.dynamic_filtering_enable else None,
        )
        batch = batch._replace(left_out=[(g.group, g.scores, g.rewards) for g in collected.groups if not g.is_kept])
        metrics = collected.metrics | metrics
        # An update cannot be undone: once it has begun, the step is finished and reported like any other.
        with stops.uninterrupted():
            with report.phase("update"):
                update_metrics = update_models(
                    batch.experience,
                    step,
                    policy=policy if trains_policy else None,
                    critic=critic,
                    in_turn=config.critic_is_with_actor,
                )
            is_compared = outputs.old is None and config.train.queue_size == 0
            if is_compared and any(sample.sampled.any() for sample in batch.experience.samples):
                check_agreement(config, update_metrics)
            if trains_policy:  # while it is frozen it cannot drift, which is no reason to lower the coefficient
                kl_controller = kl_controller.updated(
                    metrics.get("kl/reference", 0.0), num_samples=len(responses_of(groups))
                )
            metrics |= update_metrics
            if config.train.queue_size:  # of log-probs that older weights have computed; the check's are of the current
                metrics = {name: value for name, value in metrics.items() if name not in AGREEMENT}
            loss: EngineLossError | None = None
            try:
                metrics |= finish_check()
                rollouts.settle()
                with report.phase("sync"):
                    metrics |= weight_sync.sync(step)
                rollouts.published(step)
                metrics |= check_sync(step)
            except EngineLossError as error:  # the policy is trained: the step is finished without engines
                loss = error
            metrics |= policy.take_pass_metrics() | after_step(step, batch)
            if step == last_step and 0 < budget.left < config.rollout.batch_size:
                metrics["data/left_out"] = float(budget.left)
            report.step(step, metrics)
            save(step, LoopState(kl_controller.coef, reward_range))
        stops.raise_if_requested()
        if loss is not None:
            raise loss
    return Ending(max(last_step, first_step - 1))


def progress(config: RlConfig, step: int, budget: PromptBudget) -> float:
    """Return the share of the run that is done after `step` steps, from 0 to 1.

    It is counted in prompts or in `train.max_steps`, whichever ends the run first.
    """
    by_prompts = budget.drawn / budget.total
    by_steps = step / config.train.max_steps if config.train.max_steps else 0.0
    return min(max(by_prompts, by_steps), 1.0)


def run_models(
    config: RlConfig,
    samples: list[Sample],
    *,
    policy: Policy,
    reference: Reference | None,
    critic: Critic | None,
    teacher: Reference | None,
    report: Report,
    update_finds_old: bool,
) -> ModelOutputs:
    """Compute log-probs and values of a step's samples.

    `update_finds_old`: the update computes the policy's old log-probs itself, so that they take no pass here.
    """
    with report.phase("logprob"):
        old = None if update_finds_old else policy.logprobs(samples)
        ref = None if reference is None else reference.logprobs(samples)
    outputs = ModelOutputs(samples, old, ref)
    if teacher is not None:
        with report.phase("teacher"):
            outputs = outputs._replace(teacher=teacher.logprobs(samples))
    if critic is not None:
        with report.phase("value"):
            outputs = outputs._replace(values=critic.values(samples))
    return outputs


def update_models(
    experience: Experience, step: int, *, policy: Policy | None, critic: Critic | None, in_turn: bool
) -> Metrics:
    """Train policy and critic, in parallel unless `in_turn`.

    In turn is for roles that share processes: ranks that got the two calls in different orders would deadlock.
    """
    updates = [partial(model.update, experience, step=step) for model in (critic, policy) if model is not None]
    merged: Metrics = {}
    for metrics in [update() for update in updates] if in_turn else run_parallel(*updates):
        merged |= metrics
    return merged
