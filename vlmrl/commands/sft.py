"""`vlmrl sft`: supervised fine-tuning on the responses of a dataset."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from vlmrl.cluster.models import RemotePolicy
from vlmrl.cluster.prompts import RemotePrompts
from vlmrl.cluster.rewards import RewardSources
from vlmrl.cluster.sync_plan import plan_sync
from vlmrl.cluster.weight_sync import WeightSync
from vlmrl.commands.stage import Stage, StageRun, run_stage
from vlmrl.config.stages import SftConfig
from vlmrl.config.verbs import EvalConfig
from vlmrl.models.adapter_plan import vision_trains
from vlmrl.observe.transcripts import Transcripts
from vlmrl.rewards.question_labels import label_questions
from vlmrl.trainer.evaluation import evaluate_policy, with_metric_names
from vlmrl.trainer.likelihood import measure_likelihood
from vlmrl.types import Metrics, Prompt


def train_sft(config: SftConfig, *, dry_run: bool = False) -> None:
    """Check the settings, start the model, resume if there is a checkpoint, train, and write the final model."""
    run_stage(config, partial(_start, config), dry_run=dry_run)


def _start(config: SftConfig, run: StageRun) -> Stage:
    rows, sampling = run.rows, config.generation
    sets = with_metric_names(rows.evaluation_samples())
    # Before the model: engines that share its GPUs measure the memory that is free there.
    sampler = None if sampling is None else _Sampler(config, sampling, run)
    learners = run.builder.learners(
        config, run.processor, adapter=run.adapter, num_rows=run.num_rows, say=run.report.say
    )
    policy = learners.policy
    measure: Callable[[int], Metrics] = partial(measure_likelihood, sets=sets, policy=policy)
    if sampler is not None:
        measure = _both(measure, sampler.evaluation(policy, Transcripts(run.folder.rollouts, rows.save_media)))
    return Stage(policy, rows.draw_samples, policy.fit, measure)


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

    def __init__(self, config: SftConfig, sampling: EvalConfig, run: StageRun) -> None:
        """Start engines and reward functions."""
        builder, say, adapter = run.builder, run.report.say, run.adapter
        self._config = sampling
        self._questions = read_questions(config, run.rows, say)
        self._engines = builder.engines(sampling, run.report, adapter, pools=config.pools)
        self._reward_sources = RewardSources(builder.rewarder(sampling, say), [], say=say)
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
