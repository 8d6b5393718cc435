"""What the verbs share that learn from the rows of a dataset: checks, rows, resume, train, evaluate, save."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from vlmrl.cluster.build import RoleBuilder
from vlmrl.cluster.prompts import RemotePrompts
from vlmrl.commands.preflight import actor_adapter_plan, check_data
from vlmrl.commands.run import begin_steps, prepare, run_session
from vlmrl.config.num_steps import check_steps
from vlmrl.config.stages import SupervisedConfig
from vlmrl.models.adapter_plan import AdapterPlan
from vlmrl.observe.report import RunReport
from vlmrl.observe.run_folder import RunFolder
from vlmrl.plugins import Processor
from vlmrl.trainer.collect import Ending
from vlmrl.trainer.evaluations import Evaluations
from vlmrl.trainer.run_checkpoints import RunCheckpoints, SavedPolicy
from vlmrl.trainer.supervised import fit
from vlmrl.types import Metrics


class StageRun(NamedTuple):
    """A run whose rows are ready, and whose model is still to be started."""

    folder: RunFolder
    processor: Processor
    adapter: AdapterPlan | None
    builder: RoleBuilder
    report: RunReport
    rows: RemotePrompts
    num_rows: int


class Stage(NamedTuple):
    """What a verb does with its rows."""

    model: SavedPolicy
    draw: Callable[[int], tuple[Any, Metrics]]
    """Returns the next rows as one batch, and metrics of fetching them."""
    update: Callable[[Any], Metrics]
    """Makes one optimizer step on a batch."""
    measure: Callable[[int], Metrics]
    """Evaluates the model after a step on the rows that are held out; {} without any."""


def run_stage(
    config: SupervisedConfig,
    start: Callable[[StageRun], Stage],
    *,
    dry_run: bool,
    is_quiet: bool,
    merges_adapter: bool = False,
) -> None:
    """Check the settings, start the model, resume if there is a checkpoint, train, and write the final model.

    Args:
        start: starts the models of the verb, and reads its held-out rows.
        merges_adapter: the final model has its adapters merged in, instead of an adapter beside the model.
    """
    folder, processor, warnings = prepare(config, dry_run=dry_run)
    adapter = actor_adapter_plan(config, processor)
    if dry_run:
        return check_data(config, warnings, adapter)
    with run_session(config, folder, warnings, adapter, is_quiet=is_quiet) as (builder, report):
        rows = builder.prompts(config, report.say)
        num_rows = rows.num_rows
        check_steps(config, num_rows)
        run = StageRun(folder, processor, adapter, builder, report, rows, num_rows)
        _train(config, run, start(run), has_adapter=adapter is not None and not merges_adapter)


def _train(config: SupervisedConfig, run: StageRun, stage: Stage, *, has_adapter: bool) -> None:
    """Resume if there is a checkpoint, train, evaluate, and write the final model."""
    report, num_rows = run.report, run.num_rows
    checkpoints = RunCheckpoints(config, run.folder, run.rows, stage.model, report)
    done, last, _ = begin_steps(config, checkpoints, stage.model, num_rows=num_rows)
    evaluations = Evaluations(config, stage.measure, checkpoints, report, last=last)
    run.builder.stack.enter_context(checkpoints.saving_on_stop())
    if done == 0 or checkpoints.evaluation_is_pending:
        report.evaluation(done, evaluations.run(done))
    else:
        evaluations.resume(done)
    if evaluations.stop_reason is not None:  # a resumed run that was, or now is, no longer improving
        ending = Ending(done, evaluations.stop_reason)
    else:
        ending = fit(
            draw=stage.draw,
            update=stage.update,
            evaluator=evaluations,
            report=report,
            batch_size=config.train.batch_size,
            save=partial(evaluations.save, has_adapter=has_adapter),
            first_step=done + 1,
            last_step=last,
            rows_left=num_rows * config.train.max_epochs - checkpoints.drawn,
        )
    evaluations.finish_early(ending, has_adapter=has_adapter)
    checkpoints.finish(has_adapter=has_adapter)
