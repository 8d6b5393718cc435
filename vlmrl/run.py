"""Wires a config into roles. The only file that knows every part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from vlmrl import stops
from vlmrl.checks import Checks, adapter_probe, noise_check, sight_check
from vlmrl.cluster.deaths import told_of
from vlmrl.cluster.device_path import check_devices
from vlmrl.cluster.learners import RemotePolicy
from vlmrl.cluster.nodes import check_nodes
from vlmrl.cluster.placement import plan
from vlmrl.cluster.publish import described
from vlmrl.cluster.roles import RemoteEngines
from vlmrl.cluster.scoring import Judges
from vlmrl.cluster.session import session
from vlmrl.cluster.watch import watched
from vlmrl.config.ckpt import Logger
from vlmrl.config.dump import dump_yaml
from vlmrl.config.run import EvalConfig, RlConfig, SftConfig
from vlmrl.errors import ConfigError, RewardError, StorageError, VlmrlError
from vlmrl.evaluation import evaluate as evaluate_sets
from vlmrl.evaluation import named
from vlmrl.judging import Judged
from vlmrl.learning.best import read_best
from vlmrl.learning.folders import checkpoints
from vlmrl.models.adapter_plan import AdapterPlan
from vlmrl.observe.folder import RunFolder
from vlmrl.observe.lock import held, refuse_if_live
from vlmrl.observe.log import logged
from vlmrl.observe.report import RunReport, parameter_table, save_table
from vlmrl.observe.transcripts import Transcripts
from vlmrl.plugins import Processor, processor_of
from vlmrl.preflight import (
    check_algorithm,
    check_columns,
    check_data,
    check_hardware,
    check_machine,
    check_models,
    checkpoints_planned,
    describe,
    plan_of,
    plan_of_critic,
    roles_of,
)
from vlmrl.probe import told
from vlmrl.rewards.combine import check_functions
from vlmrl.role_settings import check_steps, last_step_from
from vlmrl.rollout.sampling import Sampling
from vlmrl.saving import Saves, naming_checkpoint
from vlmrl.stage import Stage
from vlmrl.stops import Stopped, end_at_once
from vlmrl.storage import writing
from vlmrl.supervised import fit
from vlmrl.trainer import Carried, Course, Ending, train
from vlmrl.types import Metrics, Prompt

AnyConfig = RlConfig | SftConfig | EvalConfig

_EVALUATION_SEED = 1_000_003
"""Added to the run's seed: evaluation draws its own numbers, the same before, during and after training."""


def train_rl(config: RlConfig, *, dry_run: bool = False) -> None:
    """`vlmrl rl`."""
    folder, tools, warnings = _prepare(config, dry_run=dry_run)
    adapter, critics = plan_of(config, tools), plan_of_critic(config)
    if dry_run:
        return check_data(config, adapter)
    with _started(config, folder, warnings, adapter) as (stage, report):
        prompts = stage.prompts(config, report.say)
        check_steps(config, prompts.num_rows)
        sets = named(prompts.evaluation())  # before engines start: its rows are checked like those of training
        engines, policy, reference, critic, judges = stage.players(
            config, tools, adapter=adapter, critics=critics, num_rows=prompts.num_rows, report=report
        )
        saves = Saves(config, folder, prompts, policy, report, critic)
        done, carried = saves.restore()
        last = last_step_from(config, prompts.num_rows, done=done, drawn=saves.drawn)
        saves.look_ahead(done=done, last=last)
        _begin(config, report, folder, policy, last=last, done=done)
        course = Course(prompts.num_rows * config.train.num_episodes, drawn=saves.drawn)
        transcripts = Transcripts(folder.rollouts, prompts.save_media)
        evaluations = Evaluations(config, sets, engines, judges, policy, transcripts, saves, report, last=last)
        policy.publish(done)
        checks = Checks(
            report,
            policy,
            sight=sight_check(config, engines, policy, reference, critic, judges),
            noise=noise_check(config, engines, policy, on_gpu=stage.machines.has_gpus, say=report.say),
            probe=adapter_probe(config, tools, engines, policy, adapter),
            first_step=done + 1,
        )

        def after_step(step: int, judged: Judged) -> Metrics:
            if config.logger.rollouts:
                advantages = judged.experience.advantages
                transcripts.write(
                    step, judged.groups, judged.scores, judged.rewards, advantages, left_out=judged.left_out
                )
            return evaluations.after(step)

        if adapter is not None:
            report.say(described(adapter, ds=config.ds, vllm=config.vllm))
            report.say(told(checks.published(done)))
        stage.stack.enter_context(saves.kept())
        if done == 0 or saves.owes_evaluation:
            report.evaluation(done, evaluations.at(done))
        try:
            ending = train(
                config,
                prompts=prompts,
                engine=engines,
                rewarder=judges,
                policy=policy,
                reference=reference,
                critic=critic,
                report=report,
                check_responses=checks.responses,
                check_publish=checks.published,
                after_step=after_step,
                save=partial(evaluations.save, has_adapter=adapter is not None),
                first_step=done + 1,
                last_step=last,
                course=course,
                carried=carried or Carried(config.algo.kl.init_coef),
            )
        except RewardError as error:
            raise evaluations.stopped(error) from None
        evaluations.end(ending, has_adapter=adapter is not None)
        saves.finish(has_adapter=adapter is not None)


