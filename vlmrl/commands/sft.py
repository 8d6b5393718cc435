"""`vlmrl sft`: supervised fine-tuning on the responses of a dataset."""

from __future__ import annotations

from vlmrl.commands.preflight import check_data, plan_of
from vlmrl.commands.run import begin, prepare, started
from vlmrl.config.run import SftConfig
from vlmrl.config.schedule import check_steps, last_step_from
from vlmrl.trainer.checkpoints import Saves
from vlmrl.trainer.sft import fit


def train_sft(config: SftConfig, *, dry_run: bool = False) -> None:
    """`vlmrl sft`."""
    folder, tools, warnings = prepare(config, dry_run=dry_run)
    adapter = plan_of(config, tools)
    if dry_run:
        return check_data(config)
    with started(config, folder, warnings) as (builder, report):
        prompts = builder.prompts(config, report.say)
        check_steps(config, prompts.num_rows)
        policy = builder.learners(config, tools, adapter=adapter, num_rows=prompts.num_rows, say=report.say).policy
        saves = Saves(config, folder, prompts, policy, report)
        done, _ = saves.restore()
        last = last_step_from(config, prompts.num_rows, done=done, drawn=saves.drawn)
        saves.look_ahead(done=done, last=last)
        begin(config, report, folder, policy, last=last, done=done)
        builder.stack.enter_context(saves.kept())
        fit(
            rows=prompts,
            learner=policy,
            report=report,
            batch_size=config.train.batch_size,
            save=saves.save,
            first_step=done + 1,
            last_step=last,
            rows_left=prompts.num_rows * config.train.max_epochs - saves.drawn,
        )
        saves.finish(has_adapter=adapter is not None)
