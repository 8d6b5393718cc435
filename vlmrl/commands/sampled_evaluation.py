"""Evaluation of a supervised stage on responses that the model samples to held-out questions."""

from __future__ import annotations

from collections.abc import Callable

from vlmrl.cluster.models import RemotePolicy
from vlmrl.cluster.rewards import RewardSources
from vlmrl.cluster.sync_plan import plan_sync
from vlmrl.cluster.weight_sync import WeightSync
from vlmrl.commands.questions import read_questions
from vlmrl.commands.stage import StageRun
from vlmrl.config.stages import SamplingConfig
from vlmrl.config.verbs import EvalConfig
from vlmrl.models.adapter_plan import vision_trains
from vlmrl.observe.transcripts import Transcripts
from vlmrl.trainer.evaluation import evaluate_policy
from vlmrl.types import Metrics

Measure = Callable[[int], Metrics]
"""Evaluates the model after a step."""


class Sampler:
    """Samples and scores responses of the current model to the held-out questions."""

    def __init__(self, config: SamplingConfig, sampling: EvalConfig, run: StageRun) -> None:
        """Start engines and reward functions."""
        builder, say, adapter = run.builder, run.report.say, run.adapter
        self._config = sampling
        self._questions = read_questions(config, run.rows, say)
        self._engines = builder.engines(sampling, run.report, adapter, pools=config.pools)
        self._reward_sources = RewardSources(builder.rewarder(sampling, say), [], say=say)
        self._transcripts = Transcripts(run.folder.rollouts, run.rows.save_media)
        reaches_vision = vision_trains(config.actor, adapter)
        self._plan = plan_sync(adapter, ds=config.ds, vllm=config.vllm, vision_trains=reaches_vision)

    def beside(self, measure: Measure, policy: RemotePolicy) -> Measure:
        """Return `measure` together with the evaluation of the policy's responses."""
        weight_sync = WeightSync(policy.ranks.group, self._engines, self._plan)

        def measure_both(step: int) -> Metrics:
            metrics = measure(step)
            weight_sync.sync(step)
            return metrics | evaluate_policy(
                step,
                config=self._config,
                sets=self._questions,
                engine=self._engines,
                rewarder=self._reward_sources,
                policy=policy,
                transcripts=self._transcripts,
            )

        return measure_both


def start_sampler(config: SamplingConfig, run: StageRun) -> Sampler | None:
    """Start what samples responses; None without `eval.generate_enable`.

    Before the model: engines that share its GPUs measure the memory that is free there.
    """
    return None if config.generation is None else Sampler(config, config.generation, run)
