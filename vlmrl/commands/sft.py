"""`vlmrl sft`: supervised fine-tuning on the responses of a dataset."""

from __future__ import annotations

from functools import partial

from vlmrl.commands.sampled_evaluation import Measure, start_sampler
from vlmrl.commands.stage import Stage, StageRun, run_stage
from vlmrl.config.stages import SftConfig
from vlmrl.trainer.evaluation import with_metric_names
from vlmrl.trainer.likelihood import measure_likelihood


def train_sft(config: SftConfig, *, dry_run: bool = False, is_quiet: bool = False) -> None:
    """Check the settings, start the model, resume if there is a checkpoint, train, and write the final model."""
    run_stage(config, partial(_start, config), dry_run=dry_run, is_quiet=is_quiet)


def _start(config: SftConfig, run: StageRun) -> Stage:
    rows, say = run.rows, run.report.say
    sets = with_metric_names(rows.evaluation_samples())
    sampler = start_sampler(config, run)
    learners = run.builder.learners(config, run.processor, adapter=run.adapter, num_rows=run.num_rows, say=say)
    policy = learners.policy
    measure: Measure = partial(measure_likelihood, sets=sets, policy=policy)
    if sampler is not None:
        measure = sampler.beside(measure, policy)
    return Stage(policy, rows.draw_samples, policy.fit, measure)