@dataclass
class Evaluations:
    """The evaluations of a run: when they are due, what they write, and what becomes of one that fails."""

    config: RlConfig
    sets: Mapping[str, Sequence[Prompt]]
    engines: RemoteEngines
    judges: Judges
    policy: RemotePolicy
    transcripts: Transcripts
    saves: Saves
    report: RunReport
    last: int
    """Step of the run."""
    failed: VlmrlError | None = None
    """Why the run is to end, once what it has learnt is saved."""
    evaluated: int | None = None
    """The newest step with an evaluation."""

    def after(self, step: int) -> Metrics:
        """What this step's evaluation measures, if one is due."""
        every = self.config.eval.steps
        if step != self.last and (every <= 0 or step % every):
            return {}
        try:
            with stops.abandonable():
                return self._tried(step, is_last=step == self.last)
        except Stopped:  # the step itself is done, and is saved before the run ends
            self.saves.owes_evaluation = True
            return {}

    def _tried(self, step: int, *, is_last: bool) -> Metrics:
        try:
            return self.at(step)
        except VlmrlError as error:
            kept = "whose model is saved" if is_last else "which is saved for --ckpt.load_enable"
            self.failed = type(error)(f"evaluation after step {step}, {kept}: {error}")
            return {}

    def end(self, ending: Ending, *, has_adapter: bool) -> None:
        """What a run has after its last step, where nobody knew beforehand which that is."""
        if ending.why is None:
            return
        self.report.say(ending.why)
        metrics = self._tried(ending.step, is_last=True) if ending.step != self.evaluated else {}
        if ending.left_out:
            metrics = metrics | {"data/left_out": float(ending.left_out)}
        self.report.evaluation(ending.step, metrics)
        if ending.is_solved and self.config.ckpt.save_steps > 0:
            self.saves.save_finished()
        if self.failed is not None:
            self.saves.finish(has_adapter=has_adapter)
            raise self.failed

    def stopped(self, error: RewardError) -> RewardError:
        """The error, with the checkpoint from which another run can go on; nothing that was learnt is lost.

        Of an evaluation that failed the step is saved already.
        """
        try:
            saved = None if error is self.failed else self.saves.save_finished()
        except StorageError as full:  # it must not hide what ended the run
            return type(error)(f"{error}; its last step is not saved: {full}")
        if saved is None:
            return error
        return type(error)(f"{error}; all before it is in {saved}: go on from there with --ckpt.load_enable")

    def save(self, step: int, carried: Carried, *, has_adapter: bool) -> None:
        """A checkpoint, if one is due. Where the evaluation failed it is, and ends the run, at the last step with all
        that a run leaves."""
        try:
            self.saves.save(step, carried, must=self.failed is not None)
            if self.failed is not None and step == self.last:
                self.saves.finish(has_adapter=has_adapter)
        except StorageError as full:
            if self.failed is None:
                raise
            self.failed = type(self.failed)(f"{self.failed}; but {full}")
        if self.failed is not None:
            raise self.failed

    def at(self, step: int) -> Metrics:
        """Evaluate the policy of now."""
        with self.report.phase("eval"), self.policy.uncounted():
            metrics, answers = evaluate_sets(
                self.sets,
                engine=self.engines,
                rewarder=self.judges,
                sampling=evaluation_sampling(self.config),
                breakdown_key=self.config.eval.breakdown_key,
            )
            for name, (groups, scores) in answers.items():
                self.transcripts.write_evaluation(step, name, groups, scores)
        with stops.finishing():
            self.saves.keep_best(step, metrics)
        self.evaluated, self.saves.owes_evaluation = step, False
        return metrics


