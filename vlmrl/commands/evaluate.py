"""`vlmrl eval`: evaluate a model on held-out prompts, as a run evaluates its policy."""

from __future__ import annotations

from vlmrl.commands.merged_actor import with_merged_actor
from vlmrl.commands.preflight import check_data
from vlmrl.commands.run import prepare, run_session
from vlmrl.config.verbs import EvalConfig
from vlmrl.observe.transcripts import Transcripts
from vlmrl.system import stops
from vlmrl.trainer.evaluation import check_sets, evaluation_sampling, with_metric_names
from vlmrl.trainer.evaluation import evaluate as evaluate_sets


def evaluate(config: EvalConfig, *, dry_run: bool = False, is_quiet: bool = False) -> None:
    """Check the settings, start the engines, sample and score responses, and write metrics and transcripts."""
    folder, processor, warnings = prepare(config, dry_run=dry_run)
    if dry_run:
        return check_data(config, warnings)
    with run_session(config, folder, warnings, is_quiet=is_quiet) as (builder, report):
        prompts = builder.prompts(config, report.say)
        sets = with_metric_names(prompts.evaluation())
        merged = with_merged_actor(config, folder, builder.stack, report.say)
        engines, reward_sources = builder.evaluation_roles(merged, processor, report)
        report.begin(total_steps=0, done=0)
        with report.phase("eval"):
            metrics, responses = evaluate_sets(
                sets,
                engine=engines,
                rewarder=reward_sources,
                sampling=evaluation_sampling(config),
                breakdown_key=config.eval.breakdown_key,
            )
        transcripts = Transcripts(folder.rollouts, prompts.save_media)
        for name, (groups, scores) in responses.items():
            transcripts.write_evaluation(0, name, groups, scores)
        report.evaluation(0, metrics)
        check_sets(config, responses)
        stops.mark_done()
