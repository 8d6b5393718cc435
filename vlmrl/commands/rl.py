"""`vlmrl rl`: reinforcement learning, from the settings to the final model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from vlmrl.cluster.build import Progress, RoleBuilder, Roles
from vlmrl.cluster.models import RemotePolicy
from vlmrl.cluster.prompts import RemotePrompts
from vlmrl.cluster.role_settings import generation_limit_s
from vlmrl.commands.preflight import actor_adapter_plan, check_data, critic_adapter_plan
from vlmrl.commands.rl_checks import make_checks, report_adapter_check
from vlmrl.commands.run import begin_steps, prepare, run_session
from vlmrl.config.num_steps import check_steps
from vlmrl.config.verbs import RlConfig
from vlmrl.errors import EngineLossError, RewardError
from vlmrl.models.adapter_plan import AdapterPlan
from vlmrl.observe.traces import Column, Tracer
from vlmrl.observe.transcripts import Transcripts
from vlmrl.plugins import Processor
from vlmrl.trainer.ahead import Ahead
from vlmrl.trainer.collect import PromptBudget
from vlmrl.trainer.evaluation import evaluate_policy, with_metric_names
from vlmrl.trainer.evaluations import Evaluations
from vlmrl.trainer.experience import ScoredBatch
from vlmrl.trainer.protocols import Report
from vlmrl.trainer.rl import LoopState, train
from vlmrl.trainer.rollouts import InTurn
from vlmrl.trainer.run_checkpoints import RunCheckpoints
from vlmrl.types import Metrics, Prompt


def train_rl(config: RlConfig, *, dry_run: bool = False, is_quiet: bool = False) -> None:
    """Check the settings, start the roles, resume if there is a checkpoint, train, and write the final models."""
    folder, processor, warnings = prepare(config, dry_run=dry_run)
    adapter, critic_adapter = actor_adapter_plan(config, processor), critic_adapter_plan(config)
    has_adapter = adapter is not None
    if dry_run:
        return check_data(config, warnings, adapter)
    with run_session(config, folder, warnings, adapter, is_quiet=is_quiet) as (builder, report):
        prompts, eval_sets, roles = start_roles(
            config, processor, builder, report, adapter=adapter, critic_adapter=critic_adapter
        )
        rollouts = make_rollouts(config, prompts, roles, report)
        checkpoints = RunCheckpoints(config, folder, rollouts, roles.policy, report, roles.critic)
        done, last, state = begin_steps(config, checkpoints, roles.policy, num_rows=prompts.num_rows)
        roles.weight_sync.sync(done)
        on_gpu = builder.machines.has_gpus
        checks = make_checks(config, processor, adapter, roles, report, on_gpu=on_gpu, first_step=done + 1)
        if adapter is not None:
            report_adapter_check(config, adapter, checks, version=done)
        transcripts = Transcripts(folder.rollouts, prompts.save_media)
        measure = partial(
            evaluate_policy,
            config=config,
            sets=eval_sets,
            engine=roles.engines,
            rewarder=roles.reward_sources,
            policy=roles.policy,
            transcripts=transcripts,
        )
        evaluations = Evaluations(config, measure, checkpoints, report, last=last)
        budget = PromptBudget(prompts.num_rows * config.train.num_episodes, drawn=checkpoints.drawn)
        builder.stack.enter_context(checkpoints.saving_on_stop())
        if done == 0 or checkpoints.evaluation_is_pending:
            report.evaluation(done, evaluations.run(done))
        if isinstance(rollouts, Ahead):
            builder.stack.callback(rollouts.close)
            rollouts.begin(last_step=last, num_prompts=budget.total, version=done)
        try:
            ending = train(
                config,
                rollouts=rollouts,
                rewarder=roles.reward_sources,
                policy=roles.policy,
                weight_sync=roles.weight_sync,
                reference=roles.reference,
                critic=roles.critic,
                teacher=roles.teacher,
                report=report,
                check_responses=checks.check_responses,
                check_sync=checks.check_sync,
                after_step=_after_step(config, roles.policy, transcripts, evaluations, Tracer(processor.decode)),
                save=partial(evaluations.save, has_adapter=has_adapter),
                first_step=done + 1,
                last_step=last,
                budget=budget,
                state=state or LoopState(config.algo.kl.init_coef),
            )
        except (RewardError, EngineLossError) as error:
            raise evaluations.save_on_error(error) from None
        evaluations.finish_early(ending, has_adapter=has_adapter)
        checkpoints.finish(has_adapter=has_adapter)


class StartedRoles(NamedTuple):
    """The roles of a run. The engines have not received weights yet."""

    prompts: RemotePrompts
    eval_sets: dict[str, list[Prompt]]
    """The prompts of each evaluation set, by its name in metrics."""
    roles: Roles


def start_roles(
    config: RlConfig,
    processor: Processor,
    builder: RoleBuilder,
    report: Progress,
    *,
    adapter: AdapterPlan | None,
    critic_adapter: AdapterPlan | None,
) -> StartedRoles:
    """Read and check the data, then start all other roles.

    Raises ConfigError if the data do not fill one step.
    """
    prompts = builder.prompts(config, report.say)
    check_steps(config, prompts.num_rows)
    eval_sets = with_metric_names(prompts.evaluation())  # before engines start: it checks the rows
    roles = builder.roles(
        config, processor, adapter=adapter, critic_adapter=critic_adapter, num_rows=prompts.num_rows, report=report
    )
    return StartedRoles(prompts, eval_sets, roles)


def make_rollouts(config: RlConfig, prompts: RemotePrompts, roles: Roles, report: Report) -> InTurn | Ahead:
    """Return the source of responses: one that runs ahead, if the settings say so."""
    parts: dict[str, Any] = {
        "prompts": prompts,
        "engine": roles.engines,
        "rewarder": roles.reward_sources,
        "report": report,
    }
    if config.train.queue_size == 0:
        return InTurn(config, **parts)
    return Ahead(config, **parts, timeout_s=generation_limit_s(config))


def _after_step(
    config: RlConfig, policy: RemotePolicy, transcripts: Transcripts, evaluations: Evaluations, tracer: Tracer
) -> Callable[[int, ScoredBatch], Metrics]:
    """Make the hook that writes a step's transcripts, and evaluates."""

    def after_step(step: int, batch: ScoredBatch) -> Metrics:
        if config.logger.rollouts:
            experience = batch.experience
            columns: dict[str, Column | None] = {
                "trainer": experience.old_logprobs or policy.take_old_logprobs,
                "advantage": experience.advantages,
                "reference": batch.ref_logprobs,
                "value": experience.values,
            }
            transcripts.write(
                step,
                batch.groups,
                batch.scores,
                batch.rewards,
                experience.advantages,
                teacher_gaps=batch.teacher_gaps,
                traces=tracer.traces(batch.groups, batch.rewards, columns),
                left_out=batch.left_out,
            )
        return evaluations.after_step(step)

    return after_step
