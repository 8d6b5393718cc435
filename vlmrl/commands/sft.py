"""`vlmrl sft`: supervised fine-tuning on the responses of a dataset."""

from __future__ import annotations

from vlmrl.commands.preflight import actor_adapter_plan, check_data
from vlmrl.commands.run import begin_steps, prepare, run_session
from vlmrl.config.num_steps import check_steps
from vlmrl.config.verbs import SftConfig
from vlmrl.trainer.run_checkpoints import RunCheckpoints
from vlmrl.trainer.sft import fit


def train_sft(config: SftConfig, *, dry_run: bool = False) -> None:
    """Check the settings, start the model, resume if there is a checkpoint, train, and write the final model."""
    folder, processor, warnings = prepare(config, dry_run=dry_run)
    adapter = actor_adapter_plan(config, processor)
    if dry_run:
        return check_data(config, warnings)
    with run_session(config, folder, warnings) as (builder, report):
        prompts = builder.prompts(config, report.say)
        check_steps(config, prompts.num_rows)
        num_rows = prompts.num_rows
        policy = builder.learners(config, processor, adapter=adapter, num_rows=num_rows, say=report.say).policy
        checkpoints = RunCheckpoints(config, folder, prompts, policy, report)
        done, last, _ = begin_steps(config, checkpoints, policy, num_rows=num_rows)
        builder.stack.enter_context(checkpoints.saving_on_stop())
        fit(
            rows=prompts,
            model=policy,
            report=report,
            batch_size=config.train.batch_size,
            save=checkpoints.save,
            first_step=done + 1,
            last_step=last,
            rows_left=num_rows * config.train.max_epochs - checkpoints.drawn,
        )
        checkpoints.finish(has_adapter=adapter is not None)
