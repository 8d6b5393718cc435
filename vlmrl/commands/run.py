"""The beginning and the end of every verb with a run folder: checks, folder, lock, Ray, placement, report."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from vlmrl.cluster.arrivals import wait_for_machines
from vlmrl.cluster.build import RoleBuilder
from vlmrl.cluster.machine_watch import watch_machines
from vlmrl.cluster.nodes import check_nodes
from vlmrl.cluster.placement import plan
from vlmrl.cluster.roles import num_nodes_required, placement_rows, placement_table, plan_arguments
from vlmrl.cluster.session import session
from vlmrl.cluster.sync_plan import check_devices
from vlmrl.cluster.worker_deaths import report_deaths
from vlmrl.commands.forecast import format_groups
from vlmrl.commands.hardware import check_hardware
from vlmrl.commands.merged_actor import check_adapter
from vlmrl.commands.preflight import (
    check_algorithm,
    check_columns,
    check_lengths,
    check_machine,
    check_models,
    check_reference,
    check_sequence,
    check_teacher,
    format_checkpoint_plan,
    format_positions,
)
from vlmrl.config.ckpt import Logger
from vlmrl.config.dump import dump_yaml
from vlmrl.config.num_steps import last_step_from
from vlmrl.config.stages import DpoConfig, RmConfig, SamplingConfig, SftConfig, SupervisedConfig
from vlmrl.config.training import TrainingConfig
from vlmrl.config.verbs import EvalConfig, GenerateConfig, RlConfig
from vlmrl.errors import ConfigError
from vlmrl.hub.known_weights import KnownWeights
from vlmrl.hub.model_card import write_cards
from vlmrl.models.adapter_plan import AdapterPlan
from vlmrl.models.kind import check_generates
from vlmrl.observe.lock import refuse_if_locked, run_lock
from vlmrl.observe.log import run_log
from vlmrl.observe.report import RunReport, parameter_table, save_table
from vlmrl.observe.run_folder import RunFolder
from vlmrl.observe.start_times import StartTimes
from vlmrl.plugins import Processor, processor_of
from vlmrl.report.background import BackgroundReport
from vlmrl.rewards.rewarder import check_functions
from vlmrl.system.atomic_folders import checkpoints
from vlmrl.system.masking import Mask
from vlmrl.system.stops import kill_and_exit
from vlmrl.system.storage import writing
from vlmrl.trainer.best_model import read_best
from vlmrl.trainer.rl import LoopState
from vlmrl.trainer.run_checkpoints import RunCheckpoints, SavedPolicy, naming_checkpoint

AnyConfig = TrainingConfig | EvalConfig


class Prepared(NamedTuple):
    """Results of the checks before anything starts."""

    folder: RunFolder
    processor: Processor
    warnings: list[str]
    """Resources of this machine that are scarce but sufficient, slow groups of ranks, and rows that may be too long, a
    line each."""


def prepare(config: AnyConfig, *, dry_run: bool) -> Prepared:
    """Check all that can be checked before Ray starts."""
    try:
        # Absolute: ranks on a cluster that the user started have another working directory.
        folder = RunFolder(Path(config.ckpt.output_dir).expanduser().absolute())
    except RuntimeError as error:  # no such user, or no home
        raise ConfigError(
            f"ckpt.output_dir {config.ckpt.output_dir}: there is no such home folder, give the full path"
        ) from error
    refuse_if_locked(folder.root)
    check_folder(config, folder)
    warnings = [*check_machine(config), *format_groups(config)]
    if isinstance(config, SupervisedConfig):
        warnings += format_positions(config)
    check_columns(config)
    if isinstance(config, SamplingConfig) and config.generation is not None:
        check_functions(config.reward, asks_servers=not dry_run)
        check_lengths(config.generation)
    if isinstance(config, RlConfig | EvalConfig) and (config.reward.functions or config.reward.remote_url):
        check_functions(config.reward, asks_servers=not dry_run)
    _check_roles(config)
    if isinstance(config, TrainingConfig) and config.ckpt.best_metric_key is not None:
        read_best(folder.best, metric=config.ckpt.best_metric_key)
    actor = config.actor
    processor = processor_of(actor.model_name_or_path, config.data, trust_remote_code=actor.trust_remote_code)
    return Prepared(folder, processor, warnings)


def _check_roles(config: AnyConfig) -> None:
    """Check the models of a run, and what they are to compute."""
    if isinstance(config, SftConfig):
        check_teacher(config)
    if isinstance(config, RlConfig):
        check_algorithm(config)
    if isinstance(config, RlConfig) or (isinstance(config, EvalConfig) and config.reward.has_model):
        check_models(config)
    if isinstance(config, EvalConfig):
        check_adapter(config)
    if isinstance(config, DpoConfig):
        check_reference(config)
    if not isinstance(config, RmConfig):
        check_generates(config.actor.model_name_or_path, trust_remote_code=config.actor.trust_remote_code)
    if isinstance(config, TrainingConfig):
        check_sequence(config)


def check_folder(config: AnyConfig, folder: RunFolder) -> None:
    """Check that this run may write to the folder; see `RunFolder.check`."""
    learns = not isinstance(config, EvalConfig)
    resume = not isinstance(config, EvalConfig) and config.ckpt.load_enable
    if isinstance(config, GenerateConfig) and folder.responses.is_file():
        return  # `commands.generate` compares the settings
    folder.check(resume=resume, has_checkpoint=bool(checkpoints(folder.checkpoints)), learns=learns)


def _save_settings(config: AnyConfig, folder: RunFolder) -> None:
    with writing(folder.config.name, folder.root):
        dump_yaml(config, folder.config)


class Progress(NamedTuple):
    """The steps that a run has to make."""

    done: int
    """Number of finished steps; 0 for a new run."""
    last: int
    state: LoopState | None
    """State for the next step of a resumed RL run."""


def begin_steps(config: TrainingConfig, checkpoints: RunCheckpoints, policy: SavedPolicy, *, num_rows: int) -> Progress:
    """Resume from the newest checkpoint if there is one, and show what trains and how many steps remain."""
    done, state = checkpoints.restore()
    last = last_step_from(config, num_rows, done=done, drawn=checkpoints.drawn)
    checkpoints.check_room_ahead(done=done, last=last)
    begin_report(config, checkpoints.report, checkpoints.folder, policy, last=last, done=done)
    return Progress(done, last, state)


def begin_report(
    config: TrainingConfig, report: RunReport, folder: RunFolder, policy: SavedPolicy, *, last: int, done: int
) -> None:
    """Save the settings of a resumed run, and show the model's parameters."""
    if config.ckpt.load_enable:
        _save_settings(config, folder)
    rows = policy.table()
    with writing(folder.parameters.name, folder.root):
        save_table(folder.parameters, rows)
    report.say(parameter_table(rows))
    if done:
        report.say(f"resuming after step {done}")
    report.begin(total_steps=last, done=done)


