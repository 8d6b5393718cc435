"""Wires a config into roles. The only file that knows every part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vlmrl.agreement import are_alike, largest_gap, noise_floor, rounding
from vlmrl.cluster.device_path import check_devices
from vlmrl.cluster.learners import RemoteCritic, RemotePolicy, RemoteReference
from vlmrl.cluster.placement import plan
from vlmrl.cluster.publish import described
from vlmrl.cluster.roles import RemoteEngines
from vlmrl.cluster.scoring import Judges
from vlmrl.cluster.session import session
from vlmrl.config.ckpt import Logger
from vlmrl.config.dump import dump_yaml
from vlmrl.config.run import EvalConfig, RlConfig, SftConfig
from vlmrl.data.answers import to_samples
from vlmrl.errors import VlmrlError
from vlmrl.evaluation import evaluate as evaluate_sets
from vlmrl.evaluation import named
from vlmrl.judging import Judged
from vlmrl.layouts import check_layouts
from vlmrl.learning.best import read_best
from vlmrl.learning.folders import checkpoints
from vlmrl.models.adapter_plan import AdapterPlan
from vlmrl.noise import NoiseCheck, Paths
from vlmrl.observe.folder import RunFolder
from vlmrl.observe.report import RunReport, parameter_table, save_table
from vlmrl.observe.transcripts import Transcripts
from vlmrl.plugins import Processor, processor_of
from vlmrl.preflight import (
    check_algorithm,
    check_data,
    check_hardware,
    check_models,
    describe,
    plan_of,
    plan_of_critic,
    roles_of,
)
from vlmrl.probe import Probe, question, sampling_of, told
from vlmrl.rewards.combine import check_functions
from vlmrl.role_settings import last_step
from vlmrl.rollout.sampling import Sampling
from vlmrl.saving import Saves
from vlmrl.sight import SightCheck
from vlmrl.stage import Stage
from vlmrl.supervised import fit
from vlmrl.trainer import train
from vlmrl.types import Group, Metrics, Prompt

AnyConfig = RlConfig | SftConfig | EvalConfig

_EVALUATION_SEED = 1_000_003
"""Added to the run's seed: evaluation draws its own numbers, the same before, during and after training."""


def train_rl(config: RlConfig, *, dry_run: bool = False) -> None:
    """`vlmrl rl`."""
    folder, tools = _prepare(config, dry_run=dry_run)
    adapter, critics = plan_of(config, tools), plan_of_critic(config)
    if dry_run:
        return check_data(config)
    with _started(config, folder) as (stage, report):
        prompts = stage.prompts(config, report.say)
        engines, policy, reference, critic, judges = stage.players(
            config, tools, adapter=adapter, critics=critics, num_rows=prompts.num_rows, report=report
        )
        saves = Saves(config, folder, prompts, policy, report, critic)
        done, kl_coef = saves.restore()
        last = last_step(config, prompts.num_rows)
        _begin(report, folder, policy, total_steps=last, done=done)
        transcripts = Transcripts(folder.rollouts, prompts.save_media)
        evaluations = Evaluations(
            config, named(prompts.evaluation()), engines, judges, policy, transcripts, saves, report, last=last
        )
        policy.publish(done)
        probe = adapter_probe(config, tools, engines, policy, adapter)
        sight = sight_check(config, engines, policy, reference, critic, judges)
        noise = noise_check(config, engines, policy, on_gpu=stage.machines.has_gpus, say=report.say)

        def check_publish(version: int) -> Metrics:
            if probe is None:
                return {}
            with report.phase("probe"), policy.uncounted():
                return probe.check(version)

        def check_responses(step: int, groups: Sequence[Group]) -> Metrics:
            found: Metrics = {}
            if step == done + 1:
                with report.phase("layout"):
                    found |= check_layouts(groups, policy.compare_layouts)
            if sight.is_due(step, groups):
                with report.phase("sight"), policy.uncounted():
                    found |= sight.check(groups)
            if noise is not None:
                with report.phase("noise"), policy.uncounted():
                    found |= noise.check(step, groups)
            return found

        def after_step(step: int, judged: Judged) -> Metrics:
            if config.logger.rollouts:
                advantages = judged.experience.advantages
                transcripts.write(step, judged.groups, judged.scores, judged.rewards, advantages)
            return evaluations.after(step)

        if adapter is not None:
            report.say(described(adapter, ds=config.ds, vllm=config.vllm))
            report.say(told(check_publish(done)))
        if done == 0:
            report.evaluation(0, evaluations.at(0))
        train(
            config,
            prompts=prompts,
            engine=engines,
            rewarder=judges,
            policy=policy,
            reference=reference,
            critic=critic,
            report=report,
            check_sight=check_responses,
            check_publish=check_publish,
            after_step=after_step,
            save=partial(evaluations.save, has_adapter=adapter is not None),
            first_step=done + 1,
            last_step=last,
            kl_coef=config.algo.kl.init_coef if kl_coef is None else kl_coef,
        )
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

    def after(self, step: int) -> Metrics:
        """What this step's evaluation measures, if one is due."""
        every = self.config.eval.steps
        if step != self.last and (every <= 0 or step % every):
            return {}
        try:
            return self.at(step)
        except VlmrlError as error:
            kept = "whose model is saved" if step == self.last else "which is saved for --ckpt.load_enable"
            self.failed = type(error)(f"evaluation after step {step}, {kept}: {error}")
            return {}

    def save(self, step: int, kl_coef: float, *, has_adapter: bool) -> None:
        """A checkpoint, if one is due. Where the evaluation failed it is, and ends the run, at the last step with all
        that a run leaves."""
        self.saves.save(step, kl_coef, must=self.failed is not None)
        if self.failed is None:
            return
        if step == self.last:
            self.saves.finish(has_adapter=has_adapter)
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
        self.saves.keep_best(step, metrics)
        return metrics


