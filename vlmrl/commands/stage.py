"""What the verbs share that learn from the rows of a dataset: resume, train, evaluate, save."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from vlmrl.cluster.build import RoleBuilder
from vlmrl.cluster.prompts import RemotePrompts
from vlmrl.commands.run import begin_steps
from vlmrl.config.stages import SupervisedConfig
from vlmrl.observe.report import RunReport
from vlmrl.observe.run_folder import RunFolder
from vlmrl.trainer.collect import Ending
from vlmrl.trainer.evaluations import Evaluations
from vlmrl.trainer.run_checkpoints import RunCheckpoints, SavedPolicy
from vlmrl.trainer.supervised import fit
from vlmrl.types import Metrics


class Stage(NamedTuple):
    """What a verb does with its rows."""

    draw: Callable[[int], tuple[Any, Metrics]]
    """Returns the next rows as one batch, and metrics of fetching them."""
    update: Callable[[Any], Metrics]
    """Makes one optimizer step on a batch."""
    measure: Callable[[int], Metrics]
    """Evaluates the model after a step on the rows that are held out; {} without any."""


def run_stage(
    stage: Stage,
    config: SupervisedConfig,
    folder: RunFolder,
    builder: RoleBuilder,
    report: RunReport,
    rows: RemotePrompts,
    model: SavedPolicy,
    *,
    has_adapter: bool,
) -> None:
    """Resume if there is a checkpoint, train, evaluate, and write the final model."""
    num_rows = rows.num_rows
    checkpoints = RunCheckpoints(config, folder, rows, model, report)
    done, last, _ = begin_steps(config, checkpoints, model, num_rows=num_rows)
    evaluations = Evaluations(config, stage.measure, checkpoints, report, last=last)
    builder.stack.enter_context(checkpoints.saving_on_stop())
    if done == 0 or checkpoints.evaluation_is_pending:
        report.evaluation(done, evaluations.run(done))
    if evaluations.stop_reason is not None:  # the evaluation that a stop had interrupted was the last
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
