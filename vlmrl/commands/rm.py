"""`vlmrl rm`: training of a reward model on preferences, or on labelled steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from vlmrl.cluster.prompts import RemotePrompts
from vlmrl.cluster.reward_trainer import RemoteRewardTrainer, start_reward_trainer
from vlmrl.commands.stage import Stage, StageRun, run_stage
from vlmrl.config.stages import RmConfig
from vlmrl.errors import EndOfRowsError
from vlmrl.trainer.evaluation import with_metric_names
from vlmrl.trainer.reward_evaluation import measure_pairs, measure_steps, responses_of_scale
from vlmrl.types import Sample

_NUM_FIRST_PAIRS = 128
"""Training pairs whose scores give mean and deviation in a run without held-out rows."""


def train_rm(config: RmConfig, *, dry_run: bool = False, is_quiet: bool = False) -> None:
    """Check the settings, start the model, resume if there is a checkpoint, train, and write the final model."""

    def start(run: StageRun) -> Stage:
        stage_of = _pair_stage(run.rows) if config.rm.kind == "outcome" else _step_stage(run.rows)
        model = start_reward_trainer(
            run.builder, config, run.processor, adapter=run.adapter, num_rows=run.num_rows, say=run.report.say
        )
        return stage_of(model)

    # Adapters are merged into the model that is written: a run reads a reward model as a whole.
    run_stage(config, start, dry_run=dry_run, is_quiet=is_quiet, merges_adapter=True)


def _pair_stage(rows: RemotePrompts) -> Callable[[RemoteRewardTrainer], Stage]:
    """Read the held-out pairs; return the stage of a model."""
    sets = with_metric_names(rows.evaluation_pairs())
    scaled = responses_of_scale(sets) if sets else _first_responses(rows)

    def stage(model: RemoteRewardTrainer) -> Stage:
        model.responses_of_scale = scaled
        return Stage(
            model,
            rows.draw_pairs,
            lambda pairs: model.fit_pairs(pairs.samples, pairs.margins.tolist()),
            partial(measure_pairs, sets=sets, model=model),
        )

    return stage


def _step_stage(rows: RemotePrompts) -> Callable[[RemoteRewardTrainer], Stage]:
    """Read the held-out steps; return the stage of a model."""
    sets = with_metric_names(rows.evaluation_steps())

    def stage(model: RemoteRewardTrainer) -> Stage:
        return Stage(
            model,
            rows.draw_steps,
            lambda steps: model.fit_steps(steps.samples, steps.labels),
            partial(measure_steps, sets=sets, model=model),
        )

    return stage


def _first_responses(rows: RemotePrompts) -> list[Sample]:
    """Return the responses of the first training pairs, which the run draws again."""
    state = rows.state()
    count = min(_NUM_FIRST_PAIRS, rows.num_rows)
    while True:
        try:
            pairs, _ = rows.draw_pairs(count)
        except EndOfRowsError:  # some of them are dropped
            if count == 1:
                raise
            count //= 2
        else:
            rows.load_state(state)
            return pairs.samples
