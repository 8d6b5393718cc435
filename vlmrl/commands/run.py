"""The beginning and the end that all verbs with a run folder share: checks, folder, lock, Ray, placement, report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from vlmrl.cluster.build import RoleBuilder
from vlmrl.cluster.deaths import told_of
from vlmrl.cluster.models import RemotePolicy
from vlmrl.cluster.nodes import check_nodes
from vlmrl.cluster.placement import plan
from vlmrl.cluster.roles import describe, roles_of
from vlmrl.cluster.session import session
from vlmrl.cluster.sync_plan import check_devices
from vlmrl.cluster.watch import watched
from vlmrl.commands.preflight import (
    check_algorithm,
    check_columns,
    check_hardware,
    check_machine,
    check_models,
    checkpoints_planned,
)
from vlmrl.config.ckpt import Logger
from vlmrl.config.dump import dump_yaml
from vlmrl.config.run import EvalConfig, RlConfig, SftConfig
from vlmrl.errors import ConfigError
from vlmrl.models.adapter_plan import AdapterPlan
from vlmrl.observe.atomic import checkpoints
from vlmrl.observe.lock import refuse_if_locked, run_lock
from vlmrl.observe.log import run_log
from vlmrl.observe.report import RunReport, parameter_table, save_table
from vlmrl.observe.run_folder import RunFolder
from vlmrl.plugins import Processor, processor_of
from vlmrl.rewards.rewarder import check_functions
from vlmrl.system.stops import end_at_once
from vlmrl.system.storage import writing
from vlmrl.trainer.best_model import read_best
from vlmrl.trainer.checkpoints import naming_checkpoint

AnyConfig = RlConfig | SftConfig | EvalConfig


def begin(
    config: RlConfig | SftConfig, report: RunReport, folder: RunFolder, policy: RemotePolicy, *, last: int, done: int
) -> None:
    if config.ckpt.load_enable:
        _save_settings(config, folder)
    rows = policy.table()
    with writing(folder.parameters.name, folder.root):
        save_table(folder.parameters, rows)
    report.say(parameter_table(rows))
    if done:
        report.say(f"continuing after step {done}")
    report.begin(total_steps=last, done=done)


class Prepared(NamedTuple):
    """What is known before anything starts."""

    folder: RunFolder
    tools: Processor
    warnings: list[str]
    """What this machine is short of, but will do: a line each."""


def prepare(config: AnyConfig, *, dry_run: bool) -> Prepared:
    """Check what can be checked before anything starts."""
    try:
        # Ranks on a cluster that the user started stand in another folder.
        folder = RunFolder(Path(config.ckpt.output_dir).expanduser().absolute())
    except RuntimeError as error:  # no such user, or no home
        raise ConfigError(
            f"ckpt.output_dir {config.ckpt.output_dir}: whose home is this? Give its full path"
        ) from error
    refuse_if_locked(folder.root)
    check_folder(config, folder)
    warnings = check_machine(config)
    check_columns(config)
    if not isinstance(config, SftConfig) and (config.reward.functions or config.reward.remote_url):
        check_functions(config.reward, asks_servers=not dry_run)
    if isinstance(config, RlConfig):
        check_algorithm(config)
        check_models(config)
        if config.ckpt.best_metric_key is not None:
            read_best(folder.best, metric=config.ckpt.best_metric_key)
    actor = config.actor
    tools = processor_of(actor.model_name_or_path, config.data, trust_remote_code=actor.trust_remote_code)
    return Prepared(folder, tools, warnings)


def check_folder(config: AnyConfig, folder: RunFolder) -> None:
    """Whether this run may write there; see `RunFolder.check`."""
    learns = not isinstance(config, EvalConfig)
    resume = not isinstance(config, EvalConfig) and config.ckpt.load_enable
    folder.check(resume=resume, has_checkpoint=bool(checkpoints(folder.checkpoints)), learns=learns)


def _save_settings(config: AnyConfig, folder: RunFolder) -> None:
    with writing(folder.config.name, folder.root):
        dump_yaml(config, folder.config)


@contextmanager
def started(
    config: AnyConfig, folder: RunFolder, warnings: Sequence[str], adapter: AdapterPlan | None = None
) -> Iterator[tuple[RoleBuilder, RunReport]]:
    """A Ray session with the run's plan, and its report; all is stopped at the end, however it comes.

    `warnings` are for people, and come after the plan.
    """
    logger = Logger() if isinstance(config, EvalConfig) else config.logger
    title = f"vlmrl {config.verb}"
    with run_log() as log, naming_checkpoint(folder.checkpoints), ExitStack() as held_folder:
        folder.open()
        with writing(folder.log.name, folder.root):
            log.move_to(folder.log)
        held_folder.enter_context(run_lock(folder.root, on_lost=lambda line: end_at_once(line, 2), notify=print))
        check_folder(config, folder)  # again: until now another run may have held it
        machines = held_folder.enter_context(session())
        check_hardware(config, machines, adapter)
        places = plan(**roles_of(config, machines))
        if isinstance(config, RlConfig):
            check_devices(config.vllm, machines, places)
        machines.roster.dump = log.write
        check_nodes(config, machines, places, folder.root)
        if isinstance(config, EvalConfig) or not config.ckpt.load_enable:  # else it may still be refused
            _save_settings(config, folder)
        report = RunReport(folder, logger=logger, config=config.model_dump(mode="json"), title=title)
        with report, ExitStack() as stack, watched(machines, places) as watch, told_of(machines.roster):
            report.say(describe(places, machines))
            for line in (*checkpoints_planned(config), *warnings):
                report.say(line)
            builder = RoleBuilder(machines, places, stack, watch)
            with builder.ending():
                yield builder, report