def train_sft(config: SftConfig, *, dry_run: bool = False) -> None:
    """`vlmrl sft`."""
    folder, tools = _prepare(config, dry_run=dry_run)
    adapter = plan_of(config, tools)
    if dry_run:
        return check_data(config)
    with _started(config, folder) as (stage, report):
        prompts = stage.prompts(config, report.say)
        policy = stage.learners(config, tools, adapter=adapter, num_rows=prompts.num_rows, say=report.say).policy
        saves = Saves(config, folder, prompts, policy, report)
        done, _ = saves.restore()
        last = last_step(config, prompts.num_rows)
        _begin(report, folder, policy, total_steps=last, done=done)

        fit(
            rows=prompts,
            learner=policy,
            report=report,
            batch_size=config.train.batch_size,
            save=saves.save,
            first_step=done + 1,
            last_step=last,
        )
        saves.finish(has_adapter=adapter is not None)


def evaluate(config: EvalConfig, *, dry_run: bool = False) -> None:
    """`vlmrl eval`."""
    folder, _ = _prepare(config, dry_run=dry_run)
    if dry_run:
        return check_data(config)
    with _started(config, folder) as (stage, report):
        prompts = stage.prompts(config, report.say)
        rewarder = Judges(stage.rewarder(config), [])
        engines = stage.engines(config, report)
        report.begin(total_steps=0, done=0)
        sets = named(prompts.evaluation())
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


def sight_check(
    config: RlConfig,
    engines: RemoteEngines,
    policy: RemotePolicy,
    reference: RemoteReference | None,
    critic: RemoteCritic | None,
    judges: Judges,
) -> SightCheck:
    """The check of every path by which this run gets log-probs; and of the critic's values and of reward models, which
    must see as well."""
    paths = {
        "engine": engines.score,
        "old": lambda groups: policy.logprobs(to_samples(groups)),
        # What the first time left in the vision cache is read back now.
        "old_again": lambda groups: policy.logprobs(to_samples(groups)),
        "padded": lambda groups: policy.logprobs(to_samples(groups), layout="padded"),
        "update": lambda groups: policy.logprobs(to_samples(groups), gradient=True),
    }
    if reference is not None:
        paths["reference"] = lambda groups: reference.logprobs(to_samples(groups))
    if critic is not None:
        paths["critic"] = lambda groups: critic.values(to_samples(groups))
    paths |= {f"{model.name}_reward": model.everywhere for model in judges.models}
    own = {"engine", "old", "old_again", "padded", "update"}
    return SightCheck(
        config.train.sight_check_steps, paths=paths, bound=largest_gap(config), foreign=paths.keys() - own
    )