def train_sft(config: SftConfig, *, dry_run: bool = False) -> None:
    """`vlmrl sft`."""
    folder, tools, warnings = _prepare(config, dry_run=dry_run)
    adapter = plan_of(config, tools)
    if dry_run:
        return check_data(config)
    with _started(config, folder, warnings) as (stage, report):
        prompts = stage.prompts(config, report.say)
        check_steps(config, prompts.num_rows)
        policy = stage.learners(config, tools, adapter=adapter, num_rows=prompts.num_rows, say=report.say).policy
        saves = Saves(config, folder, prompts, policy, report)
        done, _ = saves.restore()
        last = last_step_from(config, prompts.num_rows, done=done, drawn=saves.drawn)
        saves.look_ahead(done=done, last=last)
        _begin(config, report, folder, policy, last=last, done=done)
        stage.stack.enter_context(saves.kept())
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


def evaluate(config: EvalConfig, *, dry_run: bool = False) -> None:
    """`vlmrl eval`."""
    folder, _, warnings = _prepare(config, dry_run=dry_run)
    if dry_run:
        return check_data(config)
    with _started(config, folder, warnings) as (stage, report):
        prompts = stage.prompts(config, report.say)
        sets = named(prompts.evaluation())
        rewarder = Judges(stage.rewarder(config, report.say), [])
        engines = stage.engines(config, report)
        report.begin(total_steps=0, done=0)
        with report.phase("eval"):
            metrics, answers = evaluate_sets(
                sets,
                engine=engines,
                rewarder=rewarder,
                sampling=evaluation_sampling(config),
                breakdown_key=config.eval.breakdown_key,
            )
        transcripts = Transcripts(folder.rollouts, prompts.save_media)
        for name, (groups, scores) in answers.items():
            transcripts.write_evaluation(0, name, groups, scores)
        report.evaluation(0, metrics)
        stops.done()


def _begin(
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


def evaluation_sampling(config: RlConfig | EvalConfig) -> Sampling:
    """How evaluation prompts are answered."""
    return Sampling(
        n=config.eval.n_samples_per_prompt,
        temperature=config.eval.temperature,
        top_p=1.0,
        max_new_tokens=config.rollout.max_new_tokens,
        seed=config.train.seed + _EVALUATION_SEED,
    )


class Prepared(NamedTuple):
    """What is known before anything starts."""

    folder: RunFolder
    tools: Processor
    warnings: list[str]
    """What this machine is short of, but will do: a line each."""


def _prepare(config: AnyConfig, *, dry_run: bool) -> Prepared:
    """Check what can be checked before anything starts."""
    try:
        # Ranks on a cluster that the user started stand in another folder.
        folder = RunFolder(Path(config.ckpt.output_dir).expanduser().absolute())
    except RuntimeError as error:  # no such user, or no home
        raise ConfigError(
            f"ckpt.output_dir {config.ckpt.output_dir}: whose home is this? Give its full path"
        ) from error
    refuse_if_live(folder.root)
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
def _started(
    config: AnyConfig, folder: RunFolder, warnings: Sequence[str], adapter: AdapterPlan | None = None
) -> Iterator[tuple[Stage, RunReport]]:
    """A Ray session with the run's plan, and its report; all is stopped at the end, however it comes.

    `warnings` are for people, and come after the plan.
    """
    logger = Logger() if isinstance(config, EvalConfig) else config.logger
    title = f"vlmrl {config.verb}"
    with logged() as log, naming_checkpoint(folder.checkpoints), ExitStack() as held_folder:
        folder.open()
        with writing(folder.log.name, folder.root):
            log.keep_in(folder.log)
        held_folder.enter_context(held(folder.root, lost=lambda line: end_at_once(line, 2), say=print))
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
            stage = Stage(machines, places, stack, watch)
            with stage.ending():
                yield stage, report
