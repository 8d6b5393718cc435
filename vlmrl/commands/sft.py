"""`vlmrl sft`: supervised fine-tuning on the responses of a dataset."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from vlmrl.cluster.build import RoleBuilder
from vlmrl.cluster.models import RemotePolicy
from vlmrl.cluster.prompts import RemotePrompts
from vlmrl.cluster.rewards import RewardSources
from vlmrl.cluster.sync_plan import plan_sync
from vlmrl.cluster.weight_sync import WeightSync
from vlmrl.commands.preflight import actor_adapter_plan, check_data
from vlmrl.commands.run import prepare, run_session
from vlmrl.commands.stage import Stage, run_stage
from vlmrl.config.num_steps import check_steps
from vlmrl.config.stages import SftConfig
from vlmrl.config.verbs import EvalConfig
from vlmrl.models.adapter_plan import AdapterPlan, vision_trains
from vlmrl.observe.report import RunReport
from vlmrl.observe.transcripts import Transcripts
from vlmrl.rewards.question_labels import label_questions
from vlmrl.trainer.evaluation import evaluate_policy, with_metric_names
from vlmrl.trainer.likelihood import measure_likelihood
from vlmrl.types import Metrics, Prompt


def train_sft(config: SftConfig, *, dry_run: bool = False) -> None:
    """Check the settings, start the model, resume if there is a checkpoint, train, and write the final model."""
    folder, processor, warnings = prepare(config, dry_run=dry_run)
    adapter = actor_adapter_plan(config, processor)
    if dry_run:
        return check_data(config, warnings, adapter)
    with run_session(config, folder, warnings, adapter) as (builder, report):
        prompts = builder.prompts(config, report.say)
        check_steps(config, prompts.num_rows)
        sets = with_metric_names(prompts.evaluation_samples())
        num_rows = prompts.num_rows
        sampling = config.generation
        # Before the model: engines that share its GPUs measure the memory that is free there.
        sampler = None if sampling is None else _Sampler(config, sampling, prompts, builder, report, adapter)
        policy = builder.learners(config, processor, adapter=adapter, num_rows=num_rows, say=report.say).policy
        measure: Callable[[int], Metrics] = partial(measure_likelihood, sets=sets, policy=policy)
        if sampler is not None:
            measure = _both(measure, sampler.evaluation(policy, Transcripts(folder.rollouts, prompts.save_media)))
        stage = Stage(prompts.draw_samples, policy.fit, measure)
        run_stage(stage, config, folder, builder, report, prompts, policy, has_adapter=adapter is not None)


def read_questions(config: SftConfig, prompts: RemotePrompts, say: Callable[[str], None]) -> dict[str, list[Prompt]]:
    """Return the held-out questions that get responses, with labels, by the set's name in metrics.

    Raises DataError if no response could match any label of a set.
    """
    sets = {}
    for name, rows in with_metric_names(prompts.evaluation()).items():
        # With `data.truncate_enable` a conversation is learnt as far as it fits, but its last question may lie behind.
        short = [row for row in rows if len(row.tokens) <= config.data.max_len]
        if num_long := len(rows) - len(short):
            say(f"evaluation set {name}: {num_long} prompts are longer than data.max_len, and get no responses")
        sets[name] = label_questions(name, short, config.reward, say)
    return sets


class _Sampler:
    """Samples and scores responses of the current model to the held-out questions."""

    def __init__(
        self,
        config: SftConfig,
        sampling: EvalConfig,
        prompts: RemotePrompts,
        builder: RoleBuilder,
        report: RunReport,
        adapter: AdapterPlan | None,
    ) -> None:
        """Start engines and reward functions."""
        self._config = sampling
        self._questions = read_questions(config, prompts, report.say)
        self._engines = builder.engines(sampling, report, adapter, pools=config.pools)
        self._reward_sources = RewardSources(builder.rewarder(sampling, report.say), [], say=report.say)
        reaches_vision = vision_trains(config.actor, adapter)
        self._plan = plan_sync(adapter, ds=config.ds, vllm=config.vllm, vision_trains=reaches_vision)

    def evaluation(self, policy: RemotePolicy, transcripts: Transcripts) -> Callable[[int], Metrics]:
        """Return the evaluation of the policy's responses after a step."""
        weight_sync = WeightSync(policy.ranks.group, self._engines, self._plan)

        def measure(step: int) -> Metrics:
            weight_sync.sync(step)
            return evaluate_policy(
                step,
                config=self._config,
                sets=self._questions,
                engine=self._engines,
                rewarder=self._reward_sources,
                policy=policy,
                transcripts=transcripts,
            )

        return measure


def _both(one: Callable[[int], Metrics], other: Callable[[int], Metrics]) -> Callable[[int], Metrics]:
    return lambda step: one(step) | other(step)
