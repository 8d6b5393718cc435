"""`vlmrl eval`: responses to held-out prompts, scored as a run scores them."""

from __future__ import annotations

from vlmrl.cluster.rewards import RewardSources
from vlmrl.commands.preflight import check_data
from vlmrl.commands.run import prepare, started
from vlmrl.config.run import EvalConfig
from vlmrl.observe.transcripts import Transcripts
from vlmrl.system import stops
from vlmrl.trainer.evaluation import evaluate as evaluate_sets
from vlmrl.trainer.evaluation import evaluation_sampling, named


def evaluate(config: EvalConfig, *, dry_run: bool = False) -> None:
    """`vlmrl eval`."""
    folder, _, warnings = prepare(config, dry_run=dry_run)
    if dry_run:
        return check_data(config)
    with started(config, folder, warnings) as (builder, report):
        prompts = builder.prompts(config, report.say)
        sets = named(prompts.evaluation())
        rewarder = RewardSources(builder.rewarder(config, report.say), [])
        engines = builder.engines(config, report)
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