def noise_check(
    config: RlConfig,
    engines: RemoteEngines,
    policy: RemotePolicy,
    *,
    on_gpu: bool,
    say: Callable[[str], None],
) -> NoiseCheck | None:
    """The comparison of engine and trainer by measured noise; None where they differ by choice."""
    if not are_alike(config):
        return None
    is_half = config.ds.param_dtype == "bf16"
    paths = Paths(
        prefill=engines.score,
        padded=lambda groups: policy.logprobs(to_samples(groups), layout="padded"),
        exact=(lambda groups: policy.logprobs(to_samples(groups), layout="padded", exact=True)) if is_half else None,
        layout=None if policy.layout == "padded" else lambda groups: policy.logprobs(to_samples(groups)),
    )
    return NoiseCheck(
        paths,
        floor=noise_floor(config, on_gpu=on_gpu),
        stops=config.vllm.max_logprob_diff is None,
        in_turn=config.vllm.enable_sleep,
        seed=config.train.seed,
        say=say,
    )


def adapter_probe(
    config: RlConfig, tools: Processor, engines: RemoteEngines, policy: RemotePolicy, adapter: AdapterPlan | None
) -> Probe | None:
    """The check of what every publish of adapters did; None where there are none."""
    if adapter is None:
        return None
    return Probe(
        engines=engines,
        learner=policy,
        question=partial(question, processor=tools, data=config.data),
        sampling=sampling_of(config.rollout, seed=config.train.seed),
        bound=largest_gap(config),
        floor=rounding(config),
        is_apart=adapter.fits_engine,
    )


def _begin(report: RunReport, folder: RunFolder, policy: RemotePolicy, *, total_steps: int, done: int) -> None:
    rows = policy.table()
    save_table(folder.parameters, rows)
    report.say(parameter_table(rows))
    if done:
        report.say(f"continuing after step {done}")
    report.begin(total_steps=total_steps, done=done)


def evaluation_sampling(config: RlConfig | EvalConfig) -> Sampling:
    """How evaluation prompts are answered."""
    return Sampling(
        n=config.eval.n_samples_per_prompt,
        temperature=config.eval.temperature,
        top_p=1.0,
        max_new_tokens=config.rollout.max_new_tokens,
        seed=config.train.seed + _EVALUATION_SEED,
    )


def _prepare(config: AnyConfig, *, dry_run: bool) -> tuple[RunFolder, Processor]:
    """What can be checked before anything starts."""
    # Ranks on a cluster that the user started stand in another folder.
    folder = RunFolder(Path(config.ckpt.output_dir).expanduser().absolute())
    resume = not isinstance(config, EvalConfig) and config.ckpt.load_enable
    folder.check(resume=resume, has_checkpoint=bool(checkpoints(folder.checkpoints)))
    if not isinstance(config, SftConfig) and (config.reward.functions or config.reward.remote_url):
        check_functions(config.reward, asks_servers=not dry_run)
    if isinstance(config, RlConfig):
        check_algorithm(config)
        check_models(config)
        if config.ckpt.best_metric_key is not None:
            read_best(folder.best, metric=config.ckpt.best_metric_key)
    actor = config.actor
    return folder, processor_of(actor.model_name_or_path, config.data, trust_remote_code=actor.trust_remote_code)


@contextmanager
def _started(config: AnyConfig, folder: RunFolder) -> Iterator[tuple[Stage, RunReport]]:
    """A Ray session with the run's plan, and its report; all is stopped at the end, however it comes."""
    logger = Logger() if isinstance(config, EvalConfig) else config.logger
    title = f"vlmrl {config.verb}"
    with session() as machines:
        check_hardware(config, machines)
        places = plan(**roles_of(config, machines))
        if isinstance(config, RlConfig):
            check_devices(config.vllm, machines, places)
        folder.open()
        dump_yaml(config, folder.config)
        report = RunReport(folder, logger=logger, config=config.model_dump(mode="json"), title=title)
        with report, ExitStack() as stack:
            report.say(describe(places, machines))
            yield Stage(machines, places, stack), report
