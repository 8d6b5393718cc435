"""`vlmrl sft`: supervised fine-tuning on the responses of a dataset."""

from __future__ import annotations

from functools import partial

from vlmrl.commands.preflight import actor_adapter_plan, check_data
from vlmrl.commands.run import prepare, run_session
from vlmrl.commands.stage import Stage, run_stage
from vlmrl.config.num_steps import check_steps
from vlmrl.config.stages import SftConfig
from vlmrl.trainer.evaluation import with_metric_names
from vlmrl.trainer.likelihood import measure_likelihood


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
        policy = builder.learners(config, processor, adapter=adapter, num_rows=num_rows, say=report.say).policy
        stage = Stage(prompts.draw_samples, policy.fit, partial(measure_likelihood, sets=sets, policy=policy))
        run_stage(stage, config, folder, builder, report, prompts, policy, has_adapter=adapter is not None)