@contextmanager
def run_session(
    config: AnyConfig,
    folder: RunFolder,
    warnings: Sequence[str],
    adapter: AdapterPlan | None = None,
    *,
    is_quiet: bool = False,
) -> Iterator[tuple[RoleBuilder, RunReport]]:
    """Open the run's folder, start Ray and place the roles; stop everything at the end, also after an error.

    `warnings` are shown after the placement. A run that `is_quiet` shows no panel, no lines of steps and no tables.
    """
    logger = Logger() if isinstance(config, EvalConfig) else config.logger
    title = f"vlmrl {config.verb}"
    start_times = StartTimes()
    start_times.end("checks")
    with run_log() as log, ExitStack() as outer:
        folder.open()
        with writing(folder.log.name, folder.root):
            log.move_to(folder.log)
        outer.enter_context(run_lock(folder.root, on_lost=lambda line: kill_and_exit(line, 2), notify=print))
        check_folder(config, folder)  # again: another run may have held the lock until now, and written there
        settings = Mask(os.environ).strings(config.model_dump(mode="json"))  # for trackers
        page = BackgroundReport(folder.root) if logger.report else None
        report = RunReport(
            folder,
            logger=logger,
            config=settings,
            title=title,
            start_times=start_times,
            is_quiet=is_quiet,
            page=page,
        )
        if isinstance(config, RlConfig | SupervisedConfig):
            needs_card = KnownWeights(folder).needs_card
            outer.callback(write_cards, config, folder, report.say, needs_card=needs_card)  # with the last curves
        # The plot and the page go on while the roles and Ray stop.
        outer.push(lambda kind, error, traceback: report.finish(error))
        outer.enter_context(naming_checkpoint(folder.checkpoints))
        machines = wait_for_machines(
            outer.enter_context(session(head_limit_s=config.train.wait_nodes_s, say=report.say)),
            lambda joined: plan(**plan_arguments(config, joined)),
            num_nodes=num_nodes_required(config),
            limit_s=config.train.wait_nodes_s,
            say=report.say,
        )
        check_hardware(config, machines, adapter)
        places = plan(**plan_arguments(config, machines))
        if isinstance(config, RlConfig | SamplingConfig):
            check_devices(config.vllm, machines, places)
        machines.roster.dump = log.write
        check_nodes(config, machines, places, folder.root)
        if isinstance(config, EvalConfig) or not config.ckpt.load_enable:  # else only once it has resumed
            _save_settings(config, folder)
        start_times.end("ray")
        with (
            ExitStack() as stack,
            watch_machines(machines, places) as watch,
            report_deaths(machines.roster),
            report,
        ):
            report.say(placement_table(places, machines))
            report.note(placement=placement_rows(places, machines), unit=f"{machines.unit}s, node:number")
            for line in (*format_checkpoint_plan(config), *warnings):
                report.say(line)
            is_async = isinstance(config, RlConfig) and config.train.queue_size > 0
            builder = RoleBuilder(machines.divided(places) if is_async else machines, places, stack, watch)
            with builder.running():
                yield builder, report
