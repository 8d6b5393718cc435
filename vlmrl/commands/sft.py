"""`vlmrl sft`: supervised fine-tuning on the responses of a dataset."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from vlmrl.cluster.build import RoleBuilder
from vlmrl.cluster.models import RemotePolicy
from vlmrl.cluster.prompts import RemotePrompts
from vlmrl.cluster.rewards import RewardSources
from vlmrl.cluster.sync_plan import plan_sync
from vlmrl.cluster.weight_sync import WeightSync
from vlmrl.commands.preflight import actor_adapter_plan, check_data
from vlmrl.commands.run import prepare, run_session
from vlmrl.commands.stage import Stage, run_stage
from vlmrl.config.num_steps import check_steps
from vlmrl.config.stages import SftConfig
from vlmrl.config.verbs import EvalConfig
from vlmrl.models.adapter_plan import AdapterPlan, vision_trains
from vlmrl.observe.report import RunReport
from vlmrl.observe.transcripts import Transcripts
from vlmrl.rewards.question_labels import label_questions
from vlmrl.trainer.evaluation import evaluate_policy, with_metric_names
from vlmrl.trainer.likelihood import measure_likelihood
from vlmrl.types import Metrics, Prompt


def train_sft(config: SftConfig, *, dry_run: bool = False) -> None:
    """Check the settings, start the model, resume if there is a checkpoint, train, and write the final model."""
    folder, processor, warnings = prepare(config, dry_run=dry_run)
    adapter = actor_adapter_plan(config, processor)
    if dry_run:
        return check_data(config, warnings)
    with run_session(config, folder, warnings) as (builder, report):
        prompts = builder.prompts(config, report.say)
        check_steps(config, prompts.num_rows)
        sets = with_metric_names(prompts.evaluation_samples())
        num_rows = prompts.num_rows
        questions = {} if config.generation is None else read_questions(config, prompts, report.say)
        policy = builder.learners(config, processor, adapter=adapter, num_rows=num_rows, say=report.say).policy
        measure: Callable[[int], Metrics] = partial(measure_likelihood, sets=sets, policy=policy)
        if config.generation is not None:
            generate = make_generation(
                config,
                config.generation,
                builder,
                report,
                questions,
                Transcripts(folder.rollouts, prompts.save_media),
                policy,
                adapter,
            )
            measure = _both(measure, generate)
        stage = Stage(prompts.draw_samples, policy.fit, measure)
        run_stage(stage, config, folder, builder, report, prompts, policy, has_adapter=adapter is not None)


def read_questions(config: SftConfig, prompts: RemotePrompts, say: Callable[[str], None]) -> dict[str, list[Prompt]]:
    """Return the held-out questions that get responses, with labels, by the set's name in metrics.

    Raises DataError if no response could match any label of a set.
    """
    sets = {}
    for name, rows in with_metric_names(prompts.evaluation()).items():
        # With `data.truncate_enable` a conversation is learnt as far as it fits, but its last question may lie behind.
        short = [row for row in rows if len(row.tokens) <= config.data.max_len]
        if num_long := len(rows) - len(short):
            say(f"evaluation set {name}: {num_long} prompts are longer than data.max_len, and get no responses")
        sets[name] = label_questions(name, short, config.reward, say)
    return sets


def make_generation(
    config: SftConfig,
    sampling: EvalConfig,
    builder: RoleBuilder,
    report: RunReport,
    questions: dict[str, list[Prompt]],
    transcripts: Transcripts,
    policy: RemotePolicy,
    adapter: AdapterPlan | None,
) -> Callable[[int], Metrics]:
    """Start engines and reward functions; return the evaluation of the policy's responses after a step."""
    engines = builder.engines(sampling, report, adapter)
    plan = plan_sync(adapter, ds=config.ds, vllm=config.vllm, vision_trains=vision_trains(config.actor, adapter))
    weight_sync = WeightSync(policy.ranks.group, engines, plan)
    evaluate: Callable[[int], Metrics] = partial(
        evaluate_policy,
        config=sampling,
        sets=questions,
        engine=engines,
        rewarder=RewardSources(builder.rewarder(sampling, report.say), [], say=report.say),
        policy=policy,
        transcripts=transcripts,
    )

    def measure(step: int) -> Metrics:
        weight_sync.sync(step)
        return evaluate(step)

    return measure


def _both(one: Callable[[int], Metrics], other: Callable[[int], Metrics]) -> Callable[[int], Metrics]:
    return lambda step: one(step) | other(step)
